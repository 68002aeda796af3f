"""The Task contract: items, an interaction over each, a verifier. One file a task family implements it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from teamtr_lora.team import Episode, Message

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Item:
    """One problem. `data` holds what the verifier needs (the answer, dataset columns) and is never shown to the team."""

    id: str
    prompt: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the environment answers to a message: text for the transcript (or nothing), a reward, whether it is over."""

    text: str | None = None
    reward: float = 0.0
    done: bool = False


class Items(Protocol):
    """A split, read by position so that a run resumes by a number. `size` is None where items never run out."""

    size: int | None

    def __getitem__(self, position: int) -> Item: ...


class Interaction:
    """The trivial one: the team talks, nobody answers, the reward comes at the end from `Task.score`."""

    def __init__(self, item: Item) -> None:
        self.item = item

    def first(self) -> str:
        return self.item.prompt

    def feed(self, message: Message) -> Feedback:
        return Feedback()


class Task:
    """Base class: override `items` and `score`, and `open` where the environment answers back."""

    name = ""
    reward_range: tuple[float, float] = (0.0, 1.0)

    def items(self, split: Split) -> Items:
        raise TypeError(f"{type(self).__name__} defines no items")

    def open(self, item: Item) -> Interaction:
        return Interaction(item)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Terminal rewards of finished episodes, in one call so that a reward function sees a whole batch."""
        return [0.0] * len(episodes)

    def success(self, reward: float) -> bool:
        """Whether an episode's total reward counts as right in accuracy, pass@k and coordination."""
        return reward >= self.reward_range[1]

    def answer(self, text: str) -> str | None:
        """The answer a message states, if any; used by coordination metrics."""
        return None

    def message_correct(self, item: Item, message: Message) -> bool | None:
        """Whether this message on its own is right; None where the task cannot tell."""
        expected = item.data.get("answer")
        return None if expected is None else self.answer(message.text) == str(expected)

    def check_agents(self, agents: Sequence[str], max_messages: int) -> None:
        """Raises UserError when the team cannot play this task."""


def item_of(episode: Episode) -> Item:
    item = episode.item
    assert isinstance(item, Item)
    return item
