"""What is predicted: the losses, heads and metrics of one task."""
