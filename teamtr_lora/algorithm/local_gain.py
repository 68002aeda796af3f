"""The largest gain that a small KL ball holds (thm:info-lower-stage), from per-message gradients, not a Fisher matrix.

With S the [M, P] gradients of M messages' log-probabilities, F = S'S / M is the Fisher matrix of a message and
g = c S'a / M the gradient of the surrogate, a being advantages and c messages per episode. Everything the theorem asks for is
then in the Gram matrix K = S S', because (F + e I)^-1 S' = S' (K / M + e I)^-1.

Shape suffixes: M message, P parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from teamtr_lora.algorithm.certificate import Certificate, Confidence, Setting, UpdateTerms, certify_stage

Array = NDArray[np.float64]
DAMPING = 0.1  # epsilon, as a share of F's mean nonzero eigenvalue
SPLITS = 50  # random halvings of the groups, over which the cross-fitted gain is a mean


@dataclass(frozen=True)
class LocalModel:
    """The surrogate near the current policy: gain <= slope sqrt(delta), less curvature delta."""

    slope: float  # kappa = sqrt(2 g' F^-1 g)
    curvature: float  # a = L_loc / smallest eigenvalue of F

    def gain(self, radius: float) -> float:
        """A gain that *some* update within the radius has; one particular update may have less."""
        return self.slope * math.sqrt(radius) - self.curvature * radius


@dataclass(frozen=True)
class GramModel:
    slope: float  # cross-fitted: the two gradients of g' F^-1 g are of different groups
    slope_in_sample: float  # both gradients from the same messages, so that their noise counts as gain
    damping: float
    smallest_eigenvalue: float  # of F + damping I


def gram_model(
    gram: ArrayLike,
    advantage: ArrayLike,
    group: ArrayLike,
    *,
    messages_per_episode: float = 1.0,
    parameters: int,
    damping: float | None = None,
    seed: int = 0,
) -> GramModel:
    """kappa from K [M, M]. Groups are halved whole: advantages of one group depend on each other."""
    gram_MM, advantage_M = np.asarray(gram, dtype=np.float64), np.asarray(advantage, dtype=np.float64)
    count = len(advantage_M)
    groups, index_M = np.unique(np.asarray(group), return_inverse=True)
    if len(groups) < 2:
        raise ValueError("one group cannot be halved")
    if damping is None:
        # without any gradient every damping gives slope 0
        damping = DAMPING * float(np.trace(gram_MM)) / count / min(count, parameters) or 1.0
    eigenvalue_M, vector_MM = np.linalg.eigh(gram_MM / count)
    eigenvalue_M = np.maximum(eigenvalue_M, 0.0)
    hat_MM = (vector_MM * (eigenvalue_M / (eigenvalue_M + damping))) @ vector_MM.T  # S (F + e I)^-1 S' / M
    unit = messages_per_episode**2
    rng = np.random.default_rng(seed)
    products = []
    for _ in range(SPLITS):
        one_M = np.isin(index_M, rng.permutation(len(groups))[: len(groups) // 2])
        cross = float(advantage_M[one_M] @ hat_MM[np.ix_(one_M, ~one_M)] @ advantage_M[~one_M])
        products.append(unit * count * cross / (one_M.sum() * (~one_M).sum()))
    return GramModel(
        slope=math.sqrt(2 * max(0.0, float(np.mean(products)))),
        slope_in_sample=math.sqrt(2 * unit * max(0.0, float(advantage_M @ hat_MM @ advantage_M)) / count),
        damping=damping,
        # K / M and F share their nonzero eigenvalues; the larger matrix has extra zeros.
        smallest_eigenvalue=damping + (float(eigenvalue_M[count - parameters]) if count >= parameters else 0.0),
    )


def certify_achievable_stage(
    models: Sequence[LocalModel],
    message_radii: Sequence[float],
    updates: Sequence[UpdateTerms],
    setting: Setting,
    confidence: Confidence | None,
) -> Certificate:
    """thm:info-lower-stage: the stage certificate with the gain that some update in each ball has, in place of L.

    `message_radii` are in message KL, which F is the curvature of; `updates` carry the same radii as def:kltok counts them, and
    the sampling error. The theorem's occupancy penalty is thm:stage's, and so is what keeps it from being positive.
    """
    gains = [model.gain(radius) for model, radius in zip(models, message_radii, strict=True)]
    terms = [replace(u, surrogate=gain, largest_weight=1.0, turn_kl=()) for gain, u in zip(gains, updates, strict=True)]
    return certify_stage(terms, setting, confidence)
