"""teamtr-lora: trust-region training of teams of LoRA agents on one frozen base.

TeamTRTrainer   trains a team on your dataset and reward functions, on your own environment (task=), or on a recipe
                (TeamTRTrainer.from_recipe)
TeamSpec        the team: the base, the agents, who speaks when
TeamTRConfig    the settings: stages, learning rate, radius of the trust region, ...
TrainSummary    what `train` returns: the run directory, the updates, the accuracies
Task            an environment of your own: its items, who answers the team, how episodes are scored
Item            one problem of a task
Interaction     what answers the team in one episode; each message gets a Feedback
Feedback        the answer to one message: text, reward, whether it is over, which agent earned what
ask_team        plays one episode of a stored team on your own question, and returns it
evaluate_team   measures a stored team of a recipe on held-out items; EvalOptions says how
load_recipe     reads a recipe file into a Recipe
UserError       a mistake that you can fix, in one line; RecipeError (all problems of the settings at once) is one

The documentation is in the package: `teamtr-lora docs` lists its topics, `teamtr-lora docs getting_started` is where to begin.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from teamtr_lora.common.errors import UserError

if TYPE_CHECKING:
    from teamtr_lora.evaluation.commands import EvalOptions, ask_team, evaluate_team
    from teamtr_lora.recipe import Recipe, RecipeError, TeamTRConfig, load_recipe
    from teamtr_lora.tasks import Feedback, Interaction, Item, Task
    from teamtr_lora.training.team_spec import TeamSpec
    from teamtr_lora.training.trainer import TeamTRTrainer, TrainSummary

__version__ = "0.1.0"
__all__ = [
    "EvalOptions",
    "Feedback",
    "Interaction",
    "Item",
    "Recipe",
    "RecipeError",
    "Task",
    "TeamSpec",
    "TeamTRConfig",
    "TeamTRTrainer",
    "TrainSummary",
    "UserError",
    "ask_team",
    "evaluate_team",
    "load_recipe",
]

# Looked up when first used: importing teamtr_lora must not load torch.
_HOMES = {
    **dict.fromkeys(("EvalOptions", "ask_team", "evaluate_team"), "teamtr_lora.evaluation.commands"),
    **dict.fromkeys(("Recipe", "RecipeError", "TeamTRConfig", "load_recipe"), "teamtr_lora.recipe"),
    **dict.fromkeys(("Feedback", "Interaction", "Item", "Task"), "teamtr_lora.tasks"),
    **dict.fromkeys(("TeamTRTrainer", "TrainSummary"), "teamtr_lora.training.trainer"),
    "TeamSpec": "teamtr_lora.training.team_spec",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'teamtr_lora' has no attribute {name!r}")


def __dir__() -> list[str]:
    # help() asks through inspect: its page is the text above, and help() of a name tells more; completion gets every name
    helping = sys._getframe(1).f_globals.get("__name__") == "inspect"
    return ["__version__"] if helping else sorted({*globals(), *__all__})
