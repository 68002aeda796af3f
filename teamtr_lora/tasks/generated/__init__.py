"""Tasks that make their own items.

Modules:
    column_sum      adding by columns, one a message: the embedded task
    countdown       reach a target with the given numbers
    distinct        every agent names a digit of its own; what is right depends on the others
    small           arithmetic, products, largest, letter_count
"""
