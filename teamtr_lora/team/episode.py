"""What an episode is made of, and how one agent's messages of it become token sequences to score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(slots=True)
class Message:
    """The tokens one agent emitted in one turn (a macro-action), end-of-turn token included when it was sampled."""

    agent: str
    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    sampler_logprobs: list[float]  # at the sampling temperature, as the engine reported them
    version: str  # the adapter version that produced the tokens
    finish: Literal["stop", "length"]
    text: str  # what the others and the verifier read: no end token, reasoning handled by the protocol

    @property
    def truncated(self) -> bool:
        return self.finish == "length"


@dataclass(slots=True)
class Episode:
    """One item played to the end. `rewards[t]` was earned by message t; the terminal reward is in the last entry."""

    item_id: str
    group: int  # index of the item in its batch: the G episodes of one item form a group
    prompt: str
    seed: int
    item: Any = None
    messages: list[Message] = field(default_factory=list)
    feedback: list[str | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ended: Literal["router", "task", "overflow"] = "router"
    success: bool = False
    credit: dict[str, list[float]] = field(default_factory=dict)  # by agent, where the task says who earned what: as `rewards`
    # by agent, where messages are recombined: its part of `credit` beside the others' messages of this episode, and of those that
    # follow it in its group, around it; `credit` has their mean
    beside: dict[str, list[float]] = field(default_factory=dict)
    answer: str | None = None  # the team's answer in words, of a question that a user asked
    answer_turn: int | None = None  # the message that is the team's answer, by the router's rule; None: nobody spoke

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def answer_message(self) -> Message | None:
        """The message that is the team's answer: the last one, unless the router or whoever asks for a score chose another."""
        return self.messages[-1 if self.answer_turn is None else self.answer_turn] if self.messages else None

    @property
    def answer_text(self) -> str:
        """What it says; "" where nobody spoke."""
        return self.answer_message.text if self.answer_message else ""

    def discounted_return(self, discount: float, agent: str | None = None) -> float:
        """R of eq:group_adv: the discounted return over messages; of `agent` alone where the task says who earned what."""
        rewards = self.credit.get(agent, []) if agent is not None and self.credit else self.rewards
        return sum(discount**turn * reward for turn, reward in enumerate(rewards))

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(m.token_ids) for m in self.messages)


@dataclass(slots=True)
class SequenceSpan:
    """Where one message lies in a sequence: `ids[start:end]`."""

    start: int
    end: int
    message: Message


@dataclass(slots=True)
class TokenSequence:
    """One forward pass worth of tokens: a context and the spans of one agent's messages in it."""

    ids: list[int]
    spans: list[SequenceSpan]
    episode: Episode
    position: int = 0  # of the episode in the list that the sequences were made from


def agent_sequences(episodes: Iterable[Episode], agent: str) -> list[TokenSequence]:
    """All of `agent`'s messages, one sequence an episode wherever its view only grew.

    A view that was cut between two of its turns (a stripped reasoning block) starts a new sequence: the tokens scored are
    exactly the tokens sampled after, never a re-rendering.
    """
    sequences: list[TokenSequence] = []
    for position, episode in enumerate(episodes):
        current: TokenSequence | None = None
        for message in episode.messages:
            if message.agent != agent or not message.token_ids:
                continue
            prompt, start = message.prompt_ids, len(message.prompt_ids)
            if current is None or prompt[: len(current.ids)] != current.ids:
                current = TokenSequence([], [], episode, position)
                sequences.append(current)
            current.ids = prompt + message.token_ids
            current.spans.append(SequenceSpan(start, start + len(message.token_ids), message))
    return sequences
