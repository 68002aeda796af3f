"""What shows runs.

Modules:
    live  while a run trains: a line an update, a line a stage, a progress bar
"""
