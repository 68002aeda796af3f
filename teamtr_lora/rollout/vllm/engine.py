"""Sampler `vllm`: an engine in this process, every agent a LoRA on one copy of the base.

`submit` and `poll` drive the engine's own step loop, so an episode goes on to its next agent as soon as its message is done and
all agents share every batch. Each adapter version has its own id and name, never used again: nothing that vLLM caches by name
(prefix blocks above all) can belong to another version.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.versions import AdapterVersion, write_version
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.recipe.rollout_section import VLLM_TEMPERATURES
from teamtr_lora.rollout.sampler import Completion, Request, SamplerStats, request_problem
from teamtr_lora.rollout.vllm.close import close_engine, collect
from teamtr_lora.rollout.vllm.internals import SlotWriter, knows
from teamtr_lora.rollout.vllm.queue import DirectQueue, Sampled
from teamtr_lora.rollout.vllm.start import SharedMemory, engine_closed, start_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Published:
    version: AdapterVersion
    lora_id: int
    lora_request: Any


# A step that takes in new prompts costs more than one that only decodes, so new requests wait for company: until they are this
# share of those running, or for this share of the steps that a message takes.
ADMIT_SHARE, ADMIT_WAIT = 1 / 8, 0.1


class VllmSampler:
    """Implements `Sampler`. One slot more than agents: a new version is in place before the one it replaces goes.

    With `lora=False` the bare base answers for every agent: what the adapters cost is measured against that.
    """

    def __init__(
        self, base: FrozenBase, bank: AdapterBank, rollout: RolloutSection, *, context_tokens: int, lora: bool = True
    ) -> None:
        self._bank, self._vocab_size, self._context = bank, base.vocab_size, context_tokens
        self._lora = lora
        self.failed: BaseException | None = None  # what ended a step in the middle
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ids = self._tickets = 0
        self._live: dict[str, _Published] = {}
        self._running: Counter[int] = Counter()  # unfinished requests by LoRA id
        self._retired: dict[int, _Published] = {}  # superseded, but still sampling
        self._owner: dict[int, _Published] = {}  # by ticket
        self._done: list[Completion] = []
        self._requests = self._prompt_tokens = self._sampled_tokens = 0
        self._seconds = 0.0
        self._new: list[tuple[int, Request, _Published]] = []
        self._waited = 0
        self._message_tokens = 0.0  # of a usual message, by those that finished
        self._engine = start_engine(base, bank, rollout, context_tokens=context_tokens, lora=lora)
        offload = rollout.vllm.offload if self._engine.model_config.enable_sleep_mode else "never"
        self.memory = SharedMemory(self._engine, base.device, offload, before_sleep=self._drain)
        self._queue: Any = None
        self._writer: SlotWriter | None = None
        try:
            known = _known()
            self._queue = DirectQueue(self._engine, _sampling_params) if known else PublicQueue(self._engine)
            if lora and known and rollout.vllm.publish == "auto":
                self._writer = _writer(self._engine)
        except BaseException:
            self.close()
            raise

    def publish(self, version: AdapterVersion) -> None:
        if self._engine is None:
            raise RuntimeError("the vLLM engine is closed")
        if self._bank.version(version.agent) != version:
            raise RuntimeError(f"{version.agent} {version.name} was published, but the bank holds another version")
        before = self._live.get(version.agent)
        if before and before.version == version:
            return
        self.memory.wake()
        while self._retired:  # one slot is spare: an older version that still samples has to finish first
            self._step()
        published = self._load(version)
        self._live[version.agent] = published
        if before:
            self._retired[before.lora_id] = before
            self._release()

    def submit(self, request: Request) -> int:
        if self._engine is None:
            raise RuntimeError("the vLLM engine is closed")
        self._tickets += 1
        error = request_problem(
            request,
            self._live,
            vocab_size=self._vocab_size,
            context_tokens=self._context,
            temperatures=VLLM_TEMPERATURES,
        )
        if error:
            self._done.append(Completion(self._tickets, error=error))
            return self._tickets
        published = self._live[request.agent]
        self._new.append((self._tickets, request, published))
        self._owner[self._tickets] = published
        self._running[published.lora_id] += 1
        return self._tickets

    def poll(self) -> list[Completion]:
        started = time.monotonic()
        while not self._done and self._owner:
            self._step()
        self._seconds += time.monotonic() - started
        done, self._done = self._done, []
        return done

    def stats(self) -> SamplerStats:
        return SamplerStats(self._requests, self._prompt_tokens, self._sampled_tokens, self._seconds)

    def close(self) -> None:
        """Ends the engine and gives its memory back."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._writer = self._queue = None  # their views would keep its memory
        self.memory.close()
        try:
            close_engine(engine)
        finally:
            engine_closed(engine)
            del engine
            collect()
        if self._folder:
            self._folder.cleanup()
        self._owner.clear()
        self._done.clear()
        self.failed = None

    def registered(self) -> set[int]:
        """LoRA ids the engine holds: the live versions, and superseded ones that still sample."""
        return set(self._engine.list_loras())

    def _drain(self) -> None:
        """Finishes what is in flight (a rollout that failed may have left requests), and the step scheduled ahead of it."""
        while self._owner:
            self._step()
        with self._not_in_halves():
            self._queue.settle()

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
            ticket, request, published = self._new.pop(0)  # first, so that an interrupt cannot make it come twice
            try:
                self._queue.add(ticket, request, published.lora_request)
            except BaseException as refused:
                self._running[self._owner.pop(ticket).lora_id] -= 1
                if not isinstance(refused, Exception):
                    raise
                self._done.append(Completion(ticket, error=f"vLLM refused the request: {refused}"))  # this request alone
                continue
            self._requests += 1
            self._prompt_tokens += len(request.prompt_ids)

    def _step(self) -> None:
        with self._not_in_halves():
            self._admit()
            self._take(self._queue.step())

    @contextmanager
    def _not_in_halves(self) -> Iterator[None]:
        """An engine that was interrupted is not used again: blocks that were never computed may be in its prefix cache."""
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
            self._running[published.lora_id] -= 1
            self._sampled_tokens += len(sampled.tokens)
            self._message_tokens += 0.02 * (len(sampled.tokens) - self._message_tokens)
            finish: Any = sampled.finish
            error = None if finish in ("stop", "length") else f"vLLM ended the request: {finish}"
            name = published.version.name
            self._done.append(Completion(sampled.ticket, sampled.tokens, sampled.logprobs, name, finish, error))
        if self._retired:
            self._release()

    def _load(self, version: AdapterVersion) -> _Published:
        from vllm.lora.request import LoRARequest

        self._ids += 1
        if not self._lora:
            return _Published(version, self._ids, None)
        name = f"{version.agent}/{version.name}/{self._ids}"
        tensors, config = self._bank.tensors(version.agent), self._bank.config(version.agent)
        if self._writer is not None:
            self._writer.put(self._ids, tensors, rank=config["r"], scaling=self._bank.scaling(version.agent))
            return _Published(version, self._ids, LoRARequest(name, self._ids, f"memory:{name}"))
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="teamtr-lora-")
        request = LoRARequest(name, self._ids, str(write_version(Path(self._folder.name), version, tensors, config)))
        if not self._engine.add_lora(request):
            raise RuntimeError(f"vLLM did not take adapter {name}")
        return _Published(version, self._ids, request)

    def _release(self) -> None:
        for lora_id in [i for i in self._retired if not self._running[i]]:
            retired = self._retired.pop(lora_id)
            del self._running[lora_id]
            if self._writer is not None:
                self._writer.drop(lora_id)
            elif self._lora:
                self._engine.remove_lora(lora_id)
                if retired.version not in {p.version for p in (*self._live.values(), *self._retired.values())}:
                    shutil.rmtree(retired.lora_request.lora_path, ignore_errors=True)


class PublicQueue:
    """The same work through vLLM's public calls, for versions whose internals are not known here."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def add(self, ticket: int, request: Request, lora_request: Any) -> None:
        prompt = {"prompt_token_ids": request.prompt_ids}
        self._engine.add_request(str(ticket), prompt, _sampling_params(request), lora_request=lora_request)

    def settle(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def step(self) -> list[Sampled]:
        finished = []
        for output in self._engine.step():
            if output.finished:
                said = output.outputs[0]
                logprobs = [entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)]
                finished.append(Sampled(int(output.request_id), list(said.token_ids), logprobs, str(said.finish_reason)))
        return finished


def _writer(engine: Any) -> SlotWriter | None:
    try:
        return SlotWriter(engine)
    except RuntimeError as other:
        logger.warning("adapters go to vLLM through a folder, which is slower: %s", other)
        return None


def _known() -> bool:
    from vllm import __version__

    if not knows(__version__):
        logger.warning(
            "vLLM %s is not among the versions whose internals are known here: adapters go to it through a folder, requests "
            "through its public interface; both are slower", __version__,
        )  # fmt: skip
    return knows(__version__)


def _sampling_params(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.params.temperature,
        max_tokens=request.params.max_tokens,
        seed=request.seed % 2**63,
        stop_token_ids=list(request.params.stop_ids),
        ignore_eos=True,  # the protocol's own end tokens are in stop_token_ids
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
