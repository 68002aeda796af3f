"""teamtr-lora: trust-region training of teams of LoRA agents on one frozen base.

from teamtr_lora import TeamSpec, TeamTRConfig, TeamTRTrainer
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from teamtr_lora.errors import UserError

if TYPE_CHECKING:
    from teamtr_lora.recipe import Recipe, TeamTRConfig, load_recipe
    from teamtr_lora.training.trainer import TeamSpec, TeamTRTrainer, TrainSummary

__version__ = "0.1.0"
__all__ = ["Recipe", "TeamSpec", "TeamTRConfig", "TeamTRTrainer", "TrainSummary", "UserError", "load_recipe"]

# Looked up when first used: importing teamtr_lora must not load torch.
_HOMES = {
    "Recipe": "teamtr_lora.recipe",
    "TeamTRConfig": "teamtr_lora.recipe",
    "load_recipe": "teamtr_lora.recipe",
    "TeamSpec": "teamtr_lora.training.trainer",
    "TeamTRTrainer": "teamtr_lora.training.trainer",
    "TrainSummary": "teamtr_lora.training.trainer",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'teamtr_lora' has no attribute {name!r}")
