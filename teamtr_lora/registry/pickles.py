"""Pickles beside an adapter: never read, and refused unless they are what trainers leave beside every adapter they save."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from teamtr_lora.base.adapter_files import show
from teamtr_lora.base.source import PICKLE_PATTERNS
from teamtr_lora.common.errors import UserError

PATTERNS = (*PICKLE_PATTERNS, "*.pkl", "*.pickle", "*.joblib", "*.dill")
# A trainer's own state, beside the adapter in each of its checkpoints; nobody takes these for weights.
_TRAINERS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt", "rng_state*.pth")


def pickles(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name.lower(), pattern) for pattern in PATTERNS))


def refuse_pickles(names: Iterable[str], where: str) -> list[str]:
    """The pickles of a trainer among the files beside an adapter; any other is refused."""
    found = pickles(names)
    for name in found:
        if not any(fnmatchcase(name, pattern) for pattern in _TRAINERS):
            raise UserError(
                f"{where}: {show(name)} is a pickle, which can run code when loaded; remove it, or save the adapter again with "
                "PEFT's save_pretrained, which writes safetensors only"
            )
    return found
