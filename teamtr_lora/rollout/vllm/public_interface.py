"""The parts of a running vLLM engine that the sampler uses, on vLLM's public interface: add_request, step, add_lora, remove_lora,
list_loras, sleep and wake_up of `LLMEngine`. Everything works with these alone (`rollout.vllm.patches=none`); each patch in
`patches/` replaces one part by a faster one.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch

from teamtr_lora.base.versions import AdapterVersion, write_version
from teamtr_lora.rollout.sampler import Request

if TYPE_CHECKING:  # peft takes seconds to import, and `serve` needs none of it
    from teamtr_lora.base.bank import AdapterBank


@dataclass(slots=True)
class Sampled:
    """A request's tokens so far; `finish` is set when there are no more."""

    ticket: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""  # stop, length, or what went wrong


class PublicQueue:
    """Requests into the engine, tokens out of it, by `add_request` and `step`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def add(self, ticket: int, request: Request, lora_request: Any) -> None:
        prompt = {"prompt_token_ids": request.prompt_ids}
        self._engine.add_request(str(ticket), prompt, sampling_params(request), lora_request=lora_request)

    def step(self) -> list[Sampled]:
        """One step of the engine; the requests that finished in it."""
        finished = []
        for output in self._engine.step():
            if output.finished:
                said = output.outputs[0]
                logprobs = [entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)]
                finished.append(Sampled(int(output.request_id), list(said.token_ids), logprobs, str(said.finish_reason)))
        return finished

    def settle(self) -> None:
        """Steps until the engine has nothing in flight."""
        while self._engine.has_unfinished_requests():
            self._engine.step()


class Adapters:
    """Adapter versions into the engine, and out of it. These go nowhere: the bare base answers for every agent."""

    def put(self, lora_id: int, version: AdapterVersion, bank: AdapterBank) -> Any:
        """Puts the bank's weights of this version in place; returns the LoRARequest that requests name, or None for the base."""
        return None

    def drop(self, lora_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class FolderAdapters(Adapters):
    """A folder for each version, which `add_lora` reads."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._folder = tempfile.TemporaryDirectory(prefix="teamtr-lora-")

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    def put(self, lora_id: int, version: AdapterVersion, bank: AdapterBank) -> Any:
        from vllm.lora.request import LoRARequest

        tensors, config = bank.tensors(version.agent), bank.config(version.agent)
        path = write_version(self.folder / str(lora_id), version, tensors, config)
        request = LoRARequest(lora_name(lora_id, version), lora_id, str(path))
        if not self._engine.add_lora(request):
            raise RuntimeError(f"vLLM did not take adapter {request.lora_name}")
        return request

    def drop(self, lora_id: int) -> None:
        self._engine.remove_lora(lora_id)
        rmtree(self.folder / str(lora_id), ignore_errors=True)

    def close(self) -> None:
        self._folder.cleanup()


@dataclass
class EngineParts:
    """A started engine and what drives it."""

    engine: Any  # vllm.LLMEngine
    queue: PublicQueue
    adapters: Adapters
    patches: tuple[str, ...] = ()  # the names of those that were applied
    start_seconds: dict[str, float] = field(default_factory=dict)  # by phase
    before_close: list[Callable[[Any], None]] = field(default_factory=list)  # called with the engine
    made_group: bool = True  # torch's global process group is this engine's; else the processes of a split base made it


def lora_name(lora_id: int, version: AdapterVersion) -> str:
    """vLLM keys its prefix cache by this name, so it has the id in it, which is never used again."""
    return f"{version.agent}/{version.name}/{lora_id}"


def sampling_params(request: Request) -> Any:
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


def close_parts(parts: EngineParts) -> None:
    """Ends an engine by vLLM's documented way: drop it, collect it, clean up its process group.

    Something in the process keeps the engine's objects all the same (vLLM's issue 21073), so on a GPU the weights and the KV
    cache can stay allocated until the process ends, and no second engine may fit. The patch `close_memory` frees them.
    """
    engine, steps = parts.engine, parts.before_close
    parts.adapters.close()
    parts.engine = parts.queue = parts.adapters = None  # type: ignore[assignment]  # their references would keep its memory
    try:
        for step in steps:
            step(engine)
    finally:
        del engine
        gc.unfreeze()  # objects frozen at the start can be collected again
        gc.collect()
        if parts.made_group and torch.distributed.is_initialized():
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
