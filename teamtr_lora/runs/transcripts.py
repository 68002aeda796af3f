"""How an episode is written down, in a run's episodes/ and in evaluations, and how a run's transcripts are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat

from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.layout import EPISODES, MAX_METRICS_BYTES, OWN_NAMES, read_own, refuse_links
from teamtr_lora.team import Episode


@dataclass(frozen=True)
class TokenMarks:
    """One message token by token."""

    pieces: list[str]  # their texts, the end token's included
    logprobs: list[float]  # under the policy that wrote them, at the sampling temperature
    change: list[float] | None = None  # of the log-probabilities, by the accepted update; None: not measured for this message


@dataclass(frozen=True)
class EpisodeMarks:
    """What an update says of an episode that it learned from."""

    advantage: float
    tokens: dict[int, TokenMarks] = field(default_factory=dict)  # by message; empty for all but a sample of the episodes


def episode_record(episode: Episode, *, scored: bool = True, marks: EpisodeMarks | None = None) -> dict[str, Any]:
    """A readable transcript with token counts and adapter versions. A question that no task scored has no reward."""
    return {
        "item": episode.item_id,
        "group": episode.group,
        "prompt": episode.prompt,
        "reward": episode.reward if scored else None,
        **({"advantage": marks.advantage} if marks else {}),
        **({"credit": {agent: sum(earned) for agent, earned in episode.credit.items()}} if scored and episode.credit else {}),
        "success": episode.success if scored else None,
        "ended": episode.ended,
        "answer_turn": episode.answer_turn,
        **({} if scored else {"answer": episode.answer}),
        "messages": [
            {
                "agent": m.agent,
                "text": m.text,
                "version": m.version,
                "prompt_tokens": len(m.prompt_ids),
                "tokens": len(m.token_ids),
                "finish": m.finish,
                "feedback": feedback,
                **({"reward": episode.rewards[place]} if scored and place < len(episode.rewards) else {}),
                **(vars(marks.tokens[place]) if marks and place in marks.tokens else {}),
            }
            for place, (m, feedback) in enumerate(zip(episode.messages, episode.feedback, strict=True))
        ],
    }


@dataclass(frozen=True, order=True)
class TranscriptFile:
    """The episodes that were sampled for one update."""

    stage: int
    update: int
    agent: str
    name: str


def transcript_files(run: Path) -> list[TranscriptFile]:
    """In the order of the updates."""
    refuse_links(run, OWN_NAMES)
    folder = run / EPISODES
    named = [(re.fullmatch(r"stage-(\d+)-update-(\d+)-(.+)\.jsonl", path.name), path) for path in folder.glob("*.jsonl")]
    return sorted(TranscriptFile(int(found[1]), int(found[2]), found[3], path.stem) for found, path in named if found)


class _Message(BaseModel, strict=True):
    agent: str
    text: str
    feedback: str | None = None
    reward: FiniteFloat | None = None
    pieces: list[str] | None = None
    logprobs: list[float] | None = None
    change: list[float] | None = None


class _Record(BaseModel, strict=True):
    """What readers of a record rely on."""

    item: str
    group: int
    prompt: str
    reward: FiniteFloat | None
    advantage: FiniteFloat | None = None
    messages: list[_Message]


def read_transcripts(run: Path, name: str) -> Iterator[dict[str, Any]]:
    """The records of one of `transcript_files`, as `episode_record` made them."""
    path = run / EPISODES / f"{name}.jsonl"
    for number, line in enumerate((read_own(path, MAX_METRICS_BYTES) or b"").splitlines(), start=1):
        try:
            record = json.loads(line)
            _Record.model_validate(record)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is damaged ({type(error).__name__})") from error
        yield record
