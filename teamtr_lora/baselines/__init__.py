"""Baselines trained by other people's tools, on the same task, base, adapter and budget, into the same run directory.

trl_baseline  `baseline`: one agent trained by TRL's GRPOTrainer in the place of a team
single        the recipe of that agent, and the team's budget that it is given
algorithms    what each baseline is as settings of TRL
bridge        between our episodes and TRL's trainer
record        what a baseline's run is and how far it is
"""
