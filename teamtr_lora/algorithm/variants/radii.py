"""Trust-region radii per agent: one total for the stage, shared equally or by what a radius has been worth (app:tightness).

In a small KL ball the best surrogate gain is linear in the ball's radius in distance, that is c_i * sqrt(delta_i)
(the local-gain lemma behind thm:info-lower-stage), so under a fixed sum of delta_i the total gain is largest at
delta_i proportional to c_i squared. The slope c_i is observed: gain over sqrt(KL) of the agent's own updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

# Every agent keeps this share of its equal radius, so that one that gained little once can show a gain again.
KEPT_SHARE = 0.5
# Weight of the newest observation: a slope is measured on few held-out groups.
NEWEST = 0.5


def gain_slope(gain: float, kl: float) -> float:
    """Surrogate gain per unit of distance sqrt(KL) of one measured candidate; one that gains nothing has slope 0."""
    usable = gain > 0 and kl > 0 and math.isfinite(gain) and math.isfinite(kl)
    return gain / math.sqrt(kl) if usable else 0.0


def smoothed(before: float | None, observed: float) -> float:
    """The slope to go by after another observation."""
    return observed if before is None else (1 - NEWEST) * before + NEWEST * observed


def gain_weighted_radii(delta: float, slopes: Mapping[str, float | None]) -> dict[str, float]:
    """Radii that sum to `len(slopes) * delta`: a kept share each, the rest in proportion to the squared slopes.

    An agent without an observation counts as an average one; without any gain to go by, all radii are equal.
    """
    largest = max((slope for slope in slopes.values() if slope is not None), default=0.0)
    if not 0 < largest < math.inf:
        return dict.fromkeys(slopes, delta)
    squares = {agent: (slope / largest) ** 2 for agent, slope in slopes.items() if slope is not None}  # no square underflows
    average = sum(squares.values()) / len(squares)
    weights = {agent: squares.get(agent, average) for agent in slopes}
    total = sum(weights.values())
    return {a: delta * (KEPT_SHARE + (1 - KEPT_SHARE) * len(slopes) * w / total) for a, w in weights.items()}


class Radii:
    """`equal`: every agent has the recipe's delta in every stage."""

    words: ClassVar[str] = "every agent has radius delta"
    note: ClassVar[str] = ""  # what `plan` adds to delta
    smallest_share: ClassVar[float] = 1.0  # of delta: no agent's radius is ever less
    kinds: ClassVar[tuple[str, ...] | None] = None  # kinds of trust region that it works with; None: all

    def next_stage(self, radii: Mapping[str, float], slopes: Mapping[str, float | None], delta: float) -> dict[str, float]:
        """The radii of the next stage, from this one's and each agent's gain per distance so far."""
        return dict(radii)


class GainWeighted(Radii):
    """The same total, shared anew after each stage in proportion to the squared slopes (app:tightness)."""

    words = (
        "the same total, shared anew after each stage by the surrogate gain that each agent's updates had per distance (every "
        "agent keeps at least half of delta)"
    )
    note = " (the team's average: it is shared anew after each stage, by gain)"
    smallest_share = KEPT_SHARE
    kinds = ("gate",)

    def next_stage(self, radii: Mapping[str, float], slopes: Mapping[str, float | None], delta: float) -> dict[str, float]:
        return gain_weighted_radii(delta, slopes)


RADII: dict[str, type[Radii]] = {"equal": Radii, "gain_weighted": GainWeighted}
