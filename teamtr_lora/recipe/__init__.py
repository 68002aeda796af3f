"""Typed recipes: what a run is made of, before any tensor exists. Imports neither torch nor transformers.

Modules:
    recipe               the whole recipe, and its sections on training, trust region and tracking
    team_sections        base and team
    choices              settings that name one of a table of variants
    task_sections        one class for each family of tasks
    responder            task.responder
    rollout_section      rollout
    evaluation_section   evaluation
    diagnostics_section  diagnostics
    swap_section         swap
    recipe_files         recipe files: parents, overrides, reading and writing
    yaml_text            YAML as recipes use it
    problems             every problem of a recipe at once
    words                a problem in words
    config               what `TeamTRConfig(stages=2)` does with its keywords
    named                files and functions that a recipe names
    reference            every key with its default and meaning
    template             what `init` writes
"""

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
from teamtr_lora.recipe.task_sections import (
    AutoLogiTaskSection,
    BlocksworldTaskSection,
    ColumnSumTaskSection,
    CountdownTaskSection,
    DatasetTaskSection,
    DetectiveTaskSection,
    GuessingTaskSection,
    ItemSource,
    MathTaskSection,
    ScriptTaskSection,
    SituationTaskSection,
    SmallTaskSection,
    TaskSection,
    Tau2TaskSection,
    ZebraTaskSection,
)
from teamtr_lora.recipe.words import Problem, RecipeError

__all__ = [
    "AgentSection",
    "AutoLogiTaskSection",
    "BaseSection",
    "BlocksworldTaskSection",
    "ColumnSumTaskSection",
    "CountdownTaskSection",
    "DatasetTaskSection",
    "DetectiveTaskSection",
    "DiagnosticsSection",
    "EvaluationSection",
    "GuessingTaskSection",
    "ItemSource",
    "LoraSection",
    "MathTaskSection",
    "Problem",
    "ProtocolSection",
    "Recipe",
    "RecipeError",
    "RolloutSection",
    "RouterSection",
    "ScriptTaskSection",
    "SituationTaskSection",
    "SmallTaskSection",
    "SwapSection",
    "TaskSection",
    "Tau2TaskSection",
    "TeamSection",
    "TeamTRConfig",
    "TrackingSection",
    "TrainingSection",
    "TrustRegionSection",
    "ZebraTaskSection",
    "check_named",
    "dump_recipe",
    "first_difference",
    "load_recipe",
    "problems",
    "recipe_schema",
]
