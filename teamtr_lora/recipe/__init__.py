"""Typed recipes: what a run is made of, before any tensor exists. Imports neither torch nor transformers."""

from teamtr_lora.recipe.load import dump_recipe, first_difference, load_recipe, recipe_schema
from teamtr_lora.recipe.problems import problems
from teamtr_lora.recipe.schema import (
    AgentSection,
    BaseSection,
    DiagnosticsSection,
    EvaluationSection,
    LoraSection,
    ProtocolSection,
    Recipe,
    RolloutSection,
    RouterSection,
    TeamSection,
    TeamTRConfig,
    TrackingSection,
    TrainingSection,
    TrustRegionSection,
)
from teamtr_lora.recipe.task_sections import ColumnSumTask, DatasetTask, ItemSource, MathTask, ScriptTask, SmallTask, TaskSection
from teamtr_lora.recipe.words import Problem, RecipeError

__all__ = [
    "AgentSection",
    "BaseSection",
    "ColumnSumTask",
    "DatasetTask",
    "DiagnosticsSection",
    "EvaluationSection",
    "ItemSource",
    "LoraSection",
    "MathTask",
    "Problem",
    "ProtocolSection",
    "Recipe",
    "RecipeError",
    "RolloutSection",
    "RouterSection",
    "ScriptTask",
    "SmallTask",
    "TaskSection",
    "TeamSection",
    "TeamTRConfig",
    "TrackingSection",
    "TrainingSection",
    "TrustRegionSection",
    "dump_recipe",
    "first_difference",
    "load_recipe",
    "problems",
    "recipe_schema",
]
