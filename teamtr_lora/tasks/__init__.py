"""Tasks: where items come from, how they answer back, how they are scored.

Every task:
    task            the contract: items, an interaction, a verifier
    build           from the recipe's `task` section to a task
    bench           benchmark tasks: items from a file, the hub or a generator
    forms           what verifiers need in an item's data
    overlap         items in both splits
    order           the order in which training items are drawn
    rewards         users' reward functions
    responder       who answers the team: suspects, referees, customers
    recorded        what an agent said, from the rows of a file
    score           scoring a file of responses
Generated:
    column_sum      adding by columns, one a message: the embedded task
    small           arithmetic, products, largest, letter_count
    countdown       reach a target with the given numbers
Rows of a file or the hub:
    dataset         the user's prompts and rewards
    math_tasks      gsm8k, math500, aime24, aime25, dapo_math
    math_answer     what a response states as its answer
    math_units      numbers with their units
    math_pool       processes that compare answers, under a time limit
    math_worker     one of them: symbolic equality
    arbench         arbench_dc, arbench_sp
    tau2            tau2_retail, tau2_airline
    tau2_files      a domain's database, policy and split
    tau2_tools      what the tools of both domains share
    tau2_retail     the retail tools
    tau2_airline    the airline tools
Rows, or generated:
    zebra           zebralogic, zebra: logic grids
    zebra_maker     makes grids with one solution
    zebra_solver    counts a grid's solutions
    autologi        open puzzles checked by programs
    autologi_maker  makes such puzzles
    sandbox         runs checking programs that came with a dataset
    sandbox_start   the sandbox's process, before it has read anything
    sandbox_child   inside the sandbox's process
    planbench       planbench_blocksworld
    blocksworld     the blocks world: states, actions, plans
    guessing        arbench_gn
"""

from teamtr_lora.tasks.build import build_task
from teamtr_lora.tasks.order import DataOrder
from teamtr_lora.tasks.rewards import RewardError, Rewards
from teamtr_lora.tasks.task import Feedback, Interaction, Item, Items, Task

__all__ = ["DataOrder", "Feedback", "Interaction", "Item", "Items", "RewardError", "Rewards", "Task", "build_task"]
