"""Typed recipes: what a run is made of, before any tensor exists. Imports neither torch nor transformers."""

from teamtr_lora.recipe.named import check_named
from teamtr_lora.recipe.problems import problems
from teamtr_lora.recipe.recipe import (
    AgentSection,
    BaseSection,
    DiagnosticsSection,
    EvaluationSection,
    LoraSection,
    ProtocolSection,
    Recipe,
    RolloutSection,
    RouterSection,
    SwapSection,
    TeamSection,
    TeamTRConfig,
    TrackingSection,
    TrainingSection,
    TrustRegionSection,
)
from teamtr_lora.recipe.recipe_files import dump_recipe, first_difference, load_recipe, recipe_schema
from teamtr_lora.recipe.words import Problem, RecipeError
from teamtr_lora.tasks.custom import ScriptSettings
from teamtr_lora.tasks.machinery.responder import ResponderSettings
from teamtr_lora.tasks.machinery.task_settings import TaskSettings

__all__ = [
    "AgentSection",
    "BaseSection",
    "DiagnosticsSection",
    "EvaluationSection",
    "LoraSection",
    "Problem",
    "ProtocolSection",
    "Recipe",
    "RecipeError",
    "ResponderSettings",
    "RolloutSection",
    "RouterSection",
    "ScriptSettings",
    "SwapSection",
    "TaskSettings",
    "TeamSection",
    "TeamTRConfig",
    "TrackingSection",
    "TrainingSection",
    "TrustRegionSection",
    "check_named",
    "dump_recipe",
    "first_difference",
    "load_recipe",
    "problems",
    "recipe_schema",
]
