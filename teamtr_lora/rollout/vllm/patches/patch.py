"""The record of one patch of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from teamtr_lora.recipe.engine_facts import PATCH_NEEDS, PatchName
from teamtr_lora.rollout.vllm.public_interface import EngineParts


@dataclass(frozen=True, kw_only=True)
class Patch:
    """What a file of this folder replaces in vLLM, where, and how. The file's docstring says why and what it is worth."""

    name: PatchName
    versions: tuple[str, ...] = ("0.26", "0.32")  # of vLLM, as major.minor: those it was tested with
    devices: tuple[str, ...] = ("cpu", "cuda")
    for_adapters: bool = False  # whether it does nothing for an engine without LoRA
    around_start: Callable[[dict[str, Any]], AbstractContextManager[None]] = lambda options: nullcontext()
    """Entered while the engine is made, with the engine's options, which it may change."""
    apply: Callable[[EngineParts], str | None] = lambda parts: None
    """Called with the started engine. Returns why the patch does not fit this engine, or None where it was applied."""

    @property
    def needs(self) -> tuple[PatchName, ...]:
        """Other patches that it builds on."""
        return PATCH_NEEDS.get(self.name, ())

    def knows(self, version: str) -> bool:
        return ".".join(version.split(".")[:2]) in self.versions
