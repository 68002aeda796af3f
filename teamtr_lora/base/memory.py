"""How much memory this process has used at most, on the device that counts."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_before_reset: dict[torch.device, int] = {}  # the peak of a GPU up to the last `reset_peak`


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
