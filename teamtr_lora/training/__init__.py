"""Training: the stage loop, one agent's update, what is measured on the way, and the run directory it is kept in.

The loop:
    trainer          TeamTRTrainer, the Python front door; the command line goes through it too
    stage            THE loop: one stage after another, one agent's update after another
    run              the loop's steps: roll out, update, publish, record, evaluate, checkpoint
    events           callbacks at the loop's natural points
One update:
    update           AgentUpdater: advantages, hold-out, optimise, gate, accept or put back
    optimise         maximises the clipped surrogate, with penalty and early stop
    optimizers       the optimisers, and their state as plain tensors
    gate             KL and surrogate gain of a candidate on held-out messages
    scoring          forward passes over one agent's messages
    packing          episodes of a group in one row, their common prefix once
    importance       trajectory weights of episodes that are used again
    floor            the smallest KL that a pass can measure
    terms            an accepted candidate's terms of its certificate
What is kept:
    run_dir          the run directory: what lies where, and which recipe it belongs to
    checkpoint       checkpoints, and the state that a resumed run goes on from
    metrics          the rows of metrics.jsonl, every field described; the log itself
    rows             from an update's outcome to its row
    diagnostic_rows  the diagnostics fields of an update's row
Diagnostics:
    run_diagnostics  when a run measures itself, and what goes into the row
    diagnostics      what an update's own numbers give: spread, monitors, drift of contexts
    probe            an update seen from episodes that nobody learns from
    fisher           per-message gradients, and what thm:info-lower-stage makes of them
Commands:
    plan             `plan`: what a recipe costs, without weights
    certify          `certify`: improvement certificates of a run, from its directory
    certified        what it finds: bounds of stages and updates beside what was measured
    diagnose         `diagnose`: the tables of a run's diagnostics, from its directory
"""
