"""What the team is trained on: the task sections of a recipe, one a family; `name` selects the kind.

Descriptions are the user's documentation (they are the JSON schema's text), so each one names its unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Discriminator, Field, Strict, Tag, model_validator

from teamtr_lora.recipe.responder import ResponderSection
from teamtr_lora.recipe.team_sections import DATA_FILE, CallablePath, Section, Text, refuse

DataFile = Annotated[str, Field(pattern=DATA_FILE)]


class RewardedTaskSection(Section):
    """Keys that every task has."""

    on_reward_error: Literal["stop", "zero"] = Field(
        default="stop",
        description="A reward that raises, is NaN or has the wrong length: stop and name the item, or count it as 0.",
    )
    reward_range: Annotated[tuple[float, float], Strict(False)] = Field(
        default=(0.0, 1.0), description="Lowest and highest reward an episode can get, in reward units."
    )

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Self:
        low, high = self.reward_range
        if low >= high:
            refuse(
                "task",
                [
                    (
                        ("reward_range",),
                        [low, high],
                        "the lowest reward must be below the highest",
                        "write [lowest, highest]; the default is [0.0, 1.0]",
                    )
                ],
            )
        return self


class ColumnSumTaskSection(RewardedTaskSection):
    """Add two numbers column by column: generated, seeded, and solved only if every agent's message is right."""

    name: Literal["column_sum"] = Field(default="column_sum", description="The generated addition task of the quickstart.")
    digits: int = Field(default=3, ge=1, le=8, description="Digits per number.")
    credit: Literal["all", "columns"] = Field(
        default="all",
        description="all: 1 where every column is right, else 0; columns: the share of columns that are right, without which "
        "long numbers are hardly learned. Only a whole sum counts as a success either way.",
    )


class SmallTaskSection(RewardedTaskSection):
    """Generated questions with a number for an answer, a few solved examples before each; the last message answers."""

    name: Literal["arithmetic", "products", "largest", "letter_count"] = Field(
        description="arithmetic: sums of three numbers; products: of a small and a two-digit number; largest: of four numbers; "
        "letter_count: how often a letter is in a word."
    )
    shots: int = Field(default=4, ge=0, description="Solved examples before the question.")


class CountdownTaskSection(RewardedTaskSection):
    """Reach a target with the given numbers, each once, by + - * /; generated, checked exactly."""

    name: Literal["countdown"] = Field(description="The last expression in the last message is the answer.")
    numbers: int = Field(default=3, ge=2, le=6, description="Numbers per item; more are harder.")
    shots: int = Field(default=2, ge=0, description="Solved examples before the question.")


class ItemSource(RewardedTaskSection):
    """Where a task's items come from, for tasks that read them from a file or the hub."""

    path: DataFile | None = Field(
        default=None,
        description="Local .jsonl, .json, .csv or .parquet file (the first two may be .gz), relative to the recipe. Give either "
        "path or hub.",
    )
    hub: Text | None = Field(default=None, description="Hub id of a dataset. Give either path or hub.")
    hub_config: Text | None = Field(default=None, description="Configuration (subset) of the hub dataset.")
    train_split: Text = Field(default="train", description="Hub split to train on.")
    test_split: Text | None = Field(default="test", description="Hub split to evaluate on; null holds out test_fraction instead.")
    test_path: DataFile | None = Field(default=None, description="Local file to evaluate on, relative to the recipe.")
    test_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="Share of items held out by a hash of the prompt when there is no test split or file.",
    )
    on_overlap: Literal["refuse", "drop", "allow"] = Field(
        default="refuse",
        description="Train items that are test items too (the same text up to spacing, case and punctuation): refuse to start "
        "and name them, train without them, or allow it.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is None and self.hub is None and self._needs_items():
            refuse(
                "task", [(("path",), None, f"a {self._kind()} task needs items", "give path (a local file) or hub (a hub id)")]
            )
        if self.path is not None and self.hub is not None:
            refuse(
                "task",
                [(("hub",), self.hub, "path is given too, and items come from one place", "keep either path or hub")],
            )
        return self

    def _needs_items(self) -> bool:
        return True

    def _kind(self) -> str:
        return str(getattr(self, "name", "dataset"))


class DatasetTaskSection(ItemSource):
    """Prompts from a file or the hub, scored by your reward function."""

    name: Literal["dataset"] = Field(description="Your own prompts and reward.")
    prompt_column: Text = Field(
        default="prompt",
        description="Column that holds the prompt: a text, or a conversation (a list of messages, none of an assistant), "
        "which is played as one text.",
    )
    answer_column: Text | None = Field(default=None, description="Column that holds the reference answer, if there is one.")
    reward: CallablePath | Annotated[list[CallablePath], Field(min_length=1)] = Field(
        description="Reward function as module:function, or a list of them, summed; in a file beside the recipe, or in a package "
        "that TEAMTR_LORA_TRUST names. TRL's signature: f(prompts, completions, **columns) -> list[float]."
    )
    success_at_least: float = Field(default=1.0, description="Reward from which an episode counts as right, in reward units.")


class MathTaskSection(ItemSource):
    """Problems with one answer, in a box or after the benchmark's marker; compared symbolically by math-verify."""

    name: Literal["gsm8k", "math500", "aime24", "aime25", "dapo_math"] = Field(
        description="gsm8k: a number in a box or after ####; math500, aime24, aime25: in a box; dapo_math: in a box or on an "
        "Answer: line. Rows need problem (or question) and answer."
    )
    instruction: str | None = Field(
        default=None, description="Text after each problem that says how to answer; null takes the task's own, empty adds none."
    )
    answer_seconds: float = Field(
        default=3.0, gt=0, description="Longest time to compare one answer, in seconds; one that takes longer is wrong."
    )


class OptionalSource(ItemSource):
    """For tasks that make their own items when they are given none."""

    def _needs_items(self) -> bool:
        return False


class BlocksworldTaskSection(OptionalSource):
    """Plans in the blocks world, simulated with exact preconditions; PlanBench's items, or generated ones."""

    name: Literal["planbench_blocksworld"] = Field(
        description="Rows need objects, init, goal and query (PlanBench's fields); without path or hub, items are generated."
    )
    blocks: int = Field(default=4, ge=2, le=12, description="Blocks per generated item; more are harder.")
    mystery: bool = Field(default=False, description="Generated items in PlanBench's mystery names (attack, feast, ...).")


class GuessingTaskSection(OptionalSource):
    """Guess a secret of four different digits from feedback; AR-Bench's items, or generated ones."""

    name: Literal["arbench_gn"] = Field(description="Rows need number; without path or hub, items are generated.")
    turns: int = Field(default=25, ge=1, description="Guesses with feedback; one final guess follows. A message is a turn.")
    stop_when_right: bool = Field(
        default=True, description="End the episode with the right guess; false plays all turns, as AR-Bench does."
    )


class ZebraTaskSection(OptionalSource):
    """Logic grids answered with a JSON table, scored as in ZeroEval; ZebraLogic's items, or generated ones with one solution."""

    name: Literal["zebralogic", "zebra"] = Field(
        description="Rows need puzzle and solution {header, rows}; without path or hub, items are generated."
    )
    houses: int = Field(default=3, ge=2, le=6, description="Houses per generated grid.")
    attributes: int = Field(default=3, ge=2, le=6, description="Attributes per house of a generated grid, names included.")
    reward: Literal["puzzle", "cells"] = Field(
        default="puzzle", description="puzzle: 1 if every cell is right, else 0; cells: the share of cells that are right."
    )


class AutoLogiTaskSection(OptionalSource):
    """Open puzzles checked by programs, in a sandbox; AutoLogi's items, or generated ones with at least one solution."""

    name: Literal["autologi"] = Field(
        description="Rows need prompt and code {Inputs_Check_code, Constraint_List_code}; without path or hub, items are made."
    )
    size: int = Field(default=4, ge=3, le=7, description="People or things in a generated puzzle; more are harder.")
    check_seconds: float = Field(default=5.0, gt=0, description="Longest run of one item's checking programs, in seconds.")


class ConversationTaskSection(ItemSource):
    """Tasks in which the team talks to somebody outside it."""

    responder: ResponderSection = Field(default_factory=ResponderSection, description="Who answers the team.")


class DetectiveTaskSection(ConversationTaskSection):
    """Find the murderer by questioning suspects, whom the responder plays; AR-Bench's detective cases, scored by index."""

    name: Literal["arbench_dc"] = Field(description="Rows need initial_information, suspects and label. A message is a turn.")
    turns: int = Field(default=25, ge=1, description="Questions; one answer follows. A message is a turn.")
    answer_early: bool = Field(
        default=True, description="An answer before the last turn ends the episode; false plays all turns, as AR-Bench does."
    )


class SituationTaskSection(ConversationTaskSection):
    """Find the story behind a situation by yes-or-no questions to a referee, the responder; AR-Bench's situation puzzles."""

    name: Literal["arbench_sp"] = Field(description="Rows need surface and bottom. A message is a turn.")
    turns: int = Field(default=25, ge=1, description="Questions; the story follows. A message is a turn.")
    answer_early: bool = Field(
        default=True, description="A story told before the last turn ends the episode; false plays all turns, as AR-Bench does."
    )
    reward: Literal["characters", "words"] = Field(
        default="characters", description="F1 of the story told and the true one, over characters or over words."
    )


class Tau2TaskSection(ConversationTaskSection):
    """Serve a customer, whom the responder plays, with tools over a database; tau2-bench's tasks and rewards."""

    name: Literal["tau2_retail", "tau2_airline"] = Field(
        description="path is the domain's tasks file; database, policy and split are looked for beside it."
    )
    database: DataFile | None = Field(
        default=None, description="The domain's database (.json or .json.gz), relative to the recipe; null looks beside path."
    )
    policy: Text | None = Field(
        default=None, description="The domain's policy.md, relative to the recipe; null looks beside path."
    )
    split: DataFile | None = Field(
        default=None,
        description="Official {train: [ids], test: [ids]}, relative to the recipe; null looks beside path, and holds out "
        "test_fraction where there is none.",
    )
    max_errors: int = Field(default=10, ge=1, description="Tool calls that may fail in a conversation before it ends with 0.")
    judge_assertions: bool = Field(
        default=False,
        description="Let the responder judge natural-language assertions where they are in a task's reward basis (retail); false "
        "looks for the required outputs in what the agent said instead.",
    )


class ScriptTaskSection(RewardedTaskSection):
    """Items and rewards that a Python script passed to TeamTRTrainer: such a run goes on from its script."""

    name: Literal["script"] = Field(description="Written by TeamTRTrainer; a recipe file cannot run it.")


FAMILIES: tuple[type[RewardedTaskSection], ...] = (
    ColumnSumTaskSection,
    SmallTaskSection,
    CountdownTaskSection,
    DatasetTaskSection,
    MathTaskSection,
    ZebraTaskSection,
    AutoLogiTaskSection,
    BlocksworldTaskSection,
    GuessingTaskSection,
    DetectiveTaskSection,
    SituationTaskSection,
    Tau2TaskSection,
    ScriptTaskSection,
)

# Tasks whose reward is the user's, so that nothing says how to read the answer of one message; what earlier releases wrote down
# of their single messages compared whole texts and means nothing.
OWN_REWARDS = ("dataset", "script")

# Keys of a recipe by what of this machine they name, for those who carry recipes from machine to machine.
LOCAL_FILES = ("task.path", "task.test_path", "task.database", "task.policy", "task.split", "task.responder.script")
LOCAL_CHOICES = (  # where it writes, whom it calls, and which environment variables it sends there
    "output_dir",
    "rollout.server.urls",
    "rollout.server.adapter_root",
    "rollout.server.api_key_variable",
    "task.responder.url",
    "task.responder.api_key_variable",
    "tracking.trackers",
)
PATHS_OR_NAMES = ("task.hub", "task.responder.model")  # others know a name; a path is this machine's


def names_of(family: type[RewardedTaskSection]) -> tuple[str, ...]:
    return get_args(family.model_fields["name"].annotation)


# A family goes by its first name, so that the tag in an error is one of the names in the family's schema.
_TAGS = {name: names_of(family)[0] for family in FAMILIES for name in names_of(family)}


def _task_name(value: Any) -> str:
    """The union's tag. A task without a name is the default one, so `task.digits=4` works alone."""
    name = value.get("name", "column_sum") if isinstance(value, dict) else getattr(value, "name", "column_sum")
    return _TAGS.get(name, name) if isinstance(name, str) else repr(name)


TaskSection = Annotated[
    Annotated[ColumnSumTaskSection, Tag("column_sum")]
    | Annotated[SmallTaskSection, Tag("arithmetic")]
    | Annotated[CountdownTaskSection, Tag("countdown")]
    | Annotated[DatasetTaskSection, Tag("dataset")]
    | Annotated[MathTaskSection, Tag("gsm8k")]
    | Annotated[BlocksworldTaskSection, Tag("planbench_blocksworld")]
    | Annotated[GuessingTaskSection, Tag("arbench_gn")]
    | Annotated[ZebraTaskSection, Tag("zebralogic")]
    | Annotated[AutoLogiTaskSection, Tag("autologi")]
    | Annotated[DetectiveTaskSection, Tag("arbench_dc")]
    | Annotated[SituationTaskSection, Tag("arbench_sp")]
    | Annotated[Tau2TaskSection, Tag("tau2_retail")]
    | Annotated[ScriptTaskSection, Tag("script")],
    Discriminator(_task_name),
]
