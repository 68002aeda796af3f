"""Published benchmarks: items of a file or the hub, or generated in their form.

Modules:
    arbench         arbench_dc, arbench_sp
    autologi        open puzzles checked by programs
    autologi_maker  makes such puzzles
    blocksworld     the blocks world: states, actions, plans
    guessing        arbench_gn
    math_answer     what a response states as its answer
    math_pool       processes that compare answers, under a time limit
    math_tasks      gsm8k, math500, aime24, aime25, dapo_math
    math_units      numbers with their units
    math_worker     one of them: symbolic equality
    planbench       planbench_blocksworld
    tau2            tau2_retail, tau2_airline
    tau2_airline    the airline tools
    tau2_files      a domain's database, policy and split
    tau2_retail     the retail tools
    tau2_tools      what the tools of both domains share
    zebra           zebralogic, zebra: logic grids
    zebra_maker     makes grids with one solution
    zebra_solver    counts a grid's solutions
"""
