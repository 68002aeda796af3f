"""The Task contract: items, an interaction over each, a verifier. One file a task family implements it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.forms import Form, check_form
from teamtr_lora.team import Episode, Message, Router

Split = Literal["train", "test"]
T = TypeVar("T")

# Columns by which results are reported where items carry them.
CATEGORIES = ("category", "subject", "level", "type", "difficulty", "size", "kind", "domain", "lang", "language")


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
    """The trivial one: the team talks, nobody answers, the reward comes at the end from `Task.score`.

    `first` and `feed` may return a future where somebody else has to be asked: the collector plays other episodes meanwhile,
    and comes back with the next message only when this one is answered.
    """

    def __init__(self, item: Item) -> None:
        self.item = item

    def first(self) -> str | Future[str]:
        return self.item.prompt

    def feed(self, message: Message) -> Feedback | Future[Feedback]:
        return Feedback()


def settled(answer: T | Future[T]) -> T:
    """What `first` or `feed` returned, waited for where it is a future."""
    return answer.result() if isinstance(answer, Future) else answer


class Task:
    """Base class: override `items` and `score`, and `open` where the environment answers back.

    What is said of single messages (an agent's own answer, coordination) and of votes (maj@k, self-consistency, a debate without
    a judge) needs a way to read an answer: a task that overrides `answer`, `vote` or `message_correct` has one. A score alone
    says nothing of it, as it may be made of several messages or look for anything in them; there these numbers are unknown
    (None), never 0.
    """

    name = ""
    reward_range: tuple[float, float] = (0.0, 1.0)
    data_form: type[Form] = Form  # what the verifier needs in the data of an item
    needs_every_message = False  # the score is made of several messages: none of them answers alone

    @property
    def reads_answers(self) -> bool:
        """Whether there are answers to compare and to vote over."""
        return type(self).answer is not Task.answer or type(self).vote is not Task.vote

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

    def check_item(self, item: Item) -> None:
        """Raises UserError where an item that was read from a file lacks what the verifier needs."""
        check_form(self.data_form, item.data, f"item {item.id}: data")

    def answer(self, text: str) -> str | None:
        """The answer a message states, if any; used by coordination metrics."""
        return None

    def vote(self, episode: Episode) -> str | None:
        """The answer of a whole episode as a majority counts it: what is the same answer is the same text."""
        return self.answer(episode.as_answered().messages[-1].text) if episode.messages else None

    def categories(self, item: Item) -> dict[str, str]:
        """What results are also reported by, such as {"subject": "Algebra", "level": "5"}."""
        return {name: str(item.data[name]) for name in CATEGORIES if isinstance(item.data.get(name), (str, int))}

    def measures(self, episode: Episode) -> dict[str, float]:
        """Further numbers that the benchmark reports of an episode, beside its reward."""
        return {}

    def part(self, message: Message) -> int:
        """Which part of the answer a message gives; an agent's last word on each part is what it stands by."""
        return 0

    def message_correct(self, item: Item, message: Message) -> bool | None:
        """Whether this message on its own is right; None where the task cannot tell."""
        expected = item.data.get("answer")
        return None if expected is None or not self.reads_answers else self.answer(message.text) == str(expected)

    def use_recorded(self) -> None:
        """From now on messages are recorded ones: nobody is asked to answer them."""

    def check_playable(self) -> None:
        """Raises UserError where the team talks to somebody and nobody is there; recorded messages can be scored all the same."""

    def check_agents(self, agents: Sequence[str], max_messages: int) -> None:
        """Raises UserError when the team cannot play this task."""
        self.check_playable()

    def check_router(self, router: Router) -> None:
        """Raises UserError where the router makes one message the answer and this task has no such thing."""
        if router.one_answer and self.needs_every_message:
            raise UserError(
                f"team.router.kind: one message is the answer of a debate or role play, and {self.name or 'this task'} scores "
                "several; use another router, or another task (column_sum: task.digits=1)"
            )
        if router.votes and not self.reads_answers:
            raise UserError(
                f"team.router.kind = 'debate': {self.name or 'this task'} reads no answers from messages, so there is nothing to "
                "vote over; name a team.router.judge"
            )


def item_of(episode: Episode) -> Item:
    item = episode.item
    assert isinstance(item, Item)
    return item
