"""What the settings of all tasks have in common: the keys of the recipe's `task` section, and how a task is made of them.

Each task family has a subclass of these beside its task; teamtr_lora/tasks/table.py lists them. Descriptions are the user's
documentation (they are the JSON schema's text), so each one names its unit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, Strict, model_validator

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import DataFile, OnThisMachine, Section, Text, refuse
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.data_files import read_hub, read_rows
from teamtr_lora.tasks.machinery.task import Task

logger = logging.getLogger(__name__)


class TaskSettings(Section):
    """Keys that every task has. A subclass adds `name`, a Literal of the names that select it, its own keys, and `make`."""

    items_from: ClassVar[str] = "generated"  # what `tasks list` says
    about: ClassVar[Mapping[str, str]] = {}  # by name, what it says of each where a family has several
    paper_samples: ClassVar[Mapping[str, int]] = {}  # by name: K of the paper's avg@K and pass@K (app:benchmarks); others: 1
    replies: ClassVar[str] = ""  # what answers the team's messages within an episode, where anything does
    reads_alone: ClassVar[bool] = False  # answers are read out of messages without items, files or servers
    if TYPE_CHECKING:
        name: str

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
            wrong, fix = "the lowest reward must be below the highest", "write [lowest, highest]; the default is [0.0, 1.0]"
            refuse("task", [(("reward_range",), [low, high], wrong, fix)])
        return self

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The values of `task.name` that select this family; errors and schemas know the family by the first."""
        return get_args(cls.model_fields["name"].annotation)

    @classmethod
    def in_words(cls, name: str) -> str:
        """One line about the task of that name."""
        return cls.about.get(name) or " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    def reader(self, folder: Path | None = None) -> Task:
        """A task that reads the answer out of what a team says, for questions of the user's own; where that needs more than the
        messages, the message that answers is the answer. `folder`: the recipe's, where its own function may be run for that."""
        return self.make(Path()) if self.reads_alone else Task()

    def voting_reader(self, folder: Path, *, votes: bool) -> Task:
        """The reader of a team that may vote: then it needs one, and a function of the recipe's is run."""
        found = self.reader(folder if votes else None)
        if votes and not found.reads_answers:
            logger.warning(
                "the team votes, but nothing here reads answers of %s out of messages: what its first agent says is the answer",
                self.name,
            )
        return found

    def make(self, folder: Path) -> Task:
        """The task with its verifier, before it has read any items. `folder` is the recipe's: files are looked up beside it."""
        raise TypeError(f"{type(self).__name__} defines no make")

    def build(self, folder: Path) -> Task:
        """The task, ready to be played."""
        task = self.make(folder)
        task.reward_range = self.reward_range
        return task

    def for_items(self, folder: Path) -> Task:
        """The task for those who look at its items and score nothing: code of the user that only scores is not loaded."""
        return self.build(folder)

    def programs_of(self, folder: Path) -> str | None:
        """The dataset whose programs the task runs, for those who ask before; None where it runs none."""
        return None


class ItemSource(TaskSettings):
    """Where a task's items come from, for tasks that read them from a file or the hub."""

    items_from: ClassVar[str] = "file or hub"

    path: Annotated[DataFile | None, OnThisMachine("file")] = Field(
        default=None,
        description="Local .jsonl, .json, .csv or .parquet file (the first two may be .gz), relative to the recipe. Give either "
        "path or hub.",
    )
    hub: Annotated[Text | None, OnThisMachine("path or name")] = Field(
        default=None, description="Hub id of a dataset. Give either path or hub."
    )
    hub_config: Text | None = Field(default=None, description="Configuration (subset) of the hub dataset.")
    train_split: Text = Field(default="train", description="Hub split to train on.")
    test_split: Text | None = Field(default="test", description="Hub split to evaluate on; null holds out test_fraction instead.")
    test_path: Annotated[DataFile | None, OnThisMachine("file")] = Field(
        default=None, description="Local file to evaluate on, relative to the recipe."
    )
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
        if self.path is None and self.hub is None and self.items_from == ItemSource.items_from:
            wrong = f"a {self.name} task needs items"
            refuse("task", [(("path",), None, wrong, "give path (a local file) or hub (a hub id)")])
        if self.path is not None and self.hub is not None:
            wrong = "path is given too, and items come from one place"
            refuse("task", [(("hub",), self.hub, wrong, "keep either path or hub")])
        return self

    def build(self, folder: Path) -> Task:
        task = super().build(folder)
        if self.path or self.hub:
            assert isinstance(task, BenchTask)
            task.use_rows(*self.read_rows(folder), self.test_fraction, self.on_overlap)
        return task

    def read_rows(self, folder: Path) -> tuple[Any, Any | None]:
        """The train rows, and the test rows where they are apart."""
        test: Any = None
        if self.path:
            train = read_rows(data_file(folder, self.path), "task.path")
            if self.test_path:
                test = read_rows(data_file(folder, self.test_path), "task.test_path")
        else:
            train = read_hub(self.hub or "", self.hub_config, self.train_split, "task.hub")
            if self.test_split:
                test = read_hub(self.hub or "", self.hub_config, self.test_split, "task.hub")
        for rows, key in ((train, "train"), (test, "test")):
            if rows is not None and len(rows) == 0:
                raise UserError(f"the {key} dataset is empty; it needs at least one row")
        return train, test


class ItemsOrGenerated(ItemSource):
    """For tasks that make their own items when they are given none."""

    items_from: ClassVar[str] = "file, hub or generated"


def data_file(folder: Path, path: str) -> Path:
    """A file that a recipe in `folder` names."""
    return folder / Path(path).expanduser()
