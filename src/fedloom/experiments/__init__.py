"""The room of what opens finished runs and trains or looks further, and of what runs the cells of a grid."""
