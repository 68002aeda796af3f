"""How many processes train a recipe on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.base.source import beside, is_small, present
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.runs.run_dir import chosen_run_dir

MOST = 8
ROOM = 2 << 30  # bytes: the libraries, a small base, and its passes
_CONTAINER = Path("/sys/fs/cgroup")


def cpu_processes(recipe: Recipe, name: str, *, resume: bool) -> int:
    """One a core and 2 GiB of free memory, where the base is small and they change nothing but times. `name`: of the run."""
    folder = present(beside(recipe.base.source, recipe.folder), recipe.base.revision)
    exact = ENGINES[recipe.rollout.engine].exact_resume and OPTIMIZERS[recipe.training.optimizer].exact
    if folder is None or not is_small(folder) or not exact:
        return 1
    if sys.platform != "linux":  # gloo may not find its own host
        return 1
    if resume:
        checkpoints = chosen_run_dir(recipe.output_dir, name, resume=True).checkpoints
        if checkpoints.exists() and checkpoints.state().threads > 1:  # it goes on with them
            return 1
    return max(1, min(MOST, cores(), free_memory() // ROOM))


def cores() -> int:
    """Those that this process may use."""
    own = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    time, _, period = _limit("cpu.max").partition(" ")
    return own if not time.isdigit() else max(1, min(own, int(time) // int(period)))


def free_memory() -> int:
    """Bytes, of the machine or of the container that this is in."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    most, used = _limit("memory.max"), _limit("memory.current")
    return min(free, int(most) - int(used)) if most.isdigit() else free


def _limit(name: str) -> str:
    file = _CONTAINER / name
    return file.read_text().strip() if file.is_file() else ""
