"""What the statistics need of one answer: all of it is written down, so that an interrupted evaluation goes on from its file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.machinery.task import item_of
from teamtr_lora.team import Episode


@dataclass(frozen=True)
class Attempt:
    """One answer to one item: the scored episode that gives it, and all the tokens that it took."""

    episode: Episode
    sampled_tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, episode: Episode, *others: Episode) -> Attempt:
        """`others`: episodes that were played for this answer beside the one that gives it."""
        played = [episode, *others]
        read = sum(len(m.prompt_ids) for e in played for m in e.messages)
        return cls(episode, sum(e.tokens for e in played), read)


@dataclass(frozen=True)
class Outcome:
    """`verdicts`: each agent's own last word on each part of the answer judged alone, True where all are right, None where the
    task cannot tell; `vote`: the answer given."""

    item: str
    digest: str  # of the problem: two runs are compared on equal ones only
    group: int
    reward: float
    success: bool
    vote: str | None
    verdicts: dict[str, bool | None]
    sampled_tokens: int
    prompt_tokens: int
    categories: dict[str, str]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Outcome:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


def judge(attempt: Attempt, task: Task) -> Outcome:
    episode = attempt.episode
    item = item_of(episode)
    last = {(message.agent, task.part(message)): message for message in episode.messages}
    verdicts: dict[str, list[bool | None]] = {}
    for (agent, _), message in last.items():
        verdicts.setdefault(agent, []).append(task.message_correct(item, message))
    return Outcome(
        item=episode.item_id,
        digest=problem_digest(item),
        group=episode.group,
        reward=episode.reward,
        success=episode.success,
        vote=task.vote(episode),
        verdicts={agent: False if False in own else all(own) or None for agent, own in verdicts.items()},
        sampled_tokens=attempt.sampled_tokens,
        prompt_tokens=attempt.prompt_tokens,
        categories=task.categories(item),
    )


def problem_digest(item: Item) -> str:
    """Of the problem and its answer; not of instructions around it, which may differ between teams."""
    text = repr((item.data.get("problem", item.prompt), item.data))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
