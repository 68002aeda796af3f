"""Improvement certificates as functions of logged numbers (thm:single, thm:stage, thm:stage_stale, thm:stage-hp).

Everything is in units of the raw return. What to know before using these numbers:
- thm:single can never certify an improvement where gamma >= 1/2: its occupancy penalty is gamma / (1 - gamma) times the largest
  surrogate gain that the same KL allows. `can_certify` says so. `certify_by_turns` is the form that can be positive.
- L must come from groups that the candidate was not fitted to: the concentration step treats the candidate as fixed.
- thm:stage_stale bounds a hybrid that cached episodes cannot give (stage-start occupancy, later advantages). What they do give
  has its own, smaller penalty: `certify_cached_stage`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
EQUAL = 1e-9  # returns this close, as a share of the larger or of 1, are equal
ROUNDING = 1e-12  # at gamma = 1/2 penalty and reach are equal, and only rounding would decide


@dataclass(frozen=True)
class Setting:
    """What the constants of the bounds are made of."""

    advantage_bound: float  # A_max: no |Q - V| is larger
    gamma: float
    return_range: float  # largest possible J - smallest possible J

    @property
    def decisions(self) -> float:
        """1 / (1 - gamma): what one decision's error is multiplied by."""
        return 1 / (1 - self.gamma) if self.gamma < 1 else math.inf


def episode_setting(messages: int, reward_low: float = 0.0, reward_high: float = 1.0, gamma: float | None = None) -> Setting:
    """For episodes of at most `messages` messages and one reward at the end; gamma is 1 - 1 / messages unless given.

    A_max is the reward range, stretched to hold 0: a discounted reward lies between 0 and the reward, so rewards in [1, 2] have
    returns that differ by up to 2.
    """
    span = max(reward_high, 0.0) - min(reward_low, 0.0)
    return Setting(span, 1 - 1 / messages if gamma is None else gamma, span)


@dataclass(frozen=True)
class UpdateTerms:
    """One update's logged numbers. A rejected or skipped update is all zeros: the policy did not move."""

    surrogate: float  # L: mean over held-out episodes of `centred_surrogate`
    kl: float  # def:kltok, discounted, in nats: the radius, the measured value, or its upper bound
    zeta: float = 0.0  # estimation error per decision, ratio clipping left out
    clip_bias: float = 0.0  # per decision: `clip_bias_bound` where L has clipped ratios; 0 for plain ones and min(w A, clip(w) A)
    groups: int = 0  # independent held-out groups behind L
    standard_error: float | None = None  # of L, clustered by group
    largest_weight: float = 1.0  # of an episode in L
    turn_kl: tuple[float, ...] = ()  # KL of the agent's 1st, 2nd, ... message of an episode, 0 where it was not reached, averaged


@dataclass(frozen=True)
class Certificate:
    """Every term of a bound; penalties are positive numbers that `bound` has subtracted."""

    surrogate: float
    occupancy: float
    staleness: float  # the compounding part of stale evaluation; 0 where episodes are fresh
    estimation: float
    clip_bias: float
    concentration: float  # 0 in the bounds that hold for exact surrogates
    bound: float
    vacuous: bool  # bound <= -return_range: no outcome at all is excluded
    can_certify: bool  # the largest L that the measured KL allows exceeds the penalties: bound > 0 was possible at all

    @property
    def penalty(self) -> float:
        return self.occupancy + self.staleness + self.estimation + self.clip_bias + self.concentration

    def shares(self) -> dict[str, float]:
        """Each penalty as a part of their sum; empty where there is none."""
        names, total = ("occupancy", "staleness", "estimation", "clip_bias", "concentration"), self.penalty
        return {name: getattr(self, name) / total for name in names} if 0 < total < math.inf else {}


@dataclass(frozen=True)
class Confidence:
    """How an empirical L is turned into a bound on the population's (cor:empL)."""

    failure: float = 0.05  # delta_conf, over the whole stage
    ratio_range: float = 0.2  # Largest |w - 1|, so hoeffding needs clipped w. The paper uses w itself: 1 + eps.
    method: Literal["hoeffding", "normal"] = "hoeffding"  # normal: the logged standard error, valid for many groups only
    block: int = 1  # length of the blocks where consecutive groups depend on each other (lem:beta-block)
    beta: float = 0.0  # their mixing coefficient at that distance


def occupancy_penalty(kl: float, setting: Setting) -> float:
    """sqrt(2) gamma A_max / (1 - gamma)^2 * sqrt(KL): lem:occ in thm:single."""
    return _times(math.sqrt(2) * setting.gamma * setting.advantage_bound * setting.decisions**2, math.sqrt(kl))


def turn_penalty(turn_kl: Sequence[float], advantage_bound: float) -> float:
    """What replaces the occupancy penalty in episodes without discount: A_max * sum_m sqrt(2 * KL of the messages before m).

    Not in the paper. E_{a ~ new}[A] is zero where somebody else speaks or nothing has changed (lem:activefactor, lem:centerapp),
    so only the shift at the agent's own later messages matters, and by the chain rule for KL and Pinsker the states before its
    m-th message have shifted by at most sqrt(2 * sum of its earlier messages' KL), and never by more than 2.
    An agent that speaks once an episode pays nothing: there the improvement equals L.
    """
    before = accumulate(turn_kl, initial=0.0)
    return advantage_bound * math.fsum(min(2.0, math.sqrt(2 * b)) for b, kl in zip(before, turn_kl, strict=False) if kl > 0)


def clip_bias_bound(kl: float, advantage_bound: float) -> float:
    """A_clip sqrt(2 KL) per decision (cor:clipbias-tr)."""
    return advantage_bound * math.sqrt(2 * kl)


def hoeffding_radius(bound: float, count: int, failure: float) -> float:
    """B sqrt(2 log(2 / delta) / N) for a mean of N independent values in [-B, B] (lem:grouphoeffding)."""
    return bound * math.sqrt(2 * math.log(2 / failure) / count) if count > 0 and failure > 0 else math.inf


def block_radius(bound: float, count: int, failure: float, block: int, beta: float) -> float:
    """The radius for dependent values (lem:beta-block), of the mean over every other block (`odd_block_mean`)."""
    blocks = count // (2 * block)
    return hoeffding_radius(bound, blocks, failure - 2 * max(0, blocks - 1) * beta)


def odd_block_mean(values: Sequence[float], block: int) -> float:
    """The mean over every other block: the estimate that lem:beta-block bounds."""
    blocks = len(values) // (2 * block)
    if not blocks:
        raise ValueError(f"{len(values)} values hold no two blocks of {block}")
    return math.fsum(v for k in range(blocks) for v in values[2 * k * block : (2 * k + 1) * block]) / (blocks * block)


def certify_stage(updates: Sequence[UpdateTerms], setting: Setting, confidence: Confidence | None = None) -> Certificate:
    """thm:stage (thm:single for one update), and thm:stage-hp with `confidence`: the sum of the updates' bounds, each with its
    share of the failure."""
    return _certificate(updates, setting, confidence, occupancy=_own_penalties(updates, setting), reach=_reach(updates, setting))


def certify_stale_stage(
    updates: Sequence[UpdateTerms], setting: Setting, confidence: Confidence | None = None, rollout: Sequence[int] | None = None
) -> Certificate:
    """thm:stage_stale: L is evaluated on stage-start occupancy but with advantages of the intermediate team; KL is on fresh
    occupancy. Update i pays for all updates before it: those that `rollout`, the number of the rollout each update learned from,
    says were made since its episodes were sampled (None: the stage has one)."""
    of = [0] * len(updates) if rollout is None else rollout
    earlier = [
        _own_penalties([u for u, r in zip(updates[:i], of, strict=False) if r == of[i]], setting) for i in range(len(updates))
    ]
    staleness = math.fsum(earlier)  # also what a stale L can exceed a fresh one by (eq:stale_surrogate_gap)
    reach = _reach(updates, setting) + staleness
    occupancy = _own_penalties(updates, setting)
    return _certificate(updates, setting, confidence, occupancy=occupancy, staleness=staleness, reach=reach)


def certify_cached_stage(
    updates: Sequence[UpdateTerms], setting: Setting, confidence: Confidence | None = None, rollout: Sequence[int] | None = None
) -> Certificate:
    """For updates that share episodes (joint, or sequential without resampling): L, advantages and KL are all those of the team
    that played them; `rollout` as in `certify_stale_stage`.

    Not in the paper. One agent is active at a state, so the updates from one rollout are one step of one team policy: its
    surrogate is the sum of theirs, its KL the sum of theirs, and thm:single holds for it. The penalty grows with the root of the
    number of agents. Where every update has a rollout of its own this is thm:stage.
    """
    of = [0] * len(updates) if rollout is None else rollout
    steps = [UpdateTerms(0.0, math.fsum(u.kl for u, r in zip(updates, of, strict=True) if r == one)) for one in dict.fromkeys(of)]
    return _certificate(updates, setting, confidence, occupancy=_own_penalties(steps, setting), reach=_reach(steps, setting))


def certify_by_turns(updates: Sequence[UpdateTerms], setting: Setting, confidence: Confidence | None = None) -> Certificate:
    """The stage certificate for episodes that end, in undiscounted return, from the KL of each of the agent's messages.

    Needs `turn_kl`, an L from undiscounted returns, and fresh episodes for every update; `setting.gamma` is not used.
    """
    bound_A = setting.advantage_bound
    occupancy = math.fsum(turn_penalty(u.turn_kl, bound_A) for u in updates)
    reach = math.fsum(clip_bias_bound(kl, bound_A) for u in updates for kl in u.turn_kl)
    return _certificate(updates, setting, confidence, occupancy=occupancy, reach=reach, by_turns=True)


def _own_penalties(updates: Sequence[UpdateTerms], setting: Setting) -> float:
    return math.fsum(occupancy_penalty(u.kl, setting) for u in updates)


def _reach(updates: Sequence[UpdateTerms], setting: Setting) -> float:
    """The largest L that the KL allows: A_max E|w - 1| / (1 - gamma), with lem:ratio-tv and Pinsker."""
    return math.fsum(_times(setting.decisions, clip_bias_bound(u.kl, setting.advantage_bound)) for u in updates)


def _certificate(
    updates: Sequence[UpdateTerms],
    setting: Setting,
    confidence: Confidence | None,
    *,
    occupancy: float,
    reach: float,
    staleness: float = 0.0,
    by_turns: bool = False,
) -> Certificate:
    weighted = [(_turns(u) if by_turns else setting.decisions, u) for u in updates]
    surrogate = math.fsum(u.surrogate for u in updates)
    estimation = math.fsum(_times(decisions, u.zeta) for decisions, u in weighted)
    clip_bias = math.fsum(_times(decisions, u.clip_bias) for decisions, u in weighted)
    concentration = 0.0
    if confidence is not None:
        # Each message's ratio multiplies the whole return, so the sum can exceed 1 / (1 - gamma).
        moved = [(max(decisions, _turns(u)) * setting.advantage_bound, u) for decisions, u in weighted if u.kl > 0 or _turns(u)]
        concentration = math.fsum(_concentration(u, unit, confidence, len(updates)) for unit, u in moved)
    penalties = (occupancy, staleness, estimation, clip_bias, concentration)
    bound = surrogate - math.fsum(penalties)
    possible = reach > math.fsum(penalties) * (1 + ROUNDING)
    return Certificate(
        surrogate=surrogate,
        occupancy=occupancy,
        staleness=staleness,
        estimation=estimation,
        clip_bias=clip_bias,
        concentration=concentration,
        bound=bound,
        vacuous=bound <= -setting.return_range,
        can_certify=possible,
    )


def _turns(update: UpdateTerms) -> float:
    """Messages of an episode at which the policy has changed."""
    return float(sum(kl > 0 for kl in update.turn_kl))


def _concentration(update: UpdateTerms, unit: float, confidence: Confidence, updates: int) -> float:
    """One update's sampling error: `failure` is shared by all of the stage's (the union bound of thm:stage-hp)."""
    failure = confidence.failure / updates
    if confidence.method == "normal":
        return math.inf if update.standard_error is None else NormalDist().inv_cdf(1 - failure) * update.standard_error
    bound = confidence.ratio_range * unit * max(1.0, update.largest_weight)
    if confidence.block == 1 and confidence.beta == 0:
        return hoeffding_radius(bound, update.groups, failure)
    return block_radius(bound, update.groups, failure, confidence.block, confidence.beta)


def _times(factor: float, value: float) -> float:
    """factor * value, and 0 for a value of 0 also where gamma = 1 makes the factor infinite."""
    return factor * value if value else 0.0


def leave_one_out(returns: ArrayLike, group: ArrayLike) -> Array:
    """R - mean of the group's other episodes: unbiased where the mean of all shrinks by 1 - 1/G (lem:shrinkage). Exactly 0 in
    groups of equal returns."""
    returns_E = np.asarray(returns, dtype=np.float64)
    _, index_E = np.unique(np.asarray(group), return_inverse=True)
    size_E = np.bincount(index_E)[index_E]
    if (size_E < 2).any():
        raise ValueError("leave-one-out needs at least two episodes a group")
    off_E = returns_E - np.bincount(index_E, weights=returns_E)[index_E] / size_E
    furthest_G, largest_G = np.zeros(index_E.max() + 1), np.ones(index_E.max() + 1)
    np.maximum.at(furthest_G, index_E, abs(off_E))
    np.maximum.at(largest_G, index_E, abs(returns_E))
    return np.where((furthest_G <= EQUAL * largest_G)[index_E], 0.0, off_E * size_E / (size_E - 1))


def centred_surrogate(log_ratio: ArrayLike, episode: ArrayLike, advantage: ArrayLike) -> Array:
    """Per episode: sum over the agent's messages of (w - 1) * advantage. Its mean is L, without bias and without clipping.

    `advantage` is one number an episode: its return from the start minus a baseline that does not depend on it. With discounted
    returns this is L of eq:surrogate, and no further gamma^t belongs in the sum: gamma^t times the return from t on is the
    return from the start, and what was earned before t meets a factor w - 1 of mean zero. With raw returns it is L at gamma = 1.
    """
    advantage_E = np.asarray(advantage, dtype=np.float64)
    weight_M = np.expm1(np.asarray(log_ratio, dtype=np.float64))
    return np.bincount(np.asarray(episode, dtype=np.int64), weights=weight_M, minlength=len(advantage_E)) * advantage_E


@dataclass(frozen=True)
class ZetaProxies:
    """app:exp:zeta, in units of the normalised advantage: diagnostics, not bounds."""

    clip: float
    ratio: float
    norm: float


def zeta_proxies(
    returns: ArrayLike,
    group: ArrayLike,
    episode: ArrayLike,
    log_ratio: ArrayLike,
    *,
    ratio_clip: float,
    advantage_clip: float,
    eps: float,
) -> ZetaProxies:
    """clip: mean |unclipped - clipped advantage|. ratio: mean |advantage| |w - clip(w)| over messages. norm: half the mean
    difference between advantages normalised by either half of their group.

    Half of it, because a half's mean and deviation have twice the variance of the whole group's, and two of them are compared.
    Both are clipped first: where all returns of a half are equal its deviation is sqrt(eps), and only clipping keeps it finite.
    """
    returns_E, group_E = np.asarray(returns, dtype=np.float64), np.asarray(group)
    unclipped_E, halves_E = np.zeros(len(returns_E)), np.zeros(len(returns_E))
    for name in np.unique(group_E):
        mine = group_E == name
        values = returns_E[mine]
        unclipped_E[mine] = _standardised(values, values, eps)
        if len(values) >= 2:
            one, other = (np.clip(_standardised(values, values[k::2], eps), -advantage_clip, advantage_clip) for k in (0, 1))
            halves_E[mine] = np.abs(one - other) / 2
    clipped_E = np.clip(unclipped_E, -advantage_clip, advantage_clip)
    ratio_M = np.exp(np.asarray(log_ratio, dtype=np.float64))
    moved_M = np.abs(ratio_M - np.clip(ratio_M, 1 - ratio_clip, 1 + ratio_clip)) * np.abs(
        clipped_E[np.asarray(episode, dtype=np.int64)]
    )
    return ZetaProxies(
        clip=float(np.abs(unclipped_E - clipped_E).mean()),
        ratio=float(moved_M.mean()) if moved_M.size else 0.0,
        norm=float(halves_E.mean()),
    )


def _standardised(values: Array, reference: Array, eps: float) -> Array:
    return (values - reference.mean()) / np.sqrt(reference.var() + eps)
