"""How certificates did over a run, beside what was measured (app:tightness)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from teamtr_lora.algorithm.certificate import Certificate

Array = NDArray[np.float64]
NOISE = 1.645  # standard errors of a measured improvement: a bound that is further above it is violated with 95% confidence


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's, ties at their mean rank; None where fewer than three pairs or no spread leave nothing to correlate."""
    first, second = _ranks(np.asarray(one, dtype=np.float64)), _ranks(np.asarray(other, dtype=np.float64))
    if len(first) < 3 or not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Array) -> Array:
    _, index, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return ((last - count + last - 1) / 2)[index]


@dataclass(frozen=True)
class Measured:
    """One update's or stage's certificate beside what happened, both in the certificate's return."""

    certificate: Certificate
    improvement: float
    standard_error: float | None = None


@dataclass(frozen=True)
class Calibration:
    """How the certificate did over a run (app:tightness). Zero violations of vacuous bounds are no evidence: see both rates of
    violation."""

    rows: int
    vacuous_rate: float
    can_certify_rate: float
    violation_rate: float  # bound > measured improvement
    informative_violation_rate: float | None  # the same among bounds that exclude something; None: there were none
    significant_violation_rate: float  # bound > improvement + NOISE * its standard error; a missing standard error counts as 0
    mean_slack: float  # improvement - bound
    rank_correlation: float | None  # of bound and improvement
    penalty_shares: dict[str, float]  # mean over rows


def _rate(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def calibrate(rows: Sequence[Measured]) -> Calibration:
    if not rows:
        raise ValueError("nothing to calibrate: no certificate with a measured improvement")
    slack = [row.improvement - row.certificate.bound for row in rows]
    telling = [s for s, row in zip(slack, rows, strict=True) if not row.certificate.vacuous]
    shares = [row.certificate.shares() for row in rows if row.certificate.shares()]
    return Calibration(
        rows=len(rows),
        vacuous_rate=_rate([row.certificate.vacuous for row in rows]),
        can_certify_rate=_rate([row.certificate.can_certify for row in rows]),
        violation_rate=_rate([s < 0 for s in slack]),
        informative_violation_rate=_rate([s < 0 for s in telling]) if telling else None,
        significant_violation_rate=_rate([s < -NOISE * (row.standard_error or 0.0) for s, row in zip(slack, rows, strict=True)]),
        mean_slack=math.fsum(slack) / len(slack),
        rank_correlation=rank_correlation([row.certificate.bound for row in rows], [row.improvement for row in rows]),
        penalty_shares={name: math.fsum(s[name] for s in shares) / len(shares) for name in shares[0]} if shares else {},
    )
