"""Runs on disk: the only room that knows the names and the formats of the files in a run directory.

Reading (none of it needs torch):
    layout           what lies where; links are refused here
    stored_run       `read_run`: a run directory as a StoredRun
    metrics          the rows of metrics.jsonl, field by field, and `read_rows`
    diagnostic_rows  the diagnostics' fields of an update's row
    history          how a run's adapters came to be, and how its team does
    follow           the rows of a run that is at work, as they come
    standing         how the runs in a folder stand, a line each
    run_state        where a run is, out of its newest checkpoint
Writing:
    run_dir          RunDir: whose directory it is, and what is written to it
    rollout_store    episodes that later updates learn from again
    checkpoint       checkpoints with their tensors; imports torch
    work             what is finished of a swap or a rebase in progress; imports torch
    transcripts      how an episode is written down
    evaluations      evaluations: in a run's folder, or in one of their own
"""
