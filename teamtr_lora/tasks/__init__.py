"""Tasks: where items come from, how they answer back, how they are scored.

Modules:
    table           the one list of task families: add a task by one file and its line there
    dataset         the user's prompts and rewards
    custom          the user's own environments: those that a recipe names, those that a script passes
    generated/      tasks that make their own items
    benchmarks/     published benchmarks
    machinery/      what every task is made of
"""

from teamtr_lora.tasks.machinery.order import DataOrder
from teamtr_lora.tasks.machinery.rewards import RewardError, Rewards
from teamtr_lora.tasks.machinery.task import AskedTask, Feedback, Interaction, Item, Items, Task

__all__ = ["AskedTask", "DataOrder", "Feedback", "Interaction", "Item", "Items", "RewardError", "Rewards", "Task"]
