"""What the benchmarks of updates read of a GPU's memory, beside what the memory model and `plan` say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.memory_model import update_memory, update_peak
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.study.plan import make_plan
from teamtr_lora.training.microbatch_size import team_shape
from teamtr_lora.training.update import AgentUpdater


@contextmanager
def memory_beside_the_model(playable: PlayableTeam, updater: AgentUpdater, recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Around an update: what it took beside what stood before, and what the memory model says. On a CPU nothing is found."""
    found: dict[str, Any] = {}
    if not torch.cuda.is_available():
        yield found
        return
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield found
    measured = torch.cuda.max_memory_allocated() - standing
    shape = replace(team_shape(playable, recipe), tokens=updater.scorer.tokens_per_microbatch)
    parts = update_memory(base_facts(playable.base.folder), shape)
    model = update_peak(parts)
    found |= {
        "model_gib": model / 2**30,
        "measured_gib": measured / 2**30,
        "model_over_measured": model / measured,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "standing_gib": standing / 2**30,
        **{f"{part} gib": size / 2**30 for part, size in parts.items()},
    }


@contextmanager
def whole_memory(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """The most that the driver counts on the GPU meanwhile, of all processes, and what `plan` says. On a CPU nothing is found."""
    found: dict[str, Any] = {}
    if not torch.cuda.is_available():
        yield found
        return
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            most = max(most, total - free)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
    planned = make_plan(recipe).memory_total_bytes
    found |= {"driver_gib": most / 2**30, "plan_gib": planned / 2**30, "plan_over_driver": planned / most}
