"""The Sampler contract, and what its engines share. Tokens in, tokens out; text never passes through here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.recipe.engine_facts import ENGINES

if TYPE_CHECKING:  # peft takes seconds to import
    from teamtr_lora.base.bank import AdapterBank


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float  # the policy is softmax(z / T); 0 picks the most likely token
    max_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: list[int]
    agent: str
    params: SamplingParams
    seed: int  # alone decides the draw: an episode does not depend on its batch mates


@dataclass(frozen=True, slots=True)
class Completion:
    ticket: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # at the sampling temperature
    version: str = ""  # the adapter version that produced the tokens
    finish: Literal["stop", "length"] = "stop"
    error: str | None = None  # this request failed alone; the others are not affected


@dataclass(frozen=True, slots=True)
class SamplerStats:
    """Of one engine since it was opened."""

    requests: int  # accepted ones
    prompt_tokens: int
    sampled_tokens: int  # of completions that were fetched
    seconds: float  # spent in poll


class Sampler(Protocol):
    """What the collector and the trainer ask of an engine.

    `publish`, `submit` and `poll` are the work: put an adapter version in place, queue a request, fetch what is done. `stats` and
    `close` say what was done and end it. Two more things are true of some engines only, and have a default here: one that shares
    the trainer's GPU may lend its memory during an update (`training_memory`), and one whose work was cut off in the middle
    (`failed`) must be replaced by a new one.
    """

    failed: BaseException | None = None
    """What cut the engine's work off in the middle; it is then closed and opened anew, never used again."""

    def publish(self, version: AdapterVersion) -> None:
        """Makes this version the one sampled for its agent; returns when it is."""
        ...

    def submit(self, request: Request) -> int:
        """Queues a request and returns its ticket."""
        ...

    def poll(self) -> list[Completion]:
        """Finished requests; blocks until there is one as long as any is queued."""
        ...

    def stats(self) -> SamplerStats:
        """What was done so far."""
        ...

    def close(self) -> None:
        """Ends the engine and forgets what is queued; a second call does nothing."""
        ...

    def training_memory(self) -> AbstractContextManager[None]:
        """Entered around an update: while it lasts, the engine's memory is the trainer's. By default nothing is lent."""
        return nullcontext()


class SamplerBase(Sampler):
    """What every engine needs and none should write again: tickets, the checking of requests, and the counters.

    An engine implements `publish`, `close`, `_accept` (a checked request, to be queued) and `_work` (return when at least one
    more completion is in `self._done`, or when nothing is queued).
    """

    def __init__(self, engine: str, bank: AdapterBank, *, vocab_size: int, context_tokens: int) -> None:
        self.facts = ENGINES[engine]
        self._bank, self._vocab_size, self._context_tokens = bank, vocab_size, context_tokens
        self._done: list[Completion] = []
        self._tickets = 0
        self._requests = self._prompt_tokens = self._sampled_tokens = 0
        self._seconds = 0.0

    def _agents(self) -> Collection[str]:
        """The agents that have a published version."""
        raise NotImplementedError

    def _accept(self, ticket: int, request: Request) -> None:
        raise NotImplementedError

    def _work(self) -> None:
        raise NotImplementedError

    def submit(self, request: Request) -> int:
        self._tickets += 1
        problem = request_problem(
            request,
            self._agents(),
            vocab_size=self._vocab_size,
            context_tokens=self._context_tokens,
            temperatures=self.facts.temperatures,
        )
        if problem:
            self._done.append(Completion(self._tickets, error=problem))
        else:
            self._accept(self._tickets, request)
            self._requests += 1
            self._prompt_tokens += len(request.prompt_ids)
        return self._tickets

    def poll(self) -> list[Completion]:
        started = time.monotonic()
        try:
            if not self._done:
                self._work()
        finally:
            self._seconds += time.monotonic() - started
        done, self._done = self._done, []
        self._sampled_tokens += sum(len(completion.token_ids) for completion in done)
        return done

    def stats(self) -> SamplerStats:
        return SamplerStats(
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            sampled_tokens=self._sampled_tokens,
            seconds=self._seconds,
        )

    def _check_in_bank(self, version: AdapterVersion) -> None:
        """Engines read weights from the bank, so only the version that is there can be published."""
        if self._bank.version(version.agent) != version:
            raise RuntimeError(f"{version.agent} {version.name} was published, but the bank holds another version")


def request_problem(
    request: Request,
    agents: Collection[str],
    *,
    vocab_size: int,
    context_tokens: int,
    temperatures: tuple[float, float],
) -> str | None:
    """Why the engine could not serve this request; it then fails alone."""
    temperature, (low, high) = request.params.temperature, temperatures
    if not (temperature == 0 or low <= temperature <= high):
        return f"temperature {temperature:g} cannot be sampled at by this engine; use 0, or {low:g} to {high:g}"
    if request.params.max_tokens < 1:
        return f"a message of at most {request.params.max_tokens} tokens was asked for"
    if request.agent not in agents:
        return f"unknown agent {request.agent!r}; published: {', '.join(agents) or 'none'}"
    if not isinstance(request.seed, int):
        return f"the seed {request.seed!r} is no whole number"
    if not request.prompt_ids or not all(isinstance(token, int) and 0 <= token < vocab_size for token in request.prompt_ids):
        return f"the prompt is empty or has a token id outside 0..{vocab_size - 1}"
    if len(request.prompt_ids) + request.params.max_tokens > context_tokens:
        return f"{len(request.prompt_ids)} prompt + {request.params.max_tokens} new tokens exceed the context of {context_tokens}"
    return None


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from names and numbers: the same for the same episode, whenever and with whomever it is sampled."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
