"""The Task contract: items, an interaction over each, a verifier. Every environment implements it, ours and yours.

A task that needs nothing but a verifier is a few lines:

    class Doubling(Task):
        def items(self, split):
            numbers = range(split == "test", 100, 2)
            return [Item(id=f"{split}-{n}", prompt=str(n), data={"answer": 2 * n}) for n in numbers]

        def score(self, episodes):
            return [float(e.answer_text.strip() == str(e.item.data["answer"])) for e in episodes]

`TeamTRTrainer(task=Doubling(), ...)` trains on it; a recipe names a function that returns it (`task: {name: custom, callable:
"my_env:make_task"}`). Where the environment answers back, `open` returns an Interaction of your own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import wraps
from inspect import isfunction
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, Union

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.background import as_future
from teamtr_lora.tasks.machinery.forms import Form, check_form
from teamtr_lora.tasks.machinery.returned import RETURNS, checked
from teamtr_lora.team import Episode, Message, Router, Team

logger = logging.getLogger(__name__)

Split = Literal["train", "test"]
T = TypeVar("T")

MOST_ITEMS = 1_000_000  # held at once of items without end; so many take half a gigabyte, and their episodes more
# Columns by which results are reported where items carry them.
CATEGORIES = ("category", "subject", "level", "type", "difficulty", "size", "kind", "domain", "lang", "language")


@dataclass(frozen=True, slots=True)
class Item:
    """One problem.

    id:      names the item in errors and transcripts; no two items of a split have the same
    prompt:  what the team reads first (an Interaction may open with something else)
    data:    what the verifier needs, such as the answer; the team never sees it
    """

    id: str
    prompt: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the environment answers to one message.

    text:    what all agents read next; None adds nothing to the transcript (nobody reads the text of the last feedback)
    reward:  what the team earned by this message; an episode's reward is the sum of these and of `Task.score`
    done:    whether the episode is over; else it goes on until the router has no next speaker
    credit:  which agent earned what by this message, in units of reward, such as {"solver": 1.0}; an agent that is not named
             earned 0, and {} says that nobody earned anything. None (the default) in a whole rollout: the task does not tell
             agents apart, and each learns from the team's reward.

    Where a task gives credit, an agent's update learns from that agent's credit alone; accuracies, reports and certificates go on
    with the team's reward.
    """

    text: str | None = None
    reward: float = 0.0
    done: bool = False
    credit: Mapping[str, float] | None = None


class Items(Protocol):
    """A split, read by position so that a run resumes by a number. `size` is None where items never run out: a generator of items
    makes item `position` from a random generator that is seeded by the position."""

    @property
    def size(self) -> int | None: ...

    def __getitem__(self, position: int, /) -> Item: ...


def check_count(items: Items, count: int, asked: str) -> None:
    """Raises UserError where more items are asked for than fit into memory; where items end, a large number means all of them."""
    if items.size is None and count > MOST_ITEMS:
        raise UserError(f"{asked}: this task makes items without end, and all are held in memory; use at most {MOST_ITEMS}")


class ItemList(list[Item]):
    """A split whose items are all there; `Task` makes it of a plain list."""

    @property
    def size(self) -> int | None:
        return len(self)


def _sized(items: Callable[[Any, Split], Any]) -> Callable[[Any, Split], Any]:
    @wraps(items)
    def sized(task: Any, split: Split) -> Any:
        found = items(task, split)
        return ItemList(found) if isinstance(found, (list, tuple)) else found

    return sized


Answer: TypeAlias = Union[T, Future[T], Coroutine[Any, Any, T]]  # noqa: UP007
"""What an environment gives back: at once, or later."""


class Interaction:
    """One episode as the environment sees it. A new one is opened for every episode, so its attributes are the episode's state.

    This base class is the trivial one: the team talks, nobody answers, and the reward comes at the end from `Task.score`.
    Override `feed` (and `first`, where the opening is not the item's prompt):

        class Guessing(Interaction):
            def feed(self, message):
                right = message.text.strip() == self.item.data["answer"]
                return Feedback("right" if right else "wrong, try again", reward=float(right), done=right)

    `message` has `.agent`, `.turn` and `.text`. Tool calls in a text are read by `teamtr_lora.team.tool_calls.read_calls(text)`;
    what a tool returns is the feedback's text.

    Where somebody else has to be asked (a server, a simulator), write `async def feed`, or return a concurrent.futures.Future:
    the collector plays other episodes meanwhile. Coroutines run together on one event loop in a thread of its own, so they share
    loop-bound objects such as HTTP sessions and must never block; a blocking call belongs into an executor, whose Future you
    return. What they draw from the process's random generators depends on timing: draw from `random.Random(...)` seeded by the
    item instead.
    """

    def __init__(self, item: Item) -> None:
        self.item = item

    def first(self) -> Answer[str]:
        """The text that the team reads first."""
        return self.item.prompt

    def feed(self, message: Message) -> Answer[Feedback]:
        """The answer to the team's latest message."""
        return Feedback()


def settled(answer: Answer[T]) -> T:
    """What `first` or `feed` returned, waited for where it comes later."""
    now = as_future(answer)
    return now.result() if isinstance(now, Future) else now


class Task:
    """An environment: override `items` and `score`, and `open` where the environment answers back.

    items(split)         the problems of the split "train" or "test": a list of Item, or any object with `size` and indexing
    open(item)           an Interaction, for one episode; by default the trivial one
    score(episodes)      the rewards at the end, one for each episode, whose `answer_text` is the team's answer; default: none
    credit(episodes)     the same by agent, where it is known who earned it; default: not known
    success(reward)      whether an episode with this total counts as right in accuracies; default: the highest reward
    reward_range         the lowest and the highest total reward of an episode, for `certify` and `success`
    answer(text)         the answer that a message states, for votes and coordination; default: cannot be read

    What is said of single messages (an agent's own answer, coordination) and of votes (maj@k, self-consistency, a debate without
    a judge) needs a way to read an answer: a task that overrides `answer`, `vote` or `message_correct` has one. A score alone
    says nothing of it, as it may be made of several messages or look for anything in them; there these numbers are unknown
    (None), never 0.
    """

    name = ""
    reward_range: tuple[float, float] = (0.0, 1.0)
    data_form: type[Form] = Form  # what the verifier needs in the data of an item
    needs_every_message = False  # the score is made of several messages: none of them answers alone
    _range_told = False
    scores_the_answer_alone = False  # the score does not look at any message but the one that is the team's answer

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "items" in vars(cls):  # a plain list is all that most tasks need, and readers of items ask for their `size`
            cls.items = _sized(cls.items)  # type: ignore[method-assign, assignment]
        if cls.__module__.partition(".")[0] != "teamtr_lora":
            for name, method in [(name, vars(cls)[name]) for name in RETURNS if isfunction(vars(cls).get(name))]:
                setattr(cls, name, checked(name, method))

    @property
    def reads_answers(self) -> bool:
        """Whether there are answers to compare and to vote over."""
        return type(self).answer is not Task.answer or type(self).vote is not Task.vote

    def items(self, split: Split) -> Items:
        """The problems of a split: the same ones, in the same order, at every call."""
        raise TypeError(f"{type(self).__name__} defines no items")

    def first_items(self, split: Split, count: int) -> list[Item]:
        """The first `count` items of a split, or all of a smaller one: the same ones every time."""
        items = self.items(split)
        check_count(items, count, f"evaluation.items (or --limit, --items, -n) = {count}")
        return [items[place] for place in range(count if items.size is None else min(count, items.size))]

    def open(self, item: Item) -> Interaction:
        """What answers the team in one episode on this item."""
        return Interaction(item)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Terminal rewards of finished episodes, in one call so that a reward function sees a whole batch."""
        return [0.0] * len(episodes)

    def credit(self, episodes: Sequence[Episode]) -> Sequence[Mapping[str, float] | None]:
        """Which agent earned what at the end of each episode, such as {"planner": 0.5}; it adds to the credit of the feedbacks.
        As there, an agent that is not named earned 0; None everywhere: the task does not tell agents apart."""
        return [None] * len(episodes)

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
        """The episode's answer for majority votes. Equal answers must be equal texts."""
        return self.answer(episode.answer_text) if episode.messages else None

    def team_answer(self, episode: Episode) -> str:
        """The team's answer, to be read by a person: what the message that answers states, or all of it where that is nothing."""
        text = episode.answer_text.strip()
        return self.answer(text) or text

    def categories(self, item: Item) -> dict[str, str]:
        """What results are also reported by, such as {"subject": "Algebra", "level": "5"}."""
        return {name: str(item.data[name]) for name in CATEGORIES if isinstance(item.data.get(name), (str, int))}

    def measures(self, episode: Episode) -> dict[str, float]:
        """Further numbers that the benchmark reports of an episode, beside its reward."""
        return {}

    def part(self, message: Message) -> int:
        """Which part of the answer a message gives. For each part an agent's last message counts."""
        return 0

    def message_correct(self, item: Item, message: Message) -> bool | None:
        """Whether this message on its own is right; None where the task cannot tell."""
        expected = item.data.get("answer")
        return None if expected is None or not self.reads_answers else self.answer(message.text) == str(expected)

    def use_recorded(self) -> None:
        """From now on messages are recorded ones, so no responder is asked for replies."""

    def _range_words(self) -> tuple[str, str]:
        """For `note_rewards`: what the range is called, and what counts as right and how to say otherwise."""
        where = "on the task, and as task.reward_range in a recipe"
        return f"{type(self).__name__}.reward_range", f"its highest as right unless `success` is overridden: set it {where}"

    def check_playable(self) -> None:
        """Raises UserError if the task needs a responder and has none. Recorded messages can be scored without one."""

    def check_team(self, team: Team, *, seed: int, per_stage: int, stages: int, held_out: int) -> None:
        """Raises UserError where the team cannot play this task or learn from it: few items, long prompts, no own answers."""
        from teamtr_lora.tasks.machinery.order import DataOrder  # which knows tasks

        self.check_agents(team.names, team.router.max_messages)
        self.check_router(team.router)
        if team.own_answer_share and self.needs_every_message:
            raise UserError(
                f"team.own_answer_share = {team.own_answer_share}: {self.name or 'this task'} scores several messages together, "
                "so no agent's own message is an answer; leave it out, or use another task (column_sum: task.digits=1)"
            )
        items = self.items("train")
        order = DataOrder(items, seed)
        order.check_stage(per_stage)
        check_count(self.items("test"), held_out, f"evaluation.items = {held_out}")
        if items.size is not None and type(self).open is Task.open:  # prompts are the rows of a dataset, just as they are
            _check_prompts(team, order.take(0, min(items.size, stages * per_stage)))

    def check_agents(self, agents: Sequence[str], max_messages: int) -> None:
        """Raises UserError when these agents cannot play this task."""
        self.check_playable()

    def check_router(self, router: Router) -> None:
        """Raises UserError where the router makes one message the answer and this task has no such thing."""
        votes = router.votes and not router.blind_round  # a debate votes too, and has no such setting
        if router.one_answer and self.needs_every_message:
            wrong, fix = "kind: one message is the answer of a debate or role play", "use another router"
            if votes:
                wrong, fix = "answer = 'majority': it makes one message the answer", "leave it out"
            raise UserError(
                f"team.router.{wrong}, and {self.name or 'this task'} scores several; {fix}, or use another task (column_sum: "
                "task.digits=1)"
            )
        if router.votes and not self.reads_answers:
            wrong, fix = ("answer = 'majority'", "leave it out") if votes else ("kind = 'debate'", "name a team.router.judge")
            raise UserError(
                f"team.router.{wrong}: {self.name or 'this task'} reads no answers from messages, so there is nothing to vote "
                f"over; {fix}, or for a dataset the function that finds them, task.answer"
            )


def _check_prompts(team: Team, items: Sequence[Item]) -> None:
    speaker = team.router.next([])
    if speaker is None:
        return
    room = team.context_tokens - len(team.protocol.begin("").prompt_for(speaker))
    long: dict[str, int] = {}
    for item in items:
        if len(item.prompt.encode()) >= room:  # tokenizers hardly ever need more tokens than bytes
            tokens = len(team.protocol.begin(item.prompt).prompt_for(speaker))
            long |= {item.id: tokens} if tokens >= team.context_tokens else {}
    if long:
        named = ", ".join(f"{name!r} ({tokens})" for name, tokens in list(long.items())[:5]) + (", ..." if len(long) > 5 else "")
        raise UserError(
            f"{len(long)} of the items to train on have prompts that do not fit into {team.context_tokens} tokens of context: "
            f"{named}; shorten them or leave them out, or raise team.protocol.context_tokens if the base allows more"
        )


class AskedTask(Task):
    """A question of the user's own: nothing is scored, and `reader` reads the answers that a router counts."""

    def __init__(self, reader: Task) -> None:
        self._reader = reader

    @property
    def reads_answers(self) -> bool:
        return self._reader.reads_answers

    def answer(self, text: str) -> str | None:
        return self._reader.answer(text)

    def vote(self, episode: Episode) -> str | None:
        return self._reader.vote(episode)


def note_rewards(task: Task, episodes: Sequence[Episode]) -> None:
    """Warns, once a task, where finished episodes earned what is outside of its `reward_range`."""
    low, high = task.reward_range
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    outside = next((e for e in episodes if not low - slack <= e.reward <= high + slack), None)
    if outside is not None and not task._range_told:
        task._range_told = True
        key, rest = task._range_words()
        logger.warning(
            "item %r got reward %g, outside %s = [%g, %g]: training goes on, but certificates need the true range, and "
            "accuracies count what earned %s", outside.item_id, outside.reward, key, low, high, rest,
        )  # fmt: skip


def item_of(episode: Episode) -> Item:
    item = episode.item
    assert isinstance(item, Item)
    return item
