"""What every task is made of.

Modules:
    background      coroutines of environments and rewards, on one event loop
    bench           benchmark tasks: items from a file, the hub or a generator
    data_files      rows of local files and hub datasets
    drawn           items that a random generator makes
    forms           what verifiers need in an item's data
    order           the order in which training items are drawn
    overlap         items in both splits
    recorded        what an agent said, from the rows of a file
    returned        what the methods of a user's own task may return
    responder       who answers the team: suspects, referees, customers
    rewards         users' reward functions
    sandbox         runs checking programs that came with a dataset
    sandbox_child   runs one program, inside its process
    sandbox_filter  the system calls that such a process may make
    sandbox_start   the server that forks those processes, and the walls around it
    score           scoring a file of responses
    task            the contract: items, an interaction, a verifier
    task_settings   the keys of the recipe's `task` section that tasks share
"""
