"""Evaluation of a team on held-out items.

Modules:
    evaluate    the plan by which a team is measured, and how good it is
    inference   who answers: the team, or an inference-time baseline
    inference_baselines  those baselines by name, and their settings
    outcome     what the statistics need of one answer
    returns     the discounted return, which certificates are about
    statistics  avg@k, pass@k, majorities, and their errors
    result      what `eval` reports
    compare     two evaluations on the same items
    contents    what the recipe only names, by its hash
    commands    what `eval` and `ask` do with a stored team
"""
