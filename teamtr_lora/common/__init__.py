"""What every room may use: the one error users see, files written whole, the users' own code, how this program was started.

Modules:
    errors      UserError: a mistake the user can fix
    files       writing so that a reader never sees half a file
    foreign_files  reading what others wrote: plain files only, JSON without surprises
    locks       locks between processes
    code_paths  functions that a recipe names
    imported_files  hashes of the files that a module of the user's own imports
    help_page   settings classes whose help() is a page
    settings    the strict base of every section of a recipe
    trust       what the user has said about programs of a dataset, and which hosts are this machine
    visible     text from elsewhere on a terminal: what would steer it is shown
    program     what to type to run this program again, and what settings are called there
    consoles    where the program prints
    ranks       the processes that work on one run together
    quantities  times and counts as people read them
    flat        nested mappings as one
    paired      intervals of means over items, and paired tests
"""
