"""What shows runs."""
