"""Scoring a file of responses offline, through the interactions and verifiers that training rewards come from."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import DatasetTaskSection, ItemSource, RecipeError
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.task_sections import FAMILIES, OptionalSource, names_of
from teamtr_lora.recipe.yaml_text import parse
from teamtr_lora.tasks.build import bare_task, build_task
from teamtr_lora.tasks.dataset import read_rows
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.forms import shown
from teamtr_lora.tasks.machinery.recorded import said_turns
from teamtr_lora.tasks.machinery.task import Item, Split, Task, settled
from teamtr_lora.team import Episode, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    task: str
    items: list[tuple[str, float]]  # id, score
    unanswered: int  # items without a response; they are not in the mean
    measures: list[dict[str, float]]  # by response, what the benchmark reports beside the score
    ids: dict[str, Any]  # by id, as the items file writes it: a number stays one

    @property
    def mean(self) -> float:
        return statistics.fmean(score for _, score in self.items)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over responses; None for a single one."""
        scores = [score for _, score in self.items]
        return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        rows = zip(self.items, self.measures, strict=True)
        return {
            "task": self.task,
            "n": len(self.items),
            "mean": self.mean,
            "standard_error": self.standard_error,
            "items": [{"id": self.ids[name], "score": score} | more for (name, score), more in rows],
        }


def task_section(name: str, settings: Sequence[str] = (), path: Path | None = None) -> Any:
    """The recipe section of a task by its name and `key=value` settings; `path` stands in where it needs items."""
    data: dict[str, Any] = {"name": name}
    family = next((f for f in FAMILIES if name in names_of(f)), None)
    if path is not None and family is not None and issubclass(family, ItemSource) and not issubclass(family, OptionalSource):
        data["path"] = str(path)
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r}: settings are key=value, for example houses=4")
        *sections, last = key.strip().removeprefix("task.").split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"{text!r}: {section} is set to a value already; it has no keys")
        place[last] = parse(value, f"setting {key}")
    recipe, problems = check({"team": {"agents": [{"name": "agent"}]}, "task": data})
    if recipe is None:
        raise RecipeError(problems, "the task")
    return recipe.task


def score_file(name: str, items: Path, responses: Path, settings: Sequence[str] = ()) -> Scores:
    """`responses` holds rows {"id", "response"}, or {"id", "messages"} with the team's turns in order."""
    if name in names_of(DatasetTaskSection):
        raise UserError(
            "score dataset: rewards of your own are run by `teamtr-lora eval RUN`; score is for tasks with a verifier"
        )
    task = bare_task(task_section(name, settings, items), Path.cwd())
    task.use_recorded()
    known, ids = read_items(task, read_rows(items, "--items"), f"--items = {str(items)!r}")
    episodes = []
    for number, row in enumerate(read_rows(responses, "--responses"), 1):
        where = f"--responses = {str(responses)!r} row {number}"
        if row_id(row) is None or str(row_id(row)) not in known:
            raise UserError(f"{where}: no item of {items} has the id {row_id(row)!r}")
        episodes.append((known[str(row_id(row))], said_turns(row, where)))
    if not episodes:
        raise UserError(f"--responses = {str(responses)!r}: holds no response")
    played = [play(task, item, turns) for item, turns in episodes]
    scored = list(zip([e.item_id for e in played], total_rewards(task, played), strict=True))
    unanswered = len(known.keys() - {name for name, _ in scored})
    return Scores(name, scored, unanswered, [task.measures(episode) for episode in played], ids)


def sample_items(name: str, settings: Sequence[str], split: Split, count: int) -> list[Item]:
    """The first items of a split; `path` among the settings is relative to the working folder."""
    items = build_task(task_section(name, settings), Path.cwd()).items(split)
    return [items[i] for i in range(count if items.size is None else min(count, items.size))]


def play(task: Task, item: Item, turns: Sequence[str]) -> Episode:
    """The episode in which the team says `turns`, up to where the task ends it."""
    interaction = task.open(item)
    episode = Episode(item.id, 0, settled(interaction.first()), 0, item)
    for turn, text in enumerate(turns):
        message = Message("agent", turn, [], [], [], "", "stop", text)
        feedback = settled(interaction.feed(message))
        episode.messages.append(message)
        episode.rewards.append(feedback.reward)
        episode.feedback.append(feedback.text)
        if feedback.done:
            episode.ended = "task"
            break
    return episode


def total_rewards(task: Task, episodes: Sequence[Episode]) -> list[float]:
    return [episode.reward + final for episode, final in zip(episodes, task.score(episodes), strict=True)]


def row_id(row: Mapping[str, Any]) -> Any:
    """`id`, or AutoLogi's name for it."""
    return row.get("idx") if row.get("id") is None else row["id"]


def read_items(task: Task, rows: Iterable[Mapping[str, Any]], source: str) -> tuple[dict[str, Item], dict[str, Any]]:
    """The items by their ids as text, and the ids as they are written; a row without one goes by its place, from 0."""
    known: dict[str, Item] = {}
    ids: dict[str, Any] = {}
    lost = 0
    for place, row in enumerate(rows):
        where, given = f"{source} row {place + 1}", place if row_id(row) is None else row_id(row)
        if isinstance(given, bool) or not isinstance(given, (str, int, float)) or given != given:
            raise UserError(f"{where}: id = {shown(given)} is neither text nor a number")
        name = str(given)
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise UserError(f"{where}: id = {shown(given)} cannot be printed; name the item in plain text")
        if name in known:
            raise UserError(f"{where}: two items have the id {name!r}")
        if isinstance(task, BenchTask) and "data" not in row and task.lost_answer(row):
            lost += 1  # published sets have a few such rows; training leaves them out too
            continue
        try:
            known[name] = read_item(task, row, name)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        ids[name] = given
    if lost:
        logger.warning("%s: %d items have no answer and are left out", source, lost)
    return known, ids


def read_item(task: Task, row: Mapping[str, Any], name: str) -> Item:
    """A row as `tasks sample --json` writes it ({id, prompt, data}), or in the benchmark's own format."""
    if isinstance(row.get("data"), Mapping) and isinstance(row.get("prompt"), str):
        item = Item(name, row["prompt"], dict(row["data"]))
        task.check_item(item)
        return item
    if isinstance(task, BenchTask):
        return task.row_item(row, name)
    raise UserError(f"item {name}: an item of {task.name} has prompt and data, as `teamtr-lora tasks sample --json` writes them")
