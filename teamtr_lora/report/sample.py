"""Which transcripts a report takes along. A page that is sent around cannot hold all of them; `view` shows every one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from teamtr_lora.runs.transcripts import TranscriptFile, read_transcripts, transcript_files

FILES = 24  # updates that a report has transcripts of, spread over the run
Group = dict[str, Any]


def sampled_transcripts(run: Path, limit: int) -> dict[str, Any]:
    """Some groups of some updates, at most `limit` bytes: whole ones, first those with marked tokens and rewards that differ."""
    files = transcript_files(run)
    chosen = spread(files, FILES)
    found = []
    for place, file in enumerate(chosen):
        share = limit // (len(chosen) - place)
        groups, used = _fitting(groups_of(read_transcripts(run, file.name)), share)
        limit -= used
        found.append(asdict(file) | {"groups": groups})
    return {"files": found, "updates": len(files)}


def spread(files: list[TranscriptFile], count: int) -> list[TranscriptFile]:
    """The first, the last, and some in between."""
    if len(files) <= count:
        return files
    return [files[round(place * (len(files) - 1) / (count - 1))] for place in range(count)]


def groups_of(episodes: Iterable[dict[str, Any]]) -> list[Group]:
    """The episodes of each item, a best first, then a worst, then the others from good to bad, each with its `rank` where rewards
    differ at all. Groups with marked tokens and with rewards that differ come first."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for episode in episodes:
        groups.setdefault(episode.get("group"), []).append(episode)
    found = []
    for members in groups.values():
        ranked = sorted(members, key=lambda episode: -_reward(episode))
        ends = {_reward(ranked[0]): "best", _reward(ranked[-1]): "worst"}
        if len(ends) > 1:
            ranked = [episode | {"rank": ends.get(_reward(episode))} for episode in ranked]
        ends_first = [ranked[0], ranked[-1], *ranked[1:-1]] if len(ranked) > 2 else ranked
        found.append({"item": ranked[0].get("item"), "prompt": ranked[0].get("prompt"), "episodes": ends_first})
    return sorted(found, key=_interest, reverse=True)


def _reward(episode: dict[str, Any]) -> float:
    return episode.get("reward") or 0.0


def _fitting(groups: list[Group], limit: int) -> tuple[list[Group], int]:
    """As many as fit, and how many bytes they take. Of a group that is too large alone, the best and the worst episode."""
    chosen: list[Group] = []
    used = 0
    for group in groups:
        size = len(json.dumps(group))
        if not chosen and size > limit:
            group = group | {"episodes": group["episodes"][:2]}
            size = len(json.dumps(group))
        if used + size <= limit:
            chosen.append(group)
            used += size
    return chosen, used


def _interest(group: Group) -> tuple[bool, bool]:
    marked = any(message.get("change") for episode in group["episodes"] for message in episode["messages"])
    return marked, len({episode.get("reward") for episode in group["episodes"]}) > 1
