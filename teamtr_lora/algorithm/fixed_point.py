"""Sums that do not depend on the order of what is added, nor on who adds it: floating-point numbers as whole multiples of one
power of two, in 64 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of the 62 bits that a sum may take, so many are for the largest entry of the first addend; the rest is room for larger ones.
BITS = 42
MOST_BITS = 62


def unit_exponent(first: Tensor) -> int:
    """The exponent of the unit that sums which begin with `first` count in: its largest entry has 42 bits. A first addend of
    zeros, or one that is not finite, is taken as if its largest entry were 1."""
    largest = float(first.abs().max()) if first.numel() else 0.0
    return (math.frexp(largest)[1] if 0 < largest < math.inf else 1) - BITS


class FixedPointSum:
    """A sum of flat float32 vectors, in units of 2^exponent. `addends`: how many there will be, on all ranks together.

    Each addend is rounded to the unit once: at most half of 2^-41 of the first one's largest entry, where a float32 rounds at
    2^-24 of the value itself. An addend too large for the sum to hold, or not finite, makes the whole sum infinite.
    """

    def __init__(self, size: int, exponent: int, addends: int, device: torch.device) -> None:
        self._unit, self._limit = 2.0**exponent, 2.0**MOST_BITS / max(1, addends)
        self.units = torch.zeros(size + 1, dtype=torch.long, device=device)  # the last counts the addends that did not fit

    def add(self, vector: Tensor) -> None:
        scaled = vector.double() / self._unit
        fits = (scaled.abs() < self._limit).all()  # false for NaN too; stays on the device, where nobody waits for it
        self.units[:-1] += torch.where(fits, scaled, 0.0).round_().long()
        self.units[-1] += ~fits

    def value(self) -> Tensor:
        """The sum as float32."""
        total = (self.units[:-1].double() * self._unit).float()
        return torch.where(self.units[-1] == 0, total, math.inf)
