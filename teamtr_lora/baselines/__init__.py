"""Baselines trained by other people's tools, on the same task, base, adapter and budget, into the same run directory."""
