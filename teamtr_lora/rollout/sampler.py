"""The Sampler contract, and what its engines share. Tokens in, tokens out; text never passes through here."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

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
    episode: int | None = None  # requests of one episode share the beginning of their prompts, which an engine may have cached


@dataclass(frozen=True, slots=True)
class Completion:
    ticket: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # at the sampling temperature
    version: str = ""  # the adapter version that produced the tokens
    finish: Literal["stop", "length"] = "stop"
    error: str | None = None  # this request failed alone; the others are not affected


class Sampler(Protocol):
    """What the collector and the trainer ask of an engine.

    `publish`, `submit`, `poll` and `close` are the work: put an adapter version in place, queue a request, fetch what is done,
    end. The rest is true of some engines only, and has a default here: one that shares the trainer's GPU may lend its memory
    during an update (`training_memory`, and how much: `lendable_bytes`), one has a start that takes long (`start_seconds`), and
    one whose work was cut off in the middle (`failed`) must be replaced by a new one.
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

    def close(self) -> None:
        """Ends the engine and forgets what is queued; a second call does nothing."""
        ...

    def training_memory(self, *, measured: bool = True, least: int = 0) -> AbstractContextManager[None]:
        """Entered around an update, or (not `measured`) around less than one: while it lasts, the engine's memory is the
        trainer's. `least`: bytes that the update may take. By default nothing is lent."""
        return nullcontext()

    def start_seconds(self) -> dict[str, float]:
        """What the engine's start took, by phase."""
        return {}

    def lendable_bytes(self) -> int:
        """GPU memory of the engine that `training_memory` may free for an update."""
        return 0


class StandIn(Sampler):
    """A sampler with other adapters answering for some agents: `adapters` has them by agent."""

    def __init__(self, sampler: Sampler, adapters: Mapping[str, str]) -> None:
        self._sampler, self._adapters = sampler, adapters

    def publish(self, version: AdapterVersion) -> None:
        self._sampler.publish(version)

    def submit(self, request: Request) -> int:
        return self._sampler.submit(replace(request, agent=self._adapters.get(request.agent, request.agent)))

    def poll(self) -> list[Completion]:
        return self._sampler.poll()

    def close(self) -> None:
        self._sampler.close()


@dataclass(frozen=True, slots=True)
class Published:
    """An adapter version in an engine. No two have the same number, so that nothing which an engine caches by it (prefix blocks
    above all) can belong to another version."""

    number: int
    version: AdapterVersion
    name: Any = None  # what the engine's requests call it by


class SamplerBase(Sampler):
    """What every engine needs and none should write again: tickets, the checking of requests, and which version of an agent is
    sampled.

    An engine implements `close`, `_accept` and `_work`. One with weights of its own also implements `_put` and `_drop`, and
    counts the unfinished requests of each version in `self._running`: a superseded one stays until its last request is done.
    """

    def __init__(self, engine: str, bank: AdapterBank, *, vocab_size: int, context_tokens: int) -> None:
        self.facts = ENGINES[engine]
        self._bank, self._vocab_size, self._context_tokens = bank, vocab_size, context_tokens
        self._done: list[Completion] = []
        self._tickets = self._numbers = 0
        self._live: dict[str, Published] = {}  # by agent
        self._retired: dict[int, Published] = {}  # superseded, perhaps still sampling; by number
        self._running: Counter[int] = Counter()  # unfinished requests, by the number of their version

    def _check_open(self) -> None:
        """Raises after `close`, where an engine cannot go on."""

    def _put(self, published: Published) -> Published:
        """Brings a version into the engine; returns it with the name that requests call it by."""
        return published

    def _drop(self, published: Published) -> None:
        """Takes a version out of the engine."""

    @abstractmethod
    def _accept(self, ticket: int, request: Request) -> None:
        """Queues a request that was checked."""

    @abstractmethod
    def _work(self) -> None:
        """Returns when at least one more completion is in `self._done`, or when nothing is queued."""

    def publish(self, version: AdapterVersion) -> None:
        self._check_open()
        if self._bank.version(version.agent) != version:  # engines read weights from the bank
            raise RuntimeError(f"{version.agent} {version.name} was published, but the bank holds another version")
        before = self._live.get(version.agent)
        if before and before.version == version:
            return
        self._numbers += 1
        self._live[version.agent] = self._put(Published(self._numbers, version))
        if before:
            self._retired[before.number] = before
            self._release()

    def _release(self) -> None:
        """Drops superseded versions whose last request has finished."""
        for number in [number for number in self._retired if not self._running[number]]:
            del self._running[number]
            self._drop(self._retired.pop(number))

    def submit(self, request: Request) -> int:
        self._check_open()
        self._tickets += 1
        if problem := self._problem(request):
            self._done.append(Completion(self._tickets, error=problem))
        else:
            self._accept(self._tickets, request)
        return self._tickets

    def poll(self) -> list[Completion]:
        if not self._done:
            self._work()
        done, self._done = self._done, []
        return done

    def _problem(self, request: Request) -> str | None:
        """Why the engine could not serve this request; it then fails alone."""
        temperature, (low, high) = request.params.temperature, self.facts.temperatures
        if not (temperature == 0 or low <= temperature <= high):
            return f"temperature {temperature:g} cannot be sampled at by this engine; use 0, or {low:g} to {high:g}"
        if request.params.max_tokens < 1:
            return f"a message of at most {request.params.max_tokens} tokens was asked for"
        if request.agent not in self._live:
            return f"unknown agent {request.agent!r}; published: {', '.join(self._live) or 'none'}"
        if not isinstance(request.seed, int):
            return f"the seed {request.seed!r} is no whole number"
        prompt, new, vocabulary = request.prompt_ids, request.params.max_tokens, self._vocab_size
        if not prompt or not all(isinstance(token, int) and 0 <= token < vocabulary for token in prompt):
            return f"the prompt is empty or has a token id outside 0..{vocabulary - 1}"
        if len(prompt) + new > self._context_tokens:
            return f"{len(prompt)} prompt + {new} new tokens exceed the context of {self._context_tokens}"
        return None


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from names and numbers: the same for the same episode, whenever and with whomever it is sampled."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
