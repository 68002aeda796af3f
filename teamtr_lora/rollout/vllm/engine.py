"""Sampler `vllm`: an engine in this process, every agent a LoRA on one copy of the base.

`submit` and `poll` drive the engine's own step loop, so an episode goes on to its next agent as soon as its message is done and
all agents share every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, base_facts
from teamtr_lora.base.memory import total_bytes
from teamtr_lora.base.memory_model import stored_bytes
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.sampler import Completion, Published, Request, SamplerBase
from teamtr_lora.rollout.vllm.gpu_lending import SharedMemory
from teamtr_lora.rollout.vllm.public_interface import EngineParts, Sampled
from teamtr_lora.rollout.vllm.start import close_engine, start_engine

# A step that takes in new prompts costs more than one that only decodes, so new requests wait for company: until they are this
# share of those running, or for this share of the steps that a message takes.
ADMIT_SHARE, ADMIT_WAIT = 1 / 8, 0.1


class VllmSampler(SamplerBase):
    """Implements `Sampler`. The engine has one LoRA slot more than agents: a new version is in place before the old one goes.

    With `lora=False` the bare base answers for every agent: what the adapters cost is measured against that.
    """

    def __init__(
        self, base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int, lora: bool = True
    ) -> None:
        super().__init__("vllm", bank, vocab_size=base.vocab_size, context_tokens=context_tokens)
        self._owner: dict[int, Published] = {}  # of unfinished requests, by ticket
        self._new: list[tuple[int, Request]] = []  # submitted, not yet with the engine
        self._waited = 0  # steps for which the new ones have waited
        self._message_tokens = 0.0  # of a usual message, by those that finished
        self._parts: EngineParts | None = start_engine(base, bank, rollout, context_tokens=context_tokens, lora=lora)
        offload = rollout.vllm.offload if self._parts.engine.model_config.enable_sleep_mode else "never"
        taken = 0
        if base.device.type == "cuda":
            stored = stored_bytes(base_facts(base.folder), base.quantization, base.dtype.itemsize)
            taken = rollout.engine_bytes(total_bytes(base.device), stored)
        self.memory = SharedMemory(self._parts.engine, base.device, offload, taken=taken, before_sleep=self._drain)

    @property
    def parts(self) -> EngineParts:
        """The engine and what drives it."""
        if self._parts is None:
            raise RuntimeError("the vLLM engine is closed")
        return self._parts

    def _check_open(self) -> None:
        _ = self.parts

    def _put(self, published: Published) -> Published:
        self.memory.wake()
        while self._retired:  # one slot is spare: an older version that still samples has to finish first
            self._step()
        return replace(published, name=self.parts.adapters.put(published.number, published.version, self._bank))

    def _drop(self, published: Published) -> None:
        self.parts.adapters.drop(published.number)

    def training_memory(self, *, measured: bool = True, least: int = 0) -> AbstractContextManager[None]:
        return self.memory.lent(measured=measured, least=least)

    def start_seconds(self) -> dict[str, float]:
        return self.parts.start_seconds

    def lendable_bytes(self) -> int:
        return self.memory.lendable

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        self.memory.close()
        close_engine(parts)
        self._owner.clear()
        self._new.clear()
        self._done.clear()
        self.failed = None

    def _accept(self, ticket: int, request: Request) -> None:
        published = self._live[request.agent]
        self._new.append((ticket, request))
        self._owner[ticket] = published
        self._running[published.number] += 1

    def _work(self) -> None:
        while not self._done and self._owner:
            self._step()

    def _drain(self) -> None:
        """Finishes what is in flight (a rollout that failed may have left requests), and the step scheduled ahead of it."""
        while self._owner:
            self._step()
        with self._not_in_halves():
            self.parts.queue.settle()

    def _admit(self) -> None:
        running = len(self._owner) - len(self._new)
        if not self._new:
            return
        if len(self._new) < ADMIT_SHARE * running and self._waited < ADMIT_WAIT * self._message_tokens:
            self._waited += 1
            return
        self.memory.wake()
        self._waited = 0
        while self._new:
            ticket, request = self._new.pop(0)  # first, so that an interrupt cannot make it come twice
            try:
                self.parts.queue.add(ticket, request, self._owner[ticket].name)
            except BaseException as refused:
                self._running[self._owner.pop(ticket).number] -= 1
                if not isinstance(refused, Exception):
                    raise
                self._done.append(Completion(ticket, error=f"vLLM refused the request: {refused}"))  # this request alone

    def _step(self) -> None:
        with self._not_in_halves():
            self._admit()
            self._take(self.parts.queue.step())

    @contextmanager
    def _not_in_halves(self) -> Iterator[None]:
        """Around a step: an engine that was interrupted in one is not used again, since blocks that were never computed may be in
        its prefix cache."""
        if self.failed is not None:
            raise RuntimeError("the vLLM engine has failed before; open a new one") from self.failed
        try:
            yield
        except BaseException as failure:
            self.failed = failure
            raise

    def _take(self, finished: list[Sampled]) -> None:
        for sampled in finished:
            published = self._owner.pop(sampled.ticket)
            self._running[published.number] -= 1
            self._message_tokens += 0.02 * (len(sampled.tokens) - self._message_tokens)
            finish: Any = sampled.finish
            error = None if finish in ("stop", "length") else f"vLLM ended the request: {finish}"
            self._done.append(
                Completion(
                    ticket=sampled.ticket,
                    token_ids=sampled.tokens,
                    logprobs=sampled.logprobs,
                    version=published.version.name,
                    finish=finish,
                    error=error,
                )
            )
        if self._retired:
            self._release()
