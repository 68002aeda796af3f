"""Training: the stage loop, one agent's update, what is measured on the way.

The loop:
    trainer          TeamTRTrainer, the Python front door; the command line goes through it too
    stage            THE loop: one stage after another, one agent's update after another
    run              the loop's steps: roll out, update, publish, record, evaluate, checkpoint
    events           callbacks at the loop's natural points
One update:
    update           AgentUpdater: advantages, hold-out, optimize, gate, accept or put back
    optimize         maximises the clipped surrogate, with penalty and early stop
    optimizers       the optimizers, and their state as plain tensors
    gate             KL and surrogate gain of a candidate on held-out messages
    scoring          forward passes over one agent's messages
    packing          episodes of a group in one row, their common prefix once
    importance       trajectory weights of episodes that are used again
    floor            the smallest KL that a pass can measure
    certificate_terms  an accepted candidate's terms of its certificate
What is kept:
    rows             from an update's outcome to its row
Diagnostics:
    run_diagnostics  when a run measures itself, and what goes into the row
    update_diagnostics  what an update's own numbers give: spread, monitors, drift of contexts
    staleness_probe  an update seen from episodes that nobody learns from
    fisher           per-message gradients, and what thm:info-lower-stage makes of them
"""
