"""What people look at: the live view of a run."""
