"""Task `dataset`: rows of a file or hub dataset, scored by the user's reward functions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from teamtr_lora.common.code_paths import load_callable, raised, user_code
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import CallablePath, Text, nearest
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.forms import content_text
from teamtr_lora.tasks.machinery.rewards import Rewards
from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.tasks.machinery.task_settings import ItemSource
from teamtr_lora.team import Episode

logger = logging.getLogger(__name__)

# What others call the prompt's column and the answer's, the likeliest first.
_PROMPTS = ("question", "problem", "query", "instruction", "input", "task", "text", "messages")
_ANSWERS = ("answer", "solution", "final_answer", "ground_truth", "target", "label", "reference", "output", "response")


class DatasetTask(BenchTask):
    """Anything with a length and integer indexing is rows: a list of dicts, a `datasets.Dataset`."""

    name = "dataset"

    def __init__(
        self,
        train: Any,
        test: Any | None,
        rewards: Rewards,
        *,
        prompt_column: str = "prompt",
        answer_column: str | None = None,
        test_fraction: float = 0.1,
        success_at_least: float = 1.0,
        reward_range: tuple[float, float] = (0.0, 1.0),
        answer: Callable[[str], str | None] | None = None,
        by_recipe: bool = False,
    ) -> None:
        """`by_recipe`: it is made of a recipe's task section, whose keys an error may name."""
        for rows, key in ((train, "train"), (test, "test")):
            if rows is not None:
                keys = by_recipe and key == "train"  # of a test set alone its columns are to change: train's have been found
                _check_rows(rows, key, (prompt_column, answer_column), rewards.needed_columns(), keys)
        self.reward_range, self._success_at_least = reward_range, success_at_least
        self._rewards, self._answer = rewards, answer
        self._columns = (prompt_column, answer_column)
        self.use_rows(train, test, test_fraction, "allow")

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        prompt, answer = self._columns
        data = {**row, "prompt": row[prompt]} | ({"answer": row[answer]} if answer else {})
        try:
            text = _text(row[prompt])
            if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError("holds half a character (a lone surrogate, as of a cut emoji); repair the text")
            return Item(name, text, data)
        except ValueError as error:
            raise UserError(f"item {name}: {prompt!r} {error}") from error

    def hashed(self, text: str) -> str:
        return text

    def text(self, item: Item) -> str:
        return item.prompt

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return self._rewards(episodes)

    def success(self, reward: float) -> bool:
        return reward >= self._success_at_least

    def _range_words(self) -> tuple[str, str]:
        written = self._rewards.written
        return written("task.reward_range"), f"{written('task.success_at_least')} (1 unless set) as right: set both"

    @property
    def reads_answers(self) -> bool:
        return self._answer is not None  # without this function only the reward can find the answer in a message

    def answer(self, text: str) -> str | None:
        return self._answer(text) if self._answer else None


class DatasetSettings(ItemSource):
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
    answer: CallablePath | None = Field(
        default=None,
        description="Function that finds the answer in a message, as module:function: f(text) -> a text, or None where there is "
        "none. Teams vote over these, and `eval` counts them.",
    )

    def build(self, folder: Path) -> DatasetTask:
        names = [self.reward] if isinstance(self.reward, str) else list(self.reward)
        reader = load_callable(self.answer, key="task.answer", folder=folder) if self.answer else None
        functions = [load_callable(name, key="task.reward", folder=folder) for name in names]
        return self._build(folder, functions, partial(read_answer, reader) if reader else None)

    def reader(self, folder: Path | None = None) -> Task:
        if folder is None or self.answer is None:
            return Task()
        try:
            function = load_callable(self.answer, key="task.answer", folder=folder)
        except UserError as error:  # a team from elsewhere comes without its files
            logger.warning("%s", error)
            return Task()
        return AnswerReader(partial(read_answer, function))

    def for_items(self, folder: Path) -> DatasetTask:
        return self._build(folder, [], (lambda text: None) if self.answer else None)  # nothing is scored: no file is run

    def _build(
        self, folder: Path, functions: list[Callable[..., Any]], answer: Callable[[str], str | None] | None
    ) -> DatasetTask:
        train, test = self.read_rows(folder)
        task = DatasetTask(
            train,
            test,
            Rewards(functions, self.on_reward_error),
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            test_fraction=self.test_fraction,
            success_at_least=self.success_at_least,
            reward_range=self.reward_range,
            answer=answer,
            by_recipe=True,
        )
        if test is not None:
            task.settle_overlap(self.on_overlap)
        return task


class AnswerReader(Task):
    """A user's function that finds the answer in a message, without items and rewards."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read

    def answer(self, text: str) -> str | None:
        return self._read(text)


def read_answer(reader: Callable[[str], Any], text: str, key: str = "task.answer") -> str | None:
    """What a function of the user's, given as `key`, finds in a message."""
    try:
        with user_code():
            found = reader(text)
    except Exception as error:
        raise UserError(f"{key} {raised(error)}") from error
    if found is not None and not isinstance(found, str):
        raise UserError(f"{key} returned {found!r:.60}, a {type(found).__name__}; return a text, or None")
    return found or None


def _check_rows(rows: Any, key: str, own: tuple[str, str | None], needed: Mapping[str, str], by_keys: bool) -> None:
    """Every row, before anything is played: `own` are the prompt's column and the answer's, `needed` those that rewards take.
    `by_keys`: a key of the recipe says what the own ones are called."""
    columns = [column for column in own if column]
    needed = {column: reward for column, reward in needed.items() if column != "answer" or not own[1]}
    if isinstance(rows, Mapping) or not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise UserError(
            f"the {key} dataset is a {type(rows).__name__}; give a list of dicts or a datasets.Dataset (one split, not streamed)"
        )
    if hasattr(rows, "iloc"):
        raise UserError(f"the {key} dataset is a {type(rows).__name__} of pandas; give rows.to_dict('records')")
    if len(rows) == 0:
        raise UserError(f"the {key} dataset is empty; it needs at least one row with a {own[0]!r} column")
    first = rows[0]
    if isinstance(first, Mapping):
        for column in (*columns, *needed):
            if column not in first:
                why = f", which reward {needed[column]} takes" if column in needed else ""
                fix = f"; {_named_otherwise(column, own, first, by_keys)}" if column in own else ""
                raise UserError(f"the {key} dataset has no column {column!r}{why}; it has {', '.join(map(str, first))}{fix}")
    if hasattr(rows, "select_columns"):  # reads nothing of a Dataset that is not looked at
        rows = rows.select_columns(list(dict.fromkeys([*columns, *needed])))
    each = rows if hasattr(rows, "__iter__") else map(rows.__getitem__, range(len(rows)))
    blank: list[int] = []
    for number, row in enumerate(each):
        if not isinstance(row, Mapping):
            raise UserError(f"the {key} dataset holds {type(row).__name__}, not rows; give a list of dicts or a datasets.Dataset")
        lacks = next((column for column in columns if row.get(column) is None), None)
        if lacks is not None:
            raise UserError(_lacks(number, key, lacks))
        if isinstance(row[own[0]], str) and not row[own[0]].strip():
            blank.append(number)
        lacks = next((column for column in needed if column not in row), None)
        if lacks is not None:
            raise UserError(f"{_lacks(number, key, lacks)}, if only null, as reward {needed[lacks]} takes it")
    if blank:
        logger.warning(
            "%d rows of the %s dataset have an empty %r and are played with it, row %d (counted from 0) first: leave them out",
            len(blank), key, own[0], blank[0],
        )  # fmt: skip


def _named_otherwise(column: str, own: tuple[str, str | None], first: Mapping[str, Any], by_keys: bool) -> str:
    """How to make a column of the rows the prompt's or the answer's."""
    what, usual, other = ("prompt", _PROMPTS, _ANSWERS) if column == own[0] else ("answer", _ANSWERS, _PROMPTS)
    free = [name for name in map(str, first) if name not in own and name not in other]
    meant = nearest(column, free) or next((name for name in usual if name in free), None) or (free[0] if len(free) == 1 else None)
    if by_keys:
        return f"set task.{what}_column={meant}" if meant else f"set task.{what}_column to the one that holds the {what}"
    return f"rename the column {meant!r} to {column!r}" if meant else f"name the one that holds the {what} {column!r}"


def _lacks(row: int, split: str, column: str) -> str:
    return f"row {row} (counted from 0) of the {split} dataset has no {column!r}; every row needs one"


def _text(prompt: Any) -> str:
    """A conversational prompt (TRL's list of messages) is played as the text of its turns."""
    if hasattr(prompt, "tolist"):  # an array, as pandas has them of lists
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(isinstance(turn, Mapping) and "content" in turn for turn in prompt):
        return "\n\n".join(_turn_text(turn) for turn in prompt)
    return json.dumps(prompt, ensure_ascii=False, default=str)


def _turn_text(turn: Mapping[str, Any]) -> str:
    if turn.get("role") == "assistant":
        raise ValueError("holds a turn of an assistant, which no agent of the team has said; leave it out")
    text = content_text(turn["content"])
    if text is None:
        raise ValueError(f"holds a turn whose content is {turn['content']!r:.60}; give text")
    return text
