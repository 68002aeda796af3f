"""Typed recipes: what a run is made of, before any tensor exists. Imports neither torch nor transformers.

Modules:
    recipe               the whole recipe
    team_sections        base and team
    choices              settings that name one of a table of variants
    task_by_name         the settings of a task that a command names
    rollout_section      rollout
    engine_facts         what each rollout engine can and cannot do
    training_sections    training and trust region
    measuring_sections   evaluation, diagnostics, swap and tracking
    recipe_files         recipe files: parents, overrides, reading and writing
    yaml_text            YAML as recipes use it
    problems             every problem of a recipe at once
    words                a problem in words
    elsewhere            what other libraries call our keys
    config               what `TeamTRConfig(stages=2)` does with its keywords
    named                files and functions that a recipe names
    memory_keys          which keys make a run smaller, where a GPU is full
    reference            every key with its default and meaning
    template             what `init` writes
"""

from teamtr_lora.recipe.measuring_sections import DiagnosticsSection, EvaluationSection, SwapSection, TrackingSection
from teamtr_lora.recipe.named import check_named
from teamtr_lora.recipe.problems import problems
from teamtr_lora.recipe.recipe import Recipe, TeamTRConfig
from teamtr_lora.recipe.recipe_files import differences, dump_recipe, load_recipe, recipe_schema
from teamtr_lora.recipe.rollout_section import RolloutSection
from teamtr_lora.recipe.team_sections import AgentSection, BaseSection, LoraSection, ProtocolSection, RouterSection, TeamSection
from teamtr_lora.recipe.training_sections import TrainingSection, TrustRegionSection
from teamtr_lora.recipe.words import Problem, RecipeError
from teamtr_lora.tasks.custom import ScriptSettings
from teamtr_lora.tasks.machinery.responder import ResponderSettings
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
