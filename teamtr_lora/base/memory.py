"""What a GPU has and has left; what this process has used, memory at most, and time; and in which phase a GPU was full."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# What libraries below torch say of a full GPU: they take memory past torch's allocator, and have no error of their own for it.
_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_before_reset: dict[torch.device, int] = {}  # the peak of a GPU up to the last `reset_peak`


@contextmanager
def memory_phase(name: str) -> Iterator[None]:
    """Marks an error of a full GPU with what was going on; the innermost phase is the one it is called by."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _FULL) and not isinstance(error, torch.OutOfMemoryError):
            raise
        full = error if isinstance(error, torch.OutOfMemoryError) else torch.OutOfMemoryError(str(error))
        if phase_of(full) is None:
            full.phase = name  # type: ignore[attr-defined]
        if full is error:
            raise
        raise full from error


def phase_of(error: torch.OutOfMemoryError) -> str | None:
    return getattr(error, "phase", None)


def total_bytes(device: torch.device) -> int | None:
    """All memory of a GPU; None on a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_properties(device).total_memory


def free_bytes(device: torch.device) -> int:
    """Of a GPU, for tensors of this process: what its allocator keeps without need is free too."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement of a GPU's peak without losing the old one."""
    _before_reset[device] = peak_memory(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated tensors on a GPU; on a CPU the resident set, libraries included."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _before_reset.get(device, 0))
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would also count the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_age() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not say."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return 0.0
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # the 22nd field; the 2nd, in parentheses, may hold anything
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
