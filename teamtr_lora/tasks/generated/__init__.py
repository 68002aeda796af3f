"""Tasks that make their own items.

Modules:
    column_sum      adding by columns, one a message: the embedded task
    countdown       reach a target with the given numbers
    small           arithmetic, products, largest, letter_count
"""
