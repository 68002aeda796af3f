"""Baselines trained by other people's tools, on the same task, base, adapter and budget, into the same run directory.

Modules:
    trl_baseline  one agent trained by TRL's GRPOTrainer in the place of a team
    algorithms    what each baseline is as settings of TRL's trainer
    single        the recipe of the one agent, and the team's budget that it is given
    bridge        an episode of one agent as the sequence that TRL learns from
    measure       how far TRL moved the agent in one update
    record        baseline.json: what a baseline's run is and how far it is
"""
