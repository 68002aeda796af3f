"""The learning rate that ends an update's steps at the edge of its trust region.

KL grows with the square of the distance, and the distance with the sum of the steps' learning rates. So a reading of the KL says
how much further the steps may go. What is read is an upper bound on the episodes that the steps are fitted to, since that is what
the gate will compare: where a few contexts carry the KL it is several times the mean.
"""

from __future__ import annotations

import math
from statistics import fmean

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
# So many first steps of one update may be taken again; each takes a step and half a pass to measure it.
MOST_PROBES = 4
# Within an update a step is at most this many times as long as those before it were on average.
MOST_GROWTH = 4.0


class Pace:
    """The learning rate of each step of one update. With `automatic`, `rate` is that of the first step, and readings of the KL
    say how long the others are, so that they end at the region's edge."""

    def __init__(self, rate: float, radius: float, planned: int, *, automatic: bool, probe: bool) -> None:
        self.rate, self._radius, self._planned, self._automatic, self._probe = rate, radius, planned, automatic, probe
        self.taken: list[float] = []  # the rates of the steps so far
        self.probes = 0  # first steps that were taken back
        self.overshot = False  # one of them went beyond the best of the surrogate: the radius is not what bounds this update

    def takes_back(self, kl: float, *, harms: bool) -> bool:
        """Whether the first step is taken again, with another rate, since it went much too far by itself: beyond the edge, or
        `harms` the very episodes that it was fitted to, as a wide region allows. With `probe` the rate was only where to start,
        and a first step that was much too short is taken back too."""
        if not self._automatic or len(self.taken) != 1 or self.probes == MOST_PROBES:
            return False
        wanted, harms = probed_rate(self.rate, kl, self._radius, self._planned), harms and kl > NOTHING * self._radius
        if harms or self.overshot:
            wanted, self.overshot = min(wanted, self.rate / OVERSHOOT if harms else self.rate), True
        too_long = harms or wanted * self._planned * TOLERATED < self.rate
        if not (too_long or self._probe and not 1 / TOLERATED < wanted / self.rate < TOLERATED):
            return False
        self.rate, self.taken = wanted, []
        self.probes += 1
        return True

    def after(self, kl: float) -> None:
        """The rate of the next step, once all so far have moved by `kl`."""
        if self._automatic:
            left = remaining_rate(self.taken, kl, self._radius, self._planned)
            self.rate = min(left, self.rate) if self.overshot else left

    @property
    def mean(self) -> float:
        return fmean(self.taken) if self.taken else self.rate


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
