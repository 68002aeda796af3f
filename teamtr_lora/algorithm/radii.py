"""Trust-region radii per agent: one total for the stage, shared equally or by what a radius has been worth (app:tightness).

In a small KL ball the best surrogate gain is linear in the ball's radius in distance, that is c_i * sqrt(delta_i)
(the local-gain lemma behind thm:info-lower-stage), so under a fixed sum of delta_i the total gain is largest at
delta_i proportional to c_i squared. The slope c_i is observed: gain over sqrt(KL) of the agent's own updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Every agent keeps this share of its equal radius: one that gained little once must be able to show a gain again.
KEPT_SHARE = 0.5
# Weight of the newest observation: a slope is measured on few held-out groups.
NEWEST = 0.5


def gain_slope(gain: float, kl: float) -> float:
    """Surrogate gain per unit of distance sqrt(KL) of one measured candidate; one that gains nothing has slope 0."""
    usable = gain > 0 and kl > 0 and math.isfinite(gain) and math.isfinite(kl)
    return gain / math.sqrt(kl) if usable else 0.0


def smoothed(before: float | None, observed: float) -> float:
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
