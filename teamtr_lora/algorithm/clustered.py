"""A mean over dependent values, with its upper confidence bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClusteredMean:
    mean: float
    standard_error: float
    bound: float  # one-sided upper confidence bound of the mean


def clustered_mean(values_M: Tensor, cluster_M: Tensor, confidence: float, weight_M: Tensor | None = None) -> ClusteredMean:
    """The (weighted) mean over messages and its one-sided upper bound; messages of one group are dependent, so groups are the
    clusters. The bound is made for values like a message's KL, of which a few are large: see `upper_quantile`."""
    values = values_M.double()
    weights = torch.ones_like(values) if weight_M is None else weight_M.double()
    _, index_M = torch.unique(cluster_M, return_inverse=True)
    clusters = int(index_M.max()) + 1
    mean = float((weights * values).sum() / weights.sum())
    if clusters < 2:
        return ClusteredMean(mean, math.inf, math.inf)
    off_G = torch.zeros(clusters, dtype=torch.float64).index_add_(0, index_M, weights * (values - mean)) / weights.sum()
    error = math.sqrt(clusters / (clusters - 1) * float((off_G**2).sum()))
    return ClusteredMean(mean, error, mean + upper_quantile(off_G, confidence) * error)


def mean_with_known_zeros(
    values_M: Tensor, zero_M: Tensor, cluster_M: Tensor, confidence: float, weight_M: Tensor | None = None
) -> ClusteredMean:
    """The same where some clusters are known to be 0 throughout (`zero_M`), as the gain is of a group without advantages. They
    count in the mean and not in its error: where two other groups have six tenths of the weight beside six such ones, an error
    over all eight would call a mean of pure noise negative in 15% of cases at a confidence of 95%."""
    weights = torch.ones_like(values_M.double()) if weight_M is None else weight_M.double()
    unknown_M = ~zero_M
    if not weights[unknown_M].any():
        return ClusteredMean(0.0, 0.0, 0.0)
    found = clustered_mean(values_M[unknown_M], cluster_M[unknown_M], confidence, weights[unknown_M])
    share = float(weights[unknown_M].sum() / weights.sum())
    return ClusteredMean(share * found.mean, share * found.standard_error, share * found.bound)


def upper_quantile(off_G: Tensor, confidence: float) -> float:
    """How many standard errors the bound lies above the mean, given how far each cluster pulls the mean up or down.

    Student's quantile, and Hall's (1992) cubic transformation for values that are skewed to the right: a sample that misses the
    few large ones has a mean and a standard error that are both too small, so the symmetric bound fails more often than it says.
    """
    count, variance = off_G.numel(), float((off_G**2).mean())
    student = student_quantile(confidence, count - 1)
    if count < 3 or variance == 0:
        return student
    skewness = float((off_G**3).mean()) / variance**1.5 * math.sqrt(count * (count - 1)) / (count - 2)
    lean = skewness / math.sqrt(count)
    if lean < 1e-6:  # symmetric, or skewed to the left, where the symmetric bound is on the safe side
        return student
    inner = 1 - lean * (student + lean / 6)
    return 3 / lean * (1 - math.copysign(abs(inner) ** (1 / 3), inner))


def student_quantile(confidence: float, freedom: int) -> float:
    """Of Student's distribution: exact for 1 and 2 degrees of freedom, else the expansion in powers of 1 / freedom."""
    if freedom == 1:
        return math.tan(math.pi * (confidence - 0.5))
    if freedom == 2:
        p = 2 * confidence - 1
        return p * math.sqrt(2 / (1 - p * p))
    z = NormalDist().inv_cdf(confidence)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
