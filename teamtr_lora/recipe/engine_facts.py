"""What each rollout engine can and cannot do: one record an engine.

The recipe's checks, `plan`, `serve`, the samplers themselves and the documentation read these records, so that a fact about an
engine is written down once. A new engine is one file with its sampler, one record here, and one line in the table of
`teamtr_lora.rollout.engines`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

PatchName = Literal["close_memory", "lora_layers", "direct_queue", "decode_schedule", "memory_publish", "token_map"]
"""The files of `teamtr_lora.rollout.vllm.patches`, by name: what rollout.vllm.patches may list."""
PATCH_NEEDS: dict[str, tuple[PatchName, ...]] = {"decode_schedule": ("direct_queue",), "token_map": ("memory_publish",)}
"""Patches that others build on."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The facts of one engine."""

    name: str  # as in rollout.engine
    description: str  # one line
    memory: Literal["trainer", "copy", "elsewhere"]
    """Where the base that samples is: the trainer's own model, a second copy in this process, or another process."""
    temperatures: tuple[float, float] = (0.0, sys.float_info.max)  # lowest and highest; 0, which is greedy, always works
    ranks: tuple[int, ...] = ()  # that it makes room for, ascending: an adapter takes the next one; none: any rank
    dora: bool = True  # whether it can sample from DoRA adapters
    quantization: Mapping[str, tuple[str, ...]]  # by kind of device: none, and what the base may be quantised to
    seeds: str  # what decides a draw
    exact_resume: bool  # whether a resumed run ends with the same adapters, bit for bit, as one that was never disturbed
    refills_batch: bool  # whether a finished request makes room for the next one at once
    by_url: bool = False  # whether it samples on the servers that rollout.server.urls names
    needs: str = ""  # the pip extra it comes with

    @property
    def max_rank(self) -> int | None:
        """The largest rank of an adapter; None: any."""
        return self.ranks[-1] if self.ranks else None

    def room_for(self, rank: int) -> int:
        """The rank that it has to be started with to serve an adapter of `rank`."""
        return next((size for size in self.ranks if size >= rank), rank)

    def takes_rank(self, rank: int) -> bool:
        return self.max_rank is None or rank <= self.max_rank

    def device_kinds(self, device: str) -> list[str]:
        """The kinds of device that base.device may turn out to be."""
        return [kind for kind in self.quantization if device == "auto" or device.startswith(kind)]

    def takes_quantization(self, quantization: str, device: str) -> bool:
        """Whether the engine can sample from a base quantised so, on any device that `device` (as in base.device) may mean."""
        return any(quantization in self.quantization[kind] for kind in self.device_kinds(device))


_EVERY_QUANTIZATION = {"cpu": ("none", "4bit", "8bit"), "cuda": ("none", "4bit", "8bit")}

_VLLM = EngineFacts(
    name="vllm",
    description="vLLM in this process: every agent a LoRA on one copy of the base, all mixed in each batch",
    memory="copy",
    temperatures=(0.01, 2.0),
    ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    dora=False,
    quantization={"cpu": ("none",), "cuda": ("none", "4bit")},
    seeds="the request's seed; the batch can change a token only through rounding",
    exact_resume=False,
    refills_batch=True,
    needs="vllm",
)
ENGINES: dict[str, EngineFacts] = {
    "transformers": EngineFacts(
        name="transformers",
        description="the trainer's own model, batched; the default, and the fastest for the embedded base on a CPU",
        memory="trainer",
        quantization=_EVERY_QUANTIZATION,
        seeds="the request's seed alone, whatever else is in the batch",
        exact_resume=True,
        refills_batch=False,
    ),
    "vllm": _VLLM,
    "vllm_server": replace(
        _VLLM,
        name="vllm_server",
        description="one or more vLLM servers by URL (rollout.server.urls), possibly on other hosts",
        memory="elsewhere",
        quantization=_EVERY_QUANTIZATION,  # of the trainer's base; a server's own is the server's affair
        by_url=True,
        needs="",
    ),
}
DEFAULT_ENGINE = "transformers"
