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
    bound: float  # mean + z * standard error


def clustered_mean(values_M: Tensor, cluster_M: Tensor, confidence: float) -> ClusteredMean:
    """Mean over messages and its one-sided upper bound; messages of one group are dependent, so groups are the clusters."""
    values = values_M.double()
    _, index_M = torch.unique(cluster_M, return_inverse=True)
    clusters, count = int(index_M.max()) + 1, values.numel()
    mean = float(values.mean())
    if clusters < 2:
        return ClusteredMean(mean, math.inf, math.inf)
    sums = torch.zeros(clusters, dtype=torch.float64).index_add_(0, index_M, values - mean)
    error = math.sqrt(clusters / (clusters - 1) * float((sums**2).sum())) / count
    return ClusteredMean(mean, error, mean + NormalDist().inv_cdf(confidence) * error)
