"""What the commands print: the results of the rooms below as text and tables on a terminal.

Modules:
    console        the console of all of them: no text from elsewhere steers the terminal
    summary        what `train`, `ask` and `plan` print when they are done; a progress bar for the rest
    evaluation     `eval`
    certificates   `certify`
    diagnostics    `diagnose`
    swap           `swap` and `rebase`, at work and done
    runs_table     `runs`
    registry       `adapters`
    hub_transfers  `push` and `pull`
    tasks          `tasks` and `score`
    tables         tables, and numbers in them
    keys           `keys`: the recipe's keys
"""
