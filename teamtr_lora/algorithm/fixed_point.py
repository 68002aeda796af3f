"""Sums that do not depend on the order of what is added, nor on who adds it: floating-point numbers as whole multiples of one
power of two, in 64 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of the 62 bits that a sum may take, so many are for the largest entry of the first addend; the rest is room for larger ones.
BITS = 42
MOST_BITS = 62
MORE_ROOM = 20  # bits by which the unit grows where that room is too small


def unit_exponent(first: Tensor) -> int:
    """The exponent of the unit that sums which begin with `first` count in: its largest entry has 42 bits. A first addend of
    zeros, or one that is not finite, is taken as if its largest entry were 1."""
    largest = float(first.abs().max()) if first.numel() else 0.0
    return (math.frexp(largest)[1] if 0 < largest < math.inf else 1) - BITS


class FixedPointSum:
    """A sum of flat float32 vectors, in units of 2^exponent. `addends`: how many there will be, on all ranks together.

    Each addend is rounded to the unit once: at most half of 2^-41 of the first one's largest entry, where a float32 rounds at
    2^-24 of the value itself. An addend that is not finite makes the whole sum infinite; one that is too large for the sum to
    hold makes it `too_small`: to be made again with a larger unit.
    """

    def __init__(self, size: int, exponent: int, addends: int, device: torch.device) -> None:
        self._unit, self._limit = 2.0**exponent, 2.0**MOST_BITS / max(1, addends)
        # the last two count the addends that were too large, and those that were not finite
        self.units = torch.zeros(size + 2, dtype=torch.long, device=device)

    def add(self, vector: Tensor) -> None:
        scaled = vector.double() / self._unit
        largest = scaled.abs().amax()  # stays on the device, where nobody waits for it
        fits, finite = largest < self._limit, largest.isfinite()
        self.units[:-2] += torch.where(fits, scaled, 0.0).round_().long()
        self.units[-2] += finite & ~fits
        self.units[-1] += ~finite

    @property
    def too_small(self) -> bool:
        """Whether all addends were finite numbers, and one did not fit."""
        too_large, broken = self.units[-2:].tolist()
        return too_large > 0 and not broken

    def value(self) -> Tensor:
        """The sum as float32."""
        total = (self.units[:-2].double() * self._unit).float()
        return torch.where((self.units[-2:] == 0).all(), total, math.inf)
