"""How something grows with a team: exponents fitted on several sizes and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Exponent:
    """value ~ size^exponent, least squares in log-log; the interval is a 95% bootstrap over seeds, None with a single one."""

    exponent: float
    low: float | None
    high: float | None


def fit_exponent(size: Sequence[float], value: ArrayLike, *, resamples: int = 2000, seed: int = 0) -> Exponent:
    """`value` is [size], or [seed, size]: then the fit is of the mean over seeds, and seeds are resampled."""
    value_SK = np.atleast_2d(np.asarray(value, dtype=np.float64))
    if not (value_SK.mean(0) > 0).all():
        raise ValueError("a power law needs positive means")
    log_K = np.log(np.asarray(size, dtype=np.float64))
    slope_K = (log_K - log_K.mean()) / ((log_K - log_K.mean()) ** 2).sum()
    point = float(np.log(value_SK.mean(0)) @ slope_K)
    if len(value_SK) < 2:
        return Exponent(point, None, None)
    drawn_RS = np.random.default_rng(seed).integers(len(value_SK), size=(resamples, len(value_SK)))
    mean_RK = value_SK[drawn_RS].mean(1)
    exponents_R = np.log(mean_RK[(mean_RK > 0).all(1)]) @ slope_K
    low, high = np.quantile(exponents_R, [0.025, 0.975])
    return Exponent(point, float(low), float(high))
