"""Training: the stage loop, one agent's update, what is measured on the way.

The loop:
    trainer          TeamTRTrainer, the Python front door; the command line goes through it too
    stage            THE loop: one stage after another, one agent's update after another
    run              the loop's steps: roll out, update, publish, record, evaluate, checkpoint
    saving           what a run writes beside its next update: versions, then the checkpoint that names them
    stage_rollouts   the episodes that a stage's updates learn from
    window           earlier rollouts that are learned from again, and their weights
    run_context      what all parts of a run work with
    cpu_processes    how many processes train a recipe on a CPU
    events           callbacks at the loop's natural points
    live_view        while a run trains: a line an update, a line a stage, a progress bar
    idle_stage       what to say of a stage that taught nothing
One update, in the order in which to read it; its formulas are in algorithm/, its variants in algorithm/variants/:
    update           the story: advantages, division, optimization, judgement, accept or put back
    batches          episodes to micro-batches: tokens, and which of them belongs to which message
    scoring          forward passes over one agent's messages
    optimize         the steps on the clipped surrogate, with penalty and early stop
    gate             KL and surrogate gain of a candidate on held-out messages, and how much of it is kept
    dials            what an update says for the next one of its agent
Around it:
    row_layout       how sequences lie in a micro-batch: padded or end to end, the common prefix of a group once
    microbatch_size  how many tokens a forward pass takes
    phase_clock      where an update's time goes
    optimizers       building the optimizers, and their state as plain tensors
    floor            the smallest KL that a pass can measure
    outside_step     a step of somebody else's trainer, measured as the gate measures ours
    team_spec        TeamSpec, a team as a script describes it
    script_run       a script's own rows and rewards, as a recipe would name them
    calibrate        a short run that is thrown away, for this machine's speeds
What is kept:
    recording        rows, callbacks, trackers, transcripts and counts
    rows             from an update's outcome to its row, and why it was not taken
    tracking         what experiment trackers are given
    token_marks      what transcripts show of single tokens
    certificate_terms  an accepted candidate's terms of its certificate
Diagnostics:
    run_diagnostics  when a run measures itself, and what goes into the row
    update_diagnostics  what an update's own numbers give: spread, monitors, drift of contexts
    staleness_probe  an update seen on extra episodes that nobody learns from
    fisher           per-message gradients, and what thm:info-lower-stage makes of them
"""
