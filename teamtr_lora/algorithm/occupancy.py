"""Diagnostics of occupancy shift and of the monitors, each beside the reading that noise alone would give.

Shape suffixes: G group, C context, E episode, N message token, V vocabulary, K stage or team size, S seed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
LARGEST_LOG_WEIGHT = 300.0  # squares of e^300 still fit a float64; a weight beyond it is hopeless either way
NEAR = (0.8, 1.2)  # of delta: where a monitor's flips are counted (app:exp:klcal)
SHUFFLES = 200  # of the places of each agent's updates: what the order reads where it does not matter


@dataclass(frozen=True)
class Excess:
    """A distance that is positive for two samples of one policy too, and what it was for them."""

    value: float
    null: float

    @property
    def excess(self) -> float:
        """Zero on average where nothing has shifted, so it may be negative."""
        return self.value - self.null


@dataclass(frozen=True)
class GapReading(Excess):
    signed: float  # stale - fresh over all groups
    standard_error: float  # of `signed`, paired by group


def stale_gap(stale: ArrayLike, fresh: ArrayLike, *, splits: int = 200, seed: int = 0) -> GapReading:
    """Gap_i: how much the surrogate of update i's candidate differs between stage-start and fresh episodes.

    One value a group and side, the groups of both sides in the same order of items, none of them used to fit the candidate.
    Each random split compares stale episodes of one half of the items with fresh ones of the other; the null compares fresh
    with fresh over the same two halves, so both have the same noise, the spread between items included.
    """
    stale_G, fresh_G = np.asarray(stale, dtype=np.float64), np.asarray(fresh, dtype=np.float64)
    if stale_G.shape != fresh_G.shape or len(fresh_G) < 2:
        raise ValueError(f"two sides of the same items, at least 2 of them: got {stale_G.shape} and {fresh_G.shape}")
    values, nulls = [], []
    for one, other in _halves(len(fresh_G), splits, seed):
        reference = fresh_G[one].mean()
        values.append(abs(stale_G[other].mean() - reference))
        nulls.append(abs(fresh_G[other].mean() - reference))
    difference_G = stale_G - fresh_G
    error = float(difference_G.std(ddof=1)) / math.sqrt(len(difference_G))
    return GapReading(float(np.mean(values)), float(np.mean(nulls)), float(difference_G.mean()), error)


class ContextKey(NamedTuple):
    """A context coarse enough to be seen twice; hashes of the text are at distance 1 even for one policy."""

    turn: int
    agent: str
    answer: str | None  # extracted from the last message
    length_bin: int


def length_bin(tokens: int) -> int:
    """Bins that double: 0, 1, 2-3, 4-7, ..."""
    return tokens.bit_length()


def context_shift(
    stale_keys: Sequence[Hashable],
    stale_group: ArrayLike,
    fresh_keys: Sequence[Hashable],
    fresh_group: ArrayLike,
    *,
    splits: int = 50,
    seed: int = 0,
) -> Excess:
    """One term of D_occ: the total variation between context keys of stage-start and of fresh episodes, halved as in `stale_gap`.

    Groups are numbered alike on both sides and split whole: contexts of one episode are not independent. An empirical TV is
    positive for equal distributions as well, and the more so the more keys there are; the null is that bias. Where it is as
    large as the shift, the excess is less than the shift: noise and shift do not add up.
    """
    number = {key: i for i, key in enumerate(dict.fromkeys([*stale_keys, *fresh_keys]))}
    groups = int(max(np.max(stale_group), np.max(fresh_group))) + 1

    def counts(keys: Sequence[Hashable], group: ArrayLike) -> Array:
        cell_C = np.asarray(group) * len(number) + np.array([number[key] for key in keys])
        return np.bincount(cell_C, minlength=groups * len(number)).reshape(groups, -1).astype(np.float64)

    stale_GK, fresh_GK = counts(stale_keys, stale_group), counts(fresh_keys, fresh_group)
    if groups < 2:
        raise ValueError("one group cannot be halved")
    values, nulls = [], []
    for one, other in _halves(groups, splits, seed):
        reference_K = fresh_GK[one].sum(0)
        values.append(total_variation(stale_GK[other].sum(0), reference_K))
        nulls.append(total_variation(fresh_GK[other].sum(0), reference_K))
    return Excess(float(np.mean(values)), float(np.mean(nulls)))


def total_variation(one: ArrayLike, other: ArrayLike) -> float:
    """Between two histograms over the same bins; an empty one is at distance 1 from everything."""
    p, q = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    return 0.5 * float(np.abs(p / p.sum() - q / q.sum()).sum()) if p.sum() and q.sum() else 1.0


def _halves(count: int, splits: int, seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(count) for _ in range(splits)]
    return [(order[: count // 2], order[count // 2 : count // 2 * 2]) for order in orders]


@dataclass(frozen=True)
class WeightReading:
    """app:exp:isdeg, over B trajectories."""

    ess: float  # effective sample size / B
    p95: float
    p99: float
    largest: float
    over_ten: float  # Pr[w > 10]
    mean: float
    mean_standard_error: float


def trajectory_log_weights(log_ratio: ArrayLike, episode: ArrayLike, episodes: int) -> Array:
    """Sums the log ratios of the messages of agents updated so far into their episodes."""
    log_E = np.zeros(episodes)
    np.add.at(log_E, np.asarray(episode, dtype=np.int64), np.asarray(log_ratio, dtype=np.float64))
    return log_E


def weight_degeneracy(log_weight: ArrayLike) -> WeightReading:
    log_E = np.asarray(log_weight, dtype=np.float64)
    scaled_E = np.exp(log_E - log_E.max())  # ESS does not depend on the scale, and this one cannot overflow
    weight_E = np.exp(np.minimum(log_E, LARGEST_LOG_WEIGHT))
    return WeightReading(
        ess=float(scaled_E.sum() ** 2 / (scaled_E**2).sum() / len(log_E)),
        p95=float(np.quantile(weight_E, 0.95)),
        p99=float(np.quantile(weight_E, 0.99)),
        largest=float(weight_E.max()),
        over_ten=float((weight_E > 10).mean()),
        mean=float(weight_E.mean()),
        mean_standard_error=float(weight_E.std(ddof=1)) / math.sqrt(len(log_E)) if len(log_E) > 1 else math.inf,
    )


@dataclass(frozen=True)
class MonitorTerms:
    """One update's per-token terms of an estimator (k1, k3 or exact); their sum over `messages` is the monitor."""

    terms_N: Array
    messages: int
    delta: float


@dataclass(frozen=True)
class Reliability:
    """app:exp:klcal at one fraction of the token positions."""

    fraction: float
    median: float  # of |subsampled - full| / delta, over updates and repeats
    p90: float
    near_updates: int  # with the full monitor within 0.8 to 1.2 delta
    flip_rate: float | None  # among those; None: there were none


@dataclass(frozen=True)
class Subsample:
    """One update's monitor on random parts of its token positions."""

    deviations: list[float]  # |part - all| / delta
    flips: int | None  # parts on the other side of delta; None: all of it is not within 0.8 to 1.2 delta


def subsampled(update: MonitorTerms, fraction: float, repeats: int, seed: int) -> Subsample:
    """Token positions are drawn without replacement, and their sum scaled up to all of them."""
    rng = np.random.default_rng(seed)
    count = len(update.terms_N)
    kept = max(1, round(fraction * count))
    full = float(update.terms_N.sum()) / update.messages
    near = NEAR[0] * update.delta <= full <= NEAR[1] * update.delta
    parts = [update.terms_N[rng.choice(count, kept, replace=False)].mean() * count / update.messages for _ in range(repeats)]
    flips = sum(bool(part <= update.delta) != (full <= update.delta) for part in parts)
    return Subsample([abs(float(part) - full) / update.delta for part in parts], flips if near else None)


def reliability(fraction: float, updates: Sequence[Subsample]) -> Reliability:
    """This is the monitor's stability on one batch, not its error: the batch itself is a sample."""
    deviations = [deviation for update in updates for deviation in update.deviations]
    if not deviations:
        raise ValueError("no update to subsample")
    near = [(update.flips, len(update.deviations)) for update in updates if update.flips is not None]
    return Reliability(
        fraction=fraction,
        median=float(np.median(deviations)),
        p90=float(np.quantile(deviations, 0.9)),
        near_updates=len(near),
        flip_rate=sum(flips for flips, _ in near) / sum(parts for _, parts in near) if near else None,
    )


@dataclass(frozen=True)
class Stability:
    deviation: float  # standard deviation over stages of the improvement
    floor: float  # what evaluating with so few samples gives a team that never changes

    @property
    def excess(self) -> float:
        return math.sqrt(max(0.0, self.deviation**2 - self.floor**2))


def stability(accuracy: Sequence[float], samples: int) -> Stability:
    """From the accuracy after every stage, each the share of `samples` right answers.

    The floor is what the deviation of a team that stays the same has from sampling alone, evaluations and samples independent;
    with several samples a question it is a little too high.
    """
    accuracy_K = np.asarray(accuracy, dtype=np.float64)
    if len(accuracy_K) < 3 or samples < 2:
        raise ValueError("a deviation of improvements needs at least three evaluations of at least two samples")
    variance_K = accuracy_K * (1 - accuracy_K) / (samples - 1)
    steps = len(accuracy_K) - 1
    # neighbouring improvements share an evaluation, with opposite signs: their sample variance is larger than their variance
    floor = float((variance_K[1:] + variance_K[:-1]).mean()) * (steps + 1) / steps
    return Stability(float(np.diff(accuracy_K).std(ddof=1)), math.sqrt(floor))


@dataclass(frozen=True)
class TokenShift:
    """Mean over token positions, by rank before the update; the last entry is the rest of the vocabulary."""

    before: list[float]
    after: list[float]
    moved: list[float]  # mean |change|: positions that move in opposite directions do not cancel
    flip_rate: float  # positions whose most probable token changed


def token_shift(logp_cur: ArrayLike, logp_new: ArrayLike, top: int) -> TokenShift:
    """Probability change by pre-update rank from log-probability rows [N, V] at the same prefixes."""
    cur_NV, new_NV = np.exp(np.asarray(logp_cur, dtype=np.float64)), np.exp(np.asarray(logp_new, dtype=np.float64))
    top = min(top, cur_NV.shape[1])
    rank_NV = np.argpartition(-cur_NV, top - 1, axis=1)[:, :top]  # a whole sort of a large vocabulary takes seconds
    rank_NV = np.take_along_axis(rank_NV, np.argsort(-np.take_along_axis(cur_NV, rank_NV, 1), axis=1, kind="stable"), 1)

    def by_rank(prob_NV: Array) -> Array:
        ranked_NK = np.take_along_axis(prob_NV, rank_NV, axis=1)
        return np.concatenate([ranked_NK, prob_NV.sum(1, keepdims=True) - ranked_NK.sum(1, keepdims=True)], axis=1)

    before_NK, after_NK = by_rank(cur_NV), by_rank(new_NV)
    return TokenShift(
        before_NK.mean(0).tolist(),
        after_NK.mean(0).tolist(),
        np.abs(after_NK - before_NK).mean(0).tolist(),
        float((cur_NV.argmax(1) != new_NV.argmax(1)).mean()),
    )


@dataclass(frozen=True)
class OrderReading(Excess):
    """Whether it matters at which place of a stage's order an agent is updated."""

    by_position: list[float]  # mean gain of the updates at the 1st, 2nd, ... place, each less its agent's own mean
    p_value: float  # how often shuffled places differ at least as much


def order_sensitivity(position: Sequence[int], agent: Sequence[str], gain: ArrayLike) -> OrderReading:
    """The standard deviation of `by_position`, beside its mean where the places of each agent's own updates are shuffled.

    Agents differ in what they have to gain, which is no effect of the order: their means are taken out first.
    """
    place_U, agent_U, gain_U = np.asarray(position), np.asarray(agent), np.asarray(gain, dtype=np.float64).copy()
    mine = [np.flatnonzero(agent_U == name) for name in np.unique(agent_U)]
    for of_agent in mine:
        gain_U[of_agent] -= gain_U[of_agent].mean()
    places = np.unique(place_U)
    if len(places) < 2:
        raise ValueError("one place has no order")

    def means(at_U: NDArray[np.int64]) -> Array:
        return np.array([gain_U[at_U == place].mean() for place in places])

    rng = np.random.default_rng(0)
    found, nulls = means(place_U), []
    for _ in range(SHUFFLES):
        shuffled_U = place_U.copy()
        for of_agent in mine:
            shuffled_U[of_agent] = rng.permutation(place_U[of_agent])
        nulls.append(float(means(shuffled_U).std()))
    value = float(found.std())
    more = sum(null >= value * (1 - 1e-12) for null in nulls)
    return OrderReading(value, float(np.mean(nulls)), found.tolist(), (1 + more) / (1 + SHUFFLES))
