"""Scoring a file of responses offline, through the interactions and verifiers that training rewards come from."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.errors import UserError
from teamtr_lora.recipe import ItemSource, RecipeError
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.task_sections import FAMILIES, OptionalSource, names_of
from teamtr_lora.recipe.yaml_text import parse
from teamtr_lora.tasks.bench import BenchTask
from teamtr_lora.tasks.build import bare_task, build_task
from teamtr_lora.tasks.dataset import read_rows
from teamtr_lora.tasks.task import Item, Split, Task, settled
from teamtr_lora.team import Episode, Message


@dataclass(frozen=True)
class Scores:
    task: str
    items: list[tuple[str, float]]  # id, score
    unanswered: int  # items without a response; they are not in the mean
    measures: list[dict[str, float]]  # by response, what the benchmark reports beside the score

    @property
    def mean(self) -> float:
        return statistics.fmean(score for _, score in self.items)

    @property
    def standard_error(self) -> float | None:
        """Of the mean, over responses; None for a single one."""
        scores = [score for _, score in self.items]
        return statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "n": len(self.items),
            "n_unanswered": self.unanswered,
            "mean": self.mean,
            "standard_error": self.standard_error,
            "items": [{"id": name, "score": score} | more for (name, score), more in zip(self.items, self.measures, strict=True)],
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
    task = bare_task(task_section(name, settings, items), Path.cwd())
    task.use_recorded()
    known = _read_items(task, items)
    episodes = []
    for number, row in enumerate(read_rows(responses, "--responses"), 1):
        where = f"--responses row {number}"
        if row.get("id") is None or str(row["id"]) not in known:
            raise UserError(f"{where}: no item of {items} has the id {row.get('id')!r}")
        episodes.append((known[str(row["id"])], _turns(row, where)))
    if not episodes:
        raise UserError(f"--responses = {str(responses)!r}: holds no response")
    try:
        played = [play(task, item, turns) for item, turns in episodes]
        scored = list(zip([e.item_id for e in played], total_rewards(task, played), strict=True))
        measures = [task.measures(episode) for episode in played]
    except KeyError as missing:  # rows {id, prompt, data} are taken at their word until here
        raise UserError(f"--items = {str(items)!r}: the data of an item has no {missing}; is it an item of {name}?") from missing
    return Scores(name, scored, len(known.keys() - {name for name, _ in scored}), measures)


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


def _read_items(task: Task, path: Path) -> dict[str, Item]:
    known: dict[str, Item] = {}
    for place, row in enumerate(read_rows(path, "--items")):
        name = str(place if row.get("id") is None else row["id"])
        if name in known:
            raise UserError(f"--items = {str(path)!r}: two items have the id {name!r}")
        known[name] = read_item(task, row, name)
    return known


def read_item(task: Task, row: Mapping[str, Any], name: str) -> Item:
    """A row as `tasks sample --json` writes it ({id, prompt, data}), or in the benchmark's own format."""
    if isinstance(row.get("data"), Mapping) and isinstance(row.get("prompt"), str):
        return Item(name, row["prompt"], dict(row["data"]))
    if isinstance(task, BenchTask):
        return task.row_item(row, name)
    raise UserError(f"item {name}: an item of {task.name} has prompt and data, as `teamtr-lora tasks sample --json` writes them")


def _turns(row: Mapping[str, Any], where: str) -> list[str]:
    if isinstance(row.get("response"), str):
        return [row["response"]]
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise UserError(f"{where}: has neither response (text) nor messages (a list of the agent's turns)")
    turns = []
    for message in messages:
        if isinstance(message, Mapping):
            if message.get("role", "assistant") != "assistant":
                continue  # a whole conversation: what the environment said is said again by the task
            message = _said(message)
        if not isinstance(message, str):
            raise UserError(f"{where}: every message is text, or {{role, content}}")
        turns.append(message)
    return turns


def _said(message: Mapping[str, Any]) -> Any:
    """The text of a recorded turn; one that only calls tools, as APIs record it, is the text that says so."""
    calls = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else message if "arguments" in message else None
    content = message.get("content")
    if calls is None:
        return "" if content is None else content
    return f"{content}\n{json.dumps(calls)}" if isinstance(content, str) and content else json.dumps(calls)
