"""How much memory this process has used at most, on the device that counts."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated tensors on a GPU; on a CPU the resident set, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
