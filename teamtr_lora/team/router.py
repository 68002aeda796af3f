"""Who speaks next, and which message is the team's answer.

A router is a pure function of the messages so far: it belongs to the environment, not to the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from teamtr_lora.common.code_paths import user_code
from teamtr_lora.common.errors import UserError
from teamtr_lora.team.episode import Message

Read = Callable[[Message], str | None]  # the answer a message states, if any


@dataclass(frozen=True)
class Router:
    """`next(messages)` names the next speaker, or None to end the episode; never more than `max_messages` of them.

    `decide(messages, read)` is the place of the message that is the team's answer; without it that is the last one. The agents of
    a `blind_round` do not hear each other: their messages are heard when it is over.
    """

    choose: Callable[[Sequence[Message]], str | None]
    max_messages: int
    decide: Callable[[Sequence[Message], Read], int] | None = None
    blind_round: tuple[str, ...] = ()
    one_answer: bool = False  # a single message is all of the team's answer
    votes: bool = False  # the decision reads answers out of messages

    def next(self, messages: Sequence[Message]) -> str | None:
        return None if len(messages) >= self.max_messages else self.choose(messages)

    def together(self, messages: Sequence[Message]) -> list[str]:
        """The next speakers: one, or all who are left of a blind round, since none of them hears another. None: the end."""
        first = self.next(messages)
        if first in self.blind_round:
            return list(self.blind_round[self.blind_round.index(first) :])
        return [] if first is None else [first]

    @property
    def round_messages(self) -> int:
        """After so many messages they are heard."""
        return max(1, len(self.blind_round))

    def answer_turn(self, messages: Sequence[Message], read: Read) -> int | None:
        """The message that is the team's answer; None where nobody has spoken."""
        if not messages:
            return None
        return len(messages) - 1 if self.decide is None else self.decide(messages, read)


def build_router(
    kind: str,
    agents: Sequence[str],
    *,
    rounds: int = 1,
    sequence: Sequence[str] = (),
    done_marker: str = "",
    judge: str | None = None,
    answer: str = "last",
    custom: Callable[..., str | None] | None = None,
) -> Router:
    speakers = list(sequence) if kind == "sequence" else list(agents)
    in_turn = lambda messages: speakers[len(messages) % len(speakers)]  # noqa: E731
    limit = rounds * len(speakers)
    if kind in ("round_robin", "sequence"):
        return _answered(Router(in_turn, limit), answer)
    if kind == "blind":
        return Router(in_turn, limit, blind_round=tuple(speakers))
    if kind == "until_done":
        done = lambda messages: bool(messages) and done_marker in messages[-1].text  # noqa: E731
        return _answered(Router(lambda messages: None if done(messages) else in_turn(messages), limit), answer)
    if kind == "debate":
        return _debate([agent for agent in agents if agent != judge], rounds, judge)
    if kind == "role_play":
        return _role_play(agents[0], agents[1], rounds, done_marker)
    assert kind == "custom" and custom is not None
    return Router(_checked(custom, list(agents)), limit)


def _answered(router: Router, answer: str) -> Router:
    """With `majority` a last speaker who states no answer, or loses it, does not lose the team's."""
    return replace(router, decide=_majority, one_answer=True, votes=True) if answer == "majority" else router


def _debate(debaters: list[str], rounds: int, judge: str | None) -> Router:
    """Every debater speaks once a round without hearing the others of that round. Then the judge answers in one message, or the
    majority of the debaters' last answers is the team's answer."""
    spoken = rounds * len(debaters)
    in_turn = lambda messages: debaters[len(messages) % len(debaters)]  # noqa: E731
    if judge is None:
        return Router(in_turn, spoken, _majority, tuple(debaters), one_answer=True, votes=True)
    then_the_judge = lambda messages: judge if len(messages) == spoken else in_turn(messages)  # noqa: E731
    return Router(then_the_judge, spoken + 1, blind_round=tuple(debaters), one_answer=True)


def _majority(messages: Sequence[Message], read: Read) -> int:
    """The first message that states the answer most agents hold in their last message.

    Who states none does not vote; of equally many votes, the answer of the agent that spoke first wins. Where nobody states
    one, that agent's message stands, for the task to judge.
    """
    last = {message.agent: place for place, message in enumerate(messages)}  # agents in the order of their first messages
    answers = {place: answer for place in last.values() if (answer := read(messages[place])) is not None}
    if not answers:
        return next(iter(last.values()))
    winner = Counter(answers.values()).most_common(1)[0][0]  # of equally frequent answers, the one counted first
    return next(place for place, answer in answers.items() if answer == winner)


def _role_play(instructor: str, assistant: str, rounds: int, done_marker: str) -> Router:
    """The two in turn until the instructor says that it is done (CAMEL); the assistant's last message is the answer."""

    def choose(messages: Sequence[Message]) -> str | None:
        done = len(messages) > 1 and messages[-1].agent == instructor and done_marker in messages[-1].text
        return None if done else (instructor, assistant)[len(messages) % 2]

    def decide(messages: Sequence[Message], read: Read) -> int:
        solved = [place for place, message in enumerate(messages) if message.agent == assistant]
        return solved[-1] if solved else 0

    return Router(choose, 2 * rounds, decide, one_answer=True)


def _checked(custom: Callable[..., str | None], agents: list[str]) -> Callable[[Sequence[Message]], str | None]:
    def choose(messages: Sequence[Message]) -> str | None:
        try:
            with user_code():
                name = custom(messages=list(messages), agents=list(agents))
        except Exception as error:
            raise UserError(
                f"team.router.callable raised {type(error).__name__} after {len(messages)} messages: {error}"
            ) from error
        if name is not None and name not in agents:
            raise UserError(f"team.router.callable returned {name!r}, which is no agent; the agents are {', '.join(agents)}")
        return name

    return choose
