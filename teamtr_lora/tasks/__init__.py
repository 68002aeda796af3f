"""Tasks: where items come from, how they answer back, how they are scored."""

from teamtr_lora.tasks.build import build_task
from teamtr_lora.tasks.order import DataOrder
from teamtr_lora.tasks.rewards import RewardError, Rewards
from teamtr_lora.tasks.task import Feedback, Interaction, Item, Items, Task

__all__ = ["DataOrder", "Feedback", "Interaction", "Item", "Items", "RewardError", "Rewards", "Task", "build_task"]
