"""The Sampler contract: five methods, no more. Tokens in, tokens out; text never passes through here."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from teamtr_lora.base.versions import AdapterVersion


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
    requests: int
    prompt_tokens: int
    sampled_tokens: int
    seconds: float


class Sampler(Protocol):
    def publish(self, version: AdapterVersion) -> None:
        """Makes this version the one sampled for its agent; returns when it is."""
        ...

    def submit(self, request: Request) -> int:
        """Queues a request and returns its ticket."""
        ...

    def poll(self) -> list[Completion]:
        """Finished requests; blocks until there is one as long as any is queued."""
        ...

    def stats(self) -> SamplerStats: ...

    def close(self) -> None: ...


def request_problem(
    request: Request,
    agents: Collection[str],
    *,
    vocab_size: int,
    context_tokens: int,
    temperatures: tuple[float, float] = (0.0, sys.float_info.max),
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
