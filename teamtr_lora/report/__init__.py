"""What people look at: what the rooms below return, as text on a terminal.

Modules:
    live          while a run trains: a line an update, a line a stage, a progress bar
    summary       what `train`, `ask` and `plan` print when they are done; a progress bar for the rest
    evaluation    `eval`
    certificates  `certify`
    diagnostics   `diagnose`
    swap          `swap` and `rebase`, at work and done
    registry      `adapters`
    hub_transfers `push` and `pull`
    tasks         `tasks` and `score`
    keys          `keys`: the recipe's keys
"""
