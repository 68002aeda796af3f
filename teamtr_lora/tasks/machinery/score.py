"""Scoring a file of responses offline, through the interactions and verifiers that training rewards come from."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.data_files import read_rows
from teamtr_lora.tasks.machinery.forms import shown
from teamtr_lora.tasks.machinery.recorded import said_turns
from teamtr_lora.tasks.machinery.task import Item, Split, Task, settled
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.team import Episode, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    task: str
    items: list[dict[str, Any]]  # by response: id (as the items file writes it), score, and what else the benchmark reports
    unanswered: int  # items without a response; they are not in the mean

    @property
    def mean(self) -> float:
        return statistics.fmean(row["score"] for row in self.items)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over responses; None for a single one."""
        scores = [row["score"] for row in self.items]
        return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        numbers = {"n": len(self.items), "mean": self.mean, "standard_error": self.standard_error}
        return {"task": self.task, **numbers, "items": self.items}


def score_file(settings: TaskSettings, items: Path, responses: Path) -> Scores:
    """`responses` holds rows {"id", "response"}, or {"id", "messages"} with the team's turns in order."""
    task = settings.make(Path.cwd())
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
    rows = [
        {"id": ids[episode.item_id], "score": reward} | task.measures(episode)
        for episode, reward in zip(played, total_rewards(task, played), strict=True)
    ]
    return Scores(settings.name, rows, unanswered=len(known.keys() - {episode.item_id for episode in played}))


def sample_items(settings: TaskSettings, split: Split, count: int) -> list[Item]:
    """The first items of a split; `path` among the settings is relative to the working folder."""
    return settings.for_items(Path.cwd()).first_items(split, count)


def play(task: Task, item: Item, turns: Sequence[str]) -> Episode:
    """The episode in which the team says `turns`, up to where the task ends it."""
    interaction = task.open(item)
    episode = Episode(item_id=item.id, group=0, prompt=settled(interaction.first()), seed=0, item=item)
    for turn, text in enumerate(turns):
        message = Message(
            agent="agent", turn=turn, prompt_ids=[], token_ids=[], sampler_logprobs=[], version="", finish="stop", text=text
        )
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
