"""The learning rate that ends an update's steps at the edge of its trust region.

KL grows with the square of the distance, and the distance with the sum of the steps' learning rates. So a reading of the KL says
how much further the steps may go. What is read is an upper bound on the episodes that the steps are fitted to, since that is what
the gate will compare: where a few contexts carry the KL it is several times the mean.
"""

from __future__ import annotations

import math

# Steps aim at this share of the radius: the gate has fewer episodes, none that the steps are fitted to, so its bound is larger.
AIMED_SHARE = 0.8
# From one update to the next a learning rate changes by at most this factor: one reading is noisy.
MOST_CHANGE = 2.0
# A first step that is off by more than this factor is taken again with the learning rate that it asks for.
TOLERATED = 2.0
# A first step that harms the episodes it was fitted to is taken again, this many times shorter.
OVERSHOOT = 4.0
# A step that has moved by less than this share of the radius has moved too little for its gain to say anything.
NOTHING = 0.01
# Within an update a step is at most this many times as long as those before it were on average.
MOST_GROWTH = 4.0


def probed_rate(rate: float, kl: float, radius: float, planned: int) -> float:
    """The learning rate with which `planned` steps reach the aim, if one step with `rate` has moved by `kl`."""
    if not math.isfinite(kl):
        return rate / 100
    return rate * 100 if kl <= 0 else rate * math.sqrt(AIMED_SHARE * radius / kl) / planned


def remaining_rate(rates: list[float], kl: float, radius: float, planned: int) -> float:
    """The learning rate with which the rest of the `planned` steps reaches the aim, after steps with `rates` that have moved by
    `kl`. 0: they are there already, or beyond."""
    gone, most = sum(rates), MOST_GROWTH * sum(rates) / len(rates)
    if not math.isfinite(kl):
        return 0.0
    reach = math.sqrt(AIMED_SHARE * radius / kl) if kl > 0 else math.inf
    return min(max(gone * (reach - 1) / (planned - len(rates)), 0.0), most)


def next_rate(rate: float, reach: float, *, taken: int, planned: int, most: float = MOST_CHANGE) -> float:
    """The learning rate of the next update, after `taken` steps of `rate` on average that could have gone `reach` times as far to
    end at the edge. It grows by `most` at most. Several steps find their aim on the way, a single one has to begin with it."""
    aim = math.sqrt(AIMED_SHARE) if planned == 1 else 1.0
    factor = aim * reach * taken / planned
    return rate * min(max(factor, 1 / MOST_CHANGE), most)
