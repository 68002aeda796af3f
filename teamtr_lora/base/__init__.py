"""The frozen model: where it comes from, how it is loaded, the adapters on it and their versions."""
