"""The room of finished runs opened again: their models as pictures of answers, and as folders to take away."""
