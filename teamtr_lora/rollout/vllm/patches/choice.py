"""The patches there are, and which of them an engine gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

from teamtr_lora.common.errors import UserError
from teamtr_lora.rollout.vllm.patches import close_memory, decode_schedule, direct_queue, lora_layers, memory_publish, token_map
from teamtr_lora.rollout.vllm.patches.patch import Patch

logger = logging.getLogger(__name__)

# In the order in which they are applied.
PATCHES: dict[str, Patch] = {
    patch.name: patch
    for patch in (
        close_memory.PATCH,
        lora_layers.PATCH,
        direct_queue.PATCH,
        decode_schedule.PATCH,
        memory_publish.PATCH,
        token_map.PATCH,
    )
}
SLOWDOWN = (
    "about 2.4 times slower with a 135M base on one H200 (tools/bench_rollout.py --base SMOLLM2 --episodes 512 "
    "--message-tokens 24 --parts vllm, with and without --patches none)"
)


def chosen(setting: Literal["auto", "none"] | Sequence[str], version: str, device: str) -> list[Patch]:
    """The patches that `rollout.vllm.patches` asks for, of this vLLM on this kind of device (cpu or cuda)."""
    if setting == "none":
        return []
    if setting == "auto":
        fitting = [patch for patch in PATCHES.values() if device in patch.devices]
        known = [patch for patch in fitting if patch.knows(version)]
        if unknown := [patch for patch in fitting if patch not in known]:
            names = ", ".join(patch.name for patch in unknown)
            versions = " and ".join(sorted({tested for patch in unknown for tested in patch.versions}))
            logger.warning(
                "vLLM %s: patches %s are for %s; running on vLLM's public interface instead, %s",
                version, names, versions, SLOWDOWN,
            )  # fmt: skip
        return [patch for patch in known if all(PATCHES[name] in known for name in patch.needs)]
    for name in setting:
        patch, key = PATCHES[name], f"rollout.vllm.patches = {name}"
        if not patch.knows(version):
            versions = " and ".join(patch.versions)
            raise UserError(f"{key}: it is for vLLM {versions}, and this is {version}; leave it out, or use auto")
        if device not in patch.devices:
            kind = "GPUs" if device == "cpu" else "CPUs"
            raise UserError(f"{key}: it is for {kind}, and the base is on {device}; leave it out, or use auto")
    return [patch for patch in PATCHES.values() if patch.name in setting]
