"""What finished runs say, and what a recipe will cost.

plan       `plan`: what a recipe costs, without weights
expected_time  the wall-clock part of it, from speeds that a run has logged
shares     what each of several processes does in it
certify    `certify`: improvement certificates of a run, from its directory
certified  what it finds: bounds of stages and updates beside what was measured
verdict    what both say first, in plain words
diagnose   `diagnose`: the tables of a run's diagnostics, from its directory
"""
