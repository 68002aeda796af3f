"""Certificates in closed form, what their inputs must be, the zeta proxies and the calibration of a run."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import tabular_lab as lab_
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from tabular_lab import Array, Lab, solve

from teamtr_lora.algorithm.calibration import Measured, calibrate, rank_correlation
from teamtr_lora.algorithm.certificate import (
    Certificate,
    Confidence,
    Setting,
    UpdateTerms,
    block_radius,
    centred_surrogate,
    certify_by_turns,
    certify_cached_stage,
    certify_stage,
    certify_stale_stage,
    clip_bias_bound,
    episode_setting,
    hoeffding_radius,
    leave_one_out,
    occupancy_penalty,
    odd_block_mean,
    turn_penalty,
    zeta_proxies,
)
from teamtr_lora.algorithm.local_gain import LocalModel

TINY = 1e-9
SEED = st.integers(0, 2**32 - 1)
# the paper's own setting: three agents that speak once, delta = 0.01, a reward in [0, 1]
THREE = episode_setting(3)


# --- closed forms ---


def test_setting_of_an_episode() -> None:
    assert episode_setting(3) == Setting(1.0, 1 - 1 / 3, 1.0)
    assert episode_setting(1).gamma == 0  # one message: nothing can shift
    assert occupancy_penalty(0.5, episode_setting(1)) == 0
    assert episode_setting(4, -1, 1, gamma=0.9) == Setting(2.0, 0.9, 2.0)
    assert episode_setting(4, 1, 2).advantage_bound == 2  # a discounted 1 can be worth nearly nothing
    assert episode_setting(4, -3, -2).advantage_bound == 3


def test_terms_of_a_stage_add_up() -> None:
    updates = [UpdateTerms(0.05, 0.01, zeta=0.002, clip_bias=0.001), UpdateTerms(0.02, 0.0025), UpdateTerms(0.0, 0.0)]
    stage = certify_stage(updates, THREE)
    factor = math.sqrt(2) * (2 / 3) * 9
    assert stage.surrogate == pytest.approx(0.07)
    assert stage.occupancy == pytest.approx(factor * (0.1 + 0.05))
    assert stage.estimation == pytest.approx(3 * 0.002) and stage.clip_bias == pytest.approx(3 * 0.001)
    assert stage.staleness == stage.concentration == 0
    assert stage.bound == pytest.approx(stage.surrogate - stage.penalty)
    assert sum(stage.shares().values()) == pytest.approx(1)
    singles = [certify_stage([u], THREE).bound for u in updates]
    assert stage.bound == pytest.approx(sum(singles))
    stale = certify_stale_stage(updates, THREE)
    assert stale.staleness == pytest.approx(factor * (0 + 0.1 + 0.15))
    cached = certify_cached_stage(updates, THREE)
    assert cached.occupancy == pytest.approx(factor * math.sqrt(0.0125))


def test_updates_are_charged_for_those_that_share_their_rollout() -> None:
    """Rollouts a, a, b: sqrt(a + a) and b for the team steps; only the second update is stale, by the first."""
    updates = [UpdateTerms(0.1, 0.01), UpdateTerms(0.2, 0.0225), UpdateTerms(0.3, 0.04)]
    factor = math.sqrt(2) * (2 / 3) * 9
    cached, stale = (certify(updates, THREE, None, [1, 1, 2]) for certify in (certify_cached_stage, certify_stale_stage))
    assert cached.occupancy == pytest.approx(factor * (math.sqrt(0.0325) + 0.2)) and cached.staleness == 0
    assert stale.occupancy == pytest.approx(factor * 0.45) and stale.staleness == pytest.approx(factor * 0.1)
    for certify in (certify_cached_stage, certify_stale_stage):
        assert certify(updates, THREE, Confidence(method="normal"), [1, 2, 3]) == certify_stage(
            updates, THREE, Confidence(method="normal")
        )
        assert certify(updates, THREE, None, [4, 4, 4]) == certify(updates, THREE)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_penalties_grow_linearly_quadratically_and_with_the_root(n: int) -> None:
    updates = [UpdateTerms(0.0, 0.01)] * n
    unit = occupancy_penalty(0.01, THREE)
    assert certify_stage(updates, THREE).penalty == pytest.approx(n * unit)
    assert certify_stale_stage(updates, THREE).penalty == pytest.approx(n * (n + 1) / 2 * unit)
    assert certify_cached_stage(updates, THREE).penalty == pytest.approx(math.sqrt(n) * unit)


def test_an_update_that_did_not_move_costs_nothing() -> None:
    for setting in (THREE, replace(THREE, gamma=1.0)):
        for certify in (certify_stage, certify_stale_stage, certify_cached_stage, certify_by_turns):
            still = certify([UpdateTerms(0.0, 0.0)], setting, Confidence())
            assert still == Certificate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, vacuous=False, can_certify=False)


def test_without_discount_the_discounted_bound_is_infinite_and_says_so() -> None:
    hopeless = certify_stage([UpdateTerms(0.1, 0.01)], replace(THREE, gamma=1.0))
    assert hopeless.bound == -math.inf and hopeless.vacuous and not hopeless.can_certify and hopeless.shares() == {}


def test_the_papers_setting_is_vacuous_whatever_is_learned() -> None:
    """delta = 0.01, three messages: one update's penalty is 0.85 of the reward range, a stage's 2.5; the largest surrogate gain
    that the region allows is 0.42."""
    largest = clip_bias_bound(0.01, 1.0) * 3
    update = UpdateTerms(largest, 0.01)
    assert occupancy_penalty(0.01, THREE) == pytest.approx(0.8485, abs=1e-4) and largest == pytest.approx(0.4243, abs=1e-4)
    assert certify_stage([update] * 3, THREE).vacuous
    assert certify_stage([update], THREE).bound < 0 and not certify_stage([update], THREE).can_certify
    assert not certify_stage([update], THREE).vacuous  # it still excludes the loss of everything
    once = replace(update, turn_kl=(0.01,))
    assert certify_by_turns([once] * 3, THREE).bound == pytest.approx(3 * largest)


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.499, 0.5, 0.75])
def test_what_can_be_certified_is_decided_by_gamma(gamma: float) -> None:
    setting = Setting(1.0, gamma, 1.0)
    best = UpdateTerms(clip_bias_bound(0.01, 1.0) * setting.decisions, 0.01)
    for certify in (certify_stage, certify_stale_stage, certify_cached_stage):
        assert certify([best], setting).can_certify == (gamma < 0.5)
    assert (certify_stage([best], setting).bound > 1e-12) == (gamma < 0.5)


def test_a_bound_is_vacuous_where_it_is_below_every_outcome_and_not_before() -> None:
    half, once = (replace(THREE, return_range=share * occupancy_penalty(0.01, THREE)) for share in (1.5, 0.999))
    assert not certify_stage([UpdateTerms(0.0, 0.01)], half).vacuous, "a loss of two thirds of the range at most"
    assert certify_stage([UpdateTerms(0.0, 0.01)], once).vacuous


def test_a_stale_surrogate_may_be_larger_by_what_staleness_costs() -> None:
    """So gamma alone decides here too, however many updates share the episodes."""
    for n in (1, 2, 5):
        for gamma, possible in ((0.45, True), (0.5, False), (0.55, False)):
            found = certify_stale_stage([UpdateTerms(0.0, 0.01)] * n, Setting(1.0, gamma, 1.0))
            assert found.can_certify is possible and (found.staleness > 0) is (n > 1)


def test_updates_of_one_rollout_reach_as_far_as_their_one_step() -> None:
    """Together they gain at most what one step of the summed KL does, so what none of them could certify three cannot."""
    updates = [UpdateTerms(0.0, 0.01)] * 3
    for gamma, possible in ((0.45, True), (0.5, False), (0.55, False)):
        assert certify_cached_stage(updates, Setting(1.0, gamma, 1.0)).can_certify is possible


def test_penalty_of_later_messages() -> None:
    assert turn_penalty((), 1.0) == turn_penalty((0.01,), 1.0) == turn_penalty((0.01, 0.0, 0.0), 1.0) == 0
    assert turn_penalty((0.01, 0.02, 0.03), 2.0) == pytest.approx(2 * (math.sqrt(0.02) + math.sqrt(0.06)))
    assert turn_penalty((50.0, 0.1), 1.0) == 2  # a distribution cannot shift by more


# --- confidence ---


def test_a_mixing_coefficient_costs_failure_twice_per_gap() -> None:
    """lem:beta-block: 2 exp(-m e^2 / 2 B^2) + 2 (m - 1) beta = failure, with m = 20 // (2 * 2) = 5 blocks."""
    radius = block_radius(0.7, 20, 0.1, 2, 0.005)
    assert 2 * math.exp(-5 * radius**2 / (2 * 0.7**2)) + 2 * 4 * 0.005 == pytest.approx(0.1)
    assert block_radius(0.7, 20, 0.1, 2, 0.0125) == math.inf  # all of it is spent on dependence


def test_high_probability_terms() -> None:
    """thm:stage-hp: (1 + eps) A / (1 - gamma) sqrt(2 log(2n / delta) / N) an update; centred, eps replaces 1 + eps."""
    updates = [UpdateTerms(0.05, 0.01, groups=8), UpdateTerms(0.05, 0.01, groups=32)]
    expected = [1.2 * 3 * math.sqrt(2 * math.log(4 / 0.05) / n) for n in (8, 32)]
    assert certify_stage(updates, THREE, Confidence(ratio_range=1.2)).concentration == pytest.approx(sum(expected))
    assert certify_stage(updates, THREE, Confidence(ratio_range=0.2)).concentration == pytest.approx(sum(expected) / 6)
    unknown = certify_stage([UpdateTerms(0.05, 0.01)], THREE, Confidence())
    assert unknown.concentration == math.inf and unknown.vacuous
    normal = Confidence(method="normal")
    assert certify_stage([replace(updates[0], standard_error=0.01)], THREE, normal).concentration == pytest.approx(
        0.01645, abs=1e-5
    )
    assert certify_stage(updates, THREE, normal).concentration == math.inf
    turns = replace(updates[0], turn_kl=(0.01, 0.01))
    expected_turns = 0.2 * 2 * math.sqrt(2 * math.log(2 / 0.05) / 8)
    assert certify_by_turns([turns], THREE, Confidence()).concentration == pytest.approx(expected_turns)


def test_the_sampling_error_grows_with_the_largest_advantage_and_the_largest_weight() -> None:
    """L is a mean of weight times ratio times advantage, so its terms lie within the product of what bounds the three."""
    update = UpdateTerms(0.05, 0.01, groups=8)
    plain = certify_stage([update], THREE, Confidence()).concentration
    assert plain == pytest.approx(hoeffding_radius(0.2 * 3, 8, 0.05))
    wide = certify_stage([update], episode_setting(3, -1, 1), Confidence()).concentration
    assert wide == pytest.approx(2 * plain), "rewards from -1 to 1"
    for weight, factor in ((2.5, 2.5), (0.5, 1.0)):
        weighted = certify_stage([replace(update, largest_weight=weight)], THREE, Confidence()).concentration
        assert weighted == pytest.approx(factor * plain), "the weights' mean is 1, so the largest is no less"


def test_hoeffding_covers_and_a_third_of_it_does_not() -> None:
    rng = np.random.default_rng(0)
    means = rng.choice([-1.0, 1.0], size=(20_000, 40)).mean(1)
    radius = hoeffding_radius(1.0, 40, 0.05)
    assert (np.abs(means) > radius).mean() <= 0.05 < (np.abs(means) > radius / 3).mean()
    assert hoeffding_radius(1.0, 0, 0.05) == math.inf


def test_hoeffding_counts_an_agents_messages_where_the_discount_counts_fewer() -> None:
    """Ten messages each with w - 1 = 0.2 and a reward before the first of them: L is 2, with 1 / (1 - gamma) = 2 decisions."""
    log_ratio, episode = np.full(10, math.log(1.2)), np.zeros(10, int)
    largest = centred_surrogate(log_ratio, episode, [1.0])[0]
    assert largest == pytest.approx(2.0)
    terms = UpdateTerms(0.0, 1e-4, groups=8, turn_kl=(1e-4,) * 10)
    found = certify_stage([terms], Setting(1.0, 0.5, 1.0), Confidence(0.05, ratio_range=0.2)).concentration
    assert found == pytest.approx(hoeffding_radius(largest, 8, 0.05))
    few = UpdateTerms(0.0, 1e-4, groups=8, turn_kl=(1e-4,))
    found = certify_stage([few], Setting(1.0, 0.5, 1.0), Confidence(0.05, ratio_range=0.2)).concentration
    assert found == pytest.approx(hoeffding_radius(0.2 * 2, 8, 0.05))


def test_blocks_cover_dependent_groups_where_counting_them_as_independent_does_not() -> None:
    """lem:beta-block on a two-state chain, whose mixing coefficient is exactly lambda^l / 2."""
    rng, stay, length, block, failure = np.random.default_rng(0), 0.95, 2400, 120, 0.1
    moves = np.where(rng.random((1500, length)) < stay, 1, -1)
    moves[:, 0] = rng.choice([-1, 1], size=1500)
    chain = np.cumprod(moves, axis=1)
    beta = 0.5 * (2 * stay - 1) ** block
    radius = block_radius(1.0, length, failure, block, beta)
    assert radius < math.inf
    assert np.mean([abs(odd_block_mean(row.tolist(), block)) > radius for row in chain[:300]]) <= failure
    assert (np.abs(chain.mean(1)) > hoeffding_radius(1.0, length, failure)).mean() > failure
    assert block_radius(1.0, length, failure, 2, 0.1) == math.inf  # too dependent for any statement
    assert block_radius(1.0, 40, 0.05, 1, 0.0) == hoeffding_radius(1.0, 20, 0.05)
    assert odd_block_mean([1, 2, 9, 9, 3, 4, 9, 9, 5], 2) == 2.5
    dependent = Confidence(block=2, beta=0.001)
    update = UpdateTerms(0.05, 0.01, groups=40)
    assert certify_stage([update], THREE, dependent).concentration == pytest.approx(block_radius(0.6, 40, 0.05, 2, 0.001))


def test_surrogate_must_come_from_groups_the_candidate_was_not_fitted_to() -> None:
    """cor:empL applies Hoeffding as if the candidate were fixed. One fitted to the same groups has L_hat = eps |A| where the
    truth is 0, and no number of groups brings that below the concentration term; on other groups it holds."""
    rng, groups, eps = np.random.default_rng(0), 2000, 0.2
    noise = rng.choice([-1.0, 1.0], size=groups)  # advantages that no policy can predict, a context of its own each
    ratio = 1 + eps * np.sign(noise)
    radius = hoeffding_radius(eps, groups, 0.05)
    assert float(((ratio - 1) * noise).mean()) > 2 * radius
    assert abs(float(((ratio - 1) * rng.permutation(noise)).mean())) < radius


# --- local model and tightening ---


def test_local_model_in_the_stage_bound() -> None:
    """thm:info-lower-stage is thm:stage-hp with kappa sqrt(delta) - a delta for L.

    It holds for the best step in the region, not for the one that was taken, and its quadratic region is not the KL's.
    """
    model = LocalModel(slope=0.3, curvature=2.0)
    assert model.gain(0.01) == pytest.approx(0.03 - 0.02)
    update = UpdateTerms(model.gain(0.01), 0.01, groups=8, clip_bias=clip_bias_bound(0.01, 1.0))
    whole = certify_stage([update], THREE, Confidence())
    assert whole.bound == pytest.approx(0.01 - 0.8485 - 3 * math.sqrt(0.02) - whole.concentration, abs=1e-4)


def tightens(before: UpdateTerms, after: UpdateTerms) -> bool:
    """No less surrogate and no more of any penalty; the proposition names the KL alone and leaves the others to its proof."""
    less = all(getattr(after, name) <= getattr(before, name) for name in ("kl", "zeta", "clip_bias"))
    return less and after.surrogate >= before.surrogate


values = st.floats(0, 1)
Terms = tuple[float, float, float, float]


@given(st.tuples(values, values, values, values), st.tuples(values, values, values, values), SEED)
@settings(max_examples=100, deadline=None)
def test_tightening_never_lowers_the_bound(one: Terms, other: Terms, seed: int) -> None:
    """prop:tight."""
    before, after = (UpdateTerms(s, k, zeta=z, clip_bias=c) for s, k, z, c in (one, other))
    rest = [UpdateTerms(0.1, 0.02)] * (seed % 4)
    if tightens(before, after):
        assert certify_stage([*rest, after], THREE).bound >= certify_stage([*rest, before], THREE).bound - TINY
    assert tightens(before, replace(before, surrogate=before.surrogate + 0.1))
    assert tightens(before, replace(before, kl=before.kl / 2))
    assert not tightens(before, replace(before, kl=before.kl / 2, zeta=before.zeta + 1))  # the printed statement would say yes


# --- calibration ---


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=20))
@settings(max_examples=60, deadline=None)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    one, other = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    mine = rank_correlation(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert mine is None
    else:
        assert mine == pytest.approx(spearmanr(one, other).statistic)


def test_calibration_of_a_run() -> None:
    def row(surrogate: float, kl: float, improvement: float, error: float | None = 0.01) -> Measured:
        return Measured(certify_stage([UpdateTerms(surrogate, kl)], Setting(1.0, 0.2, 1.0)), improvement, error)

    rows = [row(0.10, 0.01, 0.2), row(0.12, 0.01, 0.05), row(0.15, 0.01, 0.1, 0.01), row(0.0, 9.0, 0.3)]
    bounds = [r.certificate.bound for r in rows]
    assert bounds[2] > 0.1 and bounds[3] < -1
    result = calibrate(rows)
    assert result.rows == 4 and result.vacuous_rate == 0.25
    assert result.violation_rate == 0.5 and result.informative_violation_rate == pytest.approx(2 / 3)
    assert result.significant_violation_rate == 0.25  # 0.1 is within its error of the bound; 0.05 is not
    assert result.mean_slack == pytest.approx(np.mean([r.improvement - b for r, b in zip(rows, bounds, strict=True)]))
    assert result.rank_correlation == pytest.approx(spearmanr(bounds, [0.2, 0.05, 0.1, 0.3]).statistic)
    assert result.penalty_shares["occupancy"] == pytest.approx(1)


def test_zero_violations_of_vacuous_bounds_are_said() -> None:
    empty = calibrate([Measured(certify_stage([UpdateTerms(0.0, 0.5)], THREE), 0.1)] * 3)
    assert empty.violation_rate == 0 and empty.vacuous_rate == 1 and empty.informative_violation_rate is None
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrate([])


def test_zeta_proxies_by_hand() -> None:
    returns, group = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 1, 1]
    proxies = zeta_proxies(returns, group, [0, 0, 4], np.log([1.5, 1.1, 0.5]), ratio_clip=0.2, advantage_clip=1.2, eps=1e-6)
    first = 0.75 / math.sqrt(0.1875)  # of the only right answer in group 0
    assert proxies.clip == pytest.approx((first - 1.2) / 8, rel=1e-3)
    assert proxies.ratio == pytest.approx((1.2 * 0.3 + 0 + 1.0 * 0.3) / 3, rel=1e-3)
    # group 0: half (1, 0) has mean 1/2 and deviation 1/2, half (0, 0) mean 0: advantages (1, -1, -1, -1) and (1.2, 0, 0, 0)
    # group 1: halves (1, 0) and (1, 0) agree
    assert proxies.norm == pytest.approx((0.1 + 0.5 * 3) / 8, rel=1e-3)


def test_zeta_proxies_have_eps_inside_the_root() -> None:
    """Two of four are right: 1/2 over sqrt(1/4 + 6) is 1/5, and so it is in either half, of one right and one wrong."""
    found = zeta_proxies([1.0, 1.0, 0.0, 0.0], [0] * 4, [0], [math.log(1.5)], ratio_clip=0.2, advantage_clip=0.15, eps=6.0)
    assert found.clip == pytest.approx(0.05) and found.ratio == pytest.approx(0.15 * 0.3) and found.norm == 0


def test_norm_proxy_has_the_size_of_the_groups_own_uncertainty() -> None:
    """Against the spread of the advantage of a fixed return when the rest of the group is drawn again."""
    rng, size = np.random.default_rng(0), 64
    returns = rng.normal(size=(400, size))
    group = np.repeat(np.arange(400), size)
    norm = zeta_proxies(returns.ravel(), group, [], [], ratio_clip=0.2, advantage_clip=9, eps=1e-9).norm
    means, deviations = returns.mean(1), returns.std(1)
    points = rng.normal(size=200)
    spread = np.abs((points[None] - means[:, None]) / deviations[:, None] - points[None]).mean()
    assert norm == pytest.approx(spread, rel=0.1)


# --- estimators ---


def trajectories(lab: Lab, policy_SA: Array) -> list[tuple[float, list[tuple[int, int]], float]]:
    """(probability, (state, action) pairs, discounted return) of every episode."""
    found_: list[tuple[float, list[tuple[int, int]], float]] = []
    todo: list[tuple[float, list[tuple[int, int]], float, int]] = [
        (float(p), [], 0.0, s) for s, p in enumerate(lab.start_S) if p > 0
    ]
    while todo:
        prob, path, earned, s = todo.pop()
        for a in range(policy_SA.shape[1]):
            p, got = prob * policy_SA[s, a], earned + lab.gamma ** len(path) * lab.reward_SA[s, a]
            after_S = lab.transition_SAS[s, a]
            if not after_S.any():
                found_.append((p, [*path, (s, a)], got))
            todo += [(p * q, [*path, (s, a)], got, t) for t, q in enumerate(after_S) if q > 0]
    return found_


@given(st.integers(1, 3), st.sampled_from([0.5, 0.8, 1.0]), SEED)
@settings(max_examples=25, deadline=None)
def test_centred_surrogate_is_unbiased(agents: int, gamma: float, seed: int) -> None:
    """E[sum (w - 1)(R - b)] is L exactly, so zeta = 0 for it. One more gamma^t in the sum would discount twice."""
    rng = np.random.default_rng(seed)
    lab = lab_.episode_lab(rng, agents=agents, turns=3, contexts=2, actions=2, gamma=gamma)
    lab = replace(lab, reward_SA=rng.uniform(0, 1, lab.reward_SA.shape))  # rewards on the way as well
    cur, new = lab_.random_team(rng, lab), lab_.random_team(rng, lab)
    after = lab_.replace_agent(lab, cur, 0, new)
    exact = solve(lab, cur)
    episodes = trajectories(lab, cur)
    prob_E = np.array([p for p, _, _ in episodes])
    own = [(i, t, s, a) for i, (_, path, _) in enumerate(episodes) for t, (s, a) in enumerate(path) if lab.agent_S[s] == 0]
    log_ratio = [math.log(after[s, a] / cur[s, a]) for _, _, s, a in own]
    values_E = centred_surrogate(log_ratio, [i for i, *_ in own], [r - 0.37 for *_, r in episodes])
    truth = lab_.surrogate(exact.visits_S, after, exact.advantage_SA)
    assert float(prob_E @ values_E) == pytest.approx(truth, abs=1e-9)
    twice = sum(prob_E[i] * gamma**t * (after[s, a] / cur[s, a] - 1) * episodes[i][2] for i, t, s, a in own)
    late = [t for _, t, *_ in own if t > 0]
    assert gamma == 1 or not late or not math.isclose(twice, truth, abs_tol=1e-9)


def test_leave_one_out_of_equal_returns_is_exactly_zero() -> None:
    """Of groups that cannot gain the certificate's error knows that they cannot: rounding would make observations of them."""
    returns, groups = [*[4 / 9] * 8, 1.0, 0.0, 0.1 + 0.2, 0.3, 1e9, 1e9 + 1e3], [0] * 8 + [1, 1, 2, 2, 3, 3]
    found = leave_one_out(returns, groups)
    assert found.tolist() == [*[0.0] * 8, 1.0, -1.0, 0.0, 0.0, -1e3, 1e3]


@given(st.integers(2, 5), st.integers(2, 4), SEED)
@settings(max_examples=60, deadline=None)
def test_self_included_mean_shrinks_and_leave_one_out_does_not(size: int, outcomes: int, seed: int) -> None:
    """lem:shrinkage by enumerating what the other episodes return: a factor 1 - 1/G exactly."""
    rng = np.random.default_rng(seed)
    value, prob = rng.normal(size=outcomes), rng.dirichlet(np.ones(outcomes))
    mean = float(prob @ value)
    mine = float(value[0])
    plain = alone = 0.0
    for others in itertools.product(range(outcomes), repeat=size - 1):
        p = float(np.prod(prob[list(others)]))
        returns = [mine, *value[list(others)]]
        plain += p * (mine - float(np.mean(returns)))
        alone += p * float(leave_one_out(returns, [0] * size)[0])
    assert plain == pytest.approx((1 - 1 / size) * (mine - mean), abs=1e-9)
    assert alone == pytest.approx(mine - mean, abs=1e-9)


@given(st.integers(2, 6), st.floats(0.05, 0.9), st.floats(0.1, 3.0), SEED)
@settings(max_examples=120, deadline=None)
def test_ratio_and_clip_lemmas(actions: int, eps: float, scale: float, seed: int) -> None:
    """lem:ratio-tv, lem:clipbias-kl, lem:clipbias, cor:clipbias-prob.

    lem:ratio-tv needs Q << P; the absolute continuity that the paper assumes before it is P << Q. Softmax policies have both.
    """
    rng = np.random.default_rng(seed)
    p, q = (lab_.softmax(scale * rng.standard_normal(actions)) for _ in range(2))
    bound = 1.5
    advantage = rng.uniform(-bound, bound, actions)
    w = q / p
    clipped = np.clip(w, 1 - eps, 1 + eps)
    kl, tv = float((p * np.log(p / q)).sum()), 0.5 * float(np.abs(p - q).sum())
    assert float(p @ np.abs(1 - w)) == pytest.approx(2 * tv)
    bias = abs(float(p @ ((w - clipped) * advantage)))
    chain = [bias, bound * float(p @ np.abs(w - clipped)), bound * float(p @ np.abs(1 - w)), clip_bias_bound(kl, bound)]
    assert all(a <= b + TINY for a, b in itertools.pairwise(chain))
    # eq:ppo_obj's minimum is never above w A: a surrogate made of it needs no clip bias at all
    assert float(p @ np.minimum(w * advantage, clipped * advantage)) <= float(p @ (w * advantage)) + TINY
    z, c = 3 * rng.standard_normal(actions), 1.0
    overflow = float(p @ (np.abs(z) * (np.abs(z) > c)))
    assert abs(float(p @ (np.clip(z, -c, c) - z))) <= float(p @ np.abs(np.clip(z, -c, c) - z)) + TINY <= overflow + 2 * TINY
    share = float(p @ (np.abs(z) > c))
    assert overflow <= min(float(np.abs(z).max()) * share, math.sqrt(float(p @ z**2) * share)) + TINY


def test_clip_bias_check_can_fail() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(500):
        p, q = lab_.softmax(rng.standard_normal(2)), lab_.softmax(rng.standard_normal(2))
        kl = float((p * np.log(p / q)).sum())
        ratios.append(float(p @ np.abs(q / p - np.clip(q / p, 0.95, 1.05))) / math.sqrt(kl))
    assert 0.2 < max(ratios) <= math.sqrt(2)
