"""Tasks: where items come from, how they answer back, how they are scored.

build           from the recipe's `task` section to a task
dataset         the user's prompts and rewards
generated/      tasks that make their own items
benchmarks/     published benchmarks
machinery/      what every task is made of
"""

from teamtr_lora.tasks.build import build_task
from teamtr_lora.tasks.machinery.order import DataOrder
from teamtr_lora.tasks.machinery.rewards import RewardError, Rewards
from teamtr_lora.tasks.machinery.task import Feedback, Interaction, Item, Items, Task

__all__ = ["DataOrder", "Feedback", "Interaction", "Item", "Items", "RewardError", "Rewards", "Task", "build_task"]
