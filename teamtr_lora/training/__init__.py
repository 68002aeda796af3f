"""Training: the stage loop, one agent's update, checkpoints and metrics."""
