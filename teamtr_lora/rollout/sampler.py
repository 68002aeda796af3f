"""The Sampler contract: five methods, no more. Tokens in, tokens out; text never passes through here."""

from __future__ import annotations

import hashlib
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


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from names and numbers: the same for the same episode, whenever and with whomever it is sampled."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
