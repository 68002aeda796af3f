"""thm:info-lower-stage from Gram matrices: against whole Fisher matrices and exact tabular teams."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tabular_lab import episode_lab, random_team, softmax, solve, state_kl

from teamtr_lora.algorithm.certificate import Confidence, UpdateTerms, certify_stage, episode_setting
from teamtr_lora.algorithm.local_gain import LocalModel, certify_achievable_stage, gram_model
from teamtr_lora.algorithm.occupancy import order_sensitivity


def local_slope(gradient: np.ndarray, fisher: np.ndarray) -> float:
    """kappa of lem:lin-quad: the best linear gain in {x' F x / 2 <= delta} is kappa sqrt(delta)."""
    return math.sqrt(2 * float(gradient @ np.linalg.solve(fisher, gradient)))


def test_local_slope_is_the_best_linear_gain() -> None:
    """lem:lin-quad by random search on the ellipsoid."""
    rng = np.random.default_rng(0)
    root = rng.standard_normal((4, 4))
    gradient, fisher, delta = rng.standard_normal(4), root @ root.T + 0.1 * np.eye(4), 0.03
    steps = rng.standard_normal((200_000, 4))
    steps *= np.sqrt(2 * delta / np.einsum("ri,ij,rj->r", steps, fisher, steps))[:, None]
    best = local_slope(gradient, fisher) * math.sqrt(delta)
    assert 0.9 * best < float((steps @ gradient).max()) <= best * (1 + 1e-9)


def test_the_gram_matrix_gives_what_the_fisher_matrix_gives() -> None:
    rng = np.random.default_rng(0)
    rows_MP, advantage_M, group_M = rng.standard_normal((30, 7)), rng.standard_normal(30), np.repeat(np.arange(6), 5)
    for damping in (0.01, 0.3):
        found = gram_model(rows_MP @ rows_MP.T, advantage_M, group_M, messages_per_episode=2.0, parameters=7, damping=damping)
        fisher = rows_MP.T @ rows_MP / 30 + damping * np.eye(7)
        gradient = 2.0 * rows_MP.T @ advantage_M / 30
        assert found.slope_in_sample == pytest.approx(local_slope(gradient, fisher))
        assert found.smallest_eigenvalue == pytest.approx(np.linalg.eigvalsh(fisher)[0], rel=1e-6)
    with pytest.raises(ValueError, match="halved"):
        gram_model(rows_MP @ rows_MP.T, advantage_M, np.zeros(30), parameters=7)


def test_halves_of_groups_of_different_sizes_count_by_their_messages() -> None:
    """Gradients and advantages that are all alike: every division finds the same slope, kappa^2 / 2 = K / (K + e)."""
    for sizes in ([5, 2, 2], [3, 3, 3]):
        group_M = np.repeat(np.arange(3), sizes)
        found = gram_model(np.ones((9, 9)), np.ones(9), group_M, parameters=1, damping=0.5)
        assert found.slope**2 / 2 == pytest.approx(1 / 1.5)


def test_cross_fitting_takes_the_noise_out() -> None:
    """Advantages that have nothing to do with the gradients: nothing can be gained, and only the cross-fit says so."""
    rng = np.random.default_rng(1)
    slopes, naive = [], []
    for seed in range(40):
        rows_MP, advantage_M = rng.standard_normal((40, 200)), rng.standard_normal(40)
        found = gram_model(rows_MP @ rows_MP.T, advantage_M, np.arange(40) // 4, parameters=200, seed=seed)
        slopes.append(found.slope**2 / 2)
        naive.append(found.slope_in_sample**2 / 2)
    assert np.mean(naive) > 0.8, "with more parameters than messages all noise is fitted"
    assert np.mean(slopes) < 0.1 * np.mean(naive)


def _exact_scores(policy_SA: np.ndarray, weight_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of log pi(a|s) by the logits, for every (s, a), and the probability of each."""
    states, actions = policy_SA.shape
    rows, weights = [], []
    for s in range(states):
        for a in range(actions):
            row = np.zeros((states, actions))
            row[s] = -policy_SA[s]
            row[s, a] += 1
            rows.append(row.ravel())
            weights.append(weight_S[s] * policy_SA[s, a])
    return np.array(rows), np.array(weights)


def test_in_the_lab_some_update_has_the_gain_that_the_model_promises() -> None:
    """One agent with one turn: KL, surrogate and occupancy are exact. The gram of sqrt-weighted scores is the true Fisher matrix,
    and the step along F^-1 g gains slope * sqrt(KL) to first order, as no other step of that KL does."""
    rng = np.random.default_rng(2)
    lab = episode_lab(rng, agents=1, turns=1, contexts=3, actions=4)
    logits = rng.standard_normal((3, 4))
    policy_SA = softmax(logits)
    exact = solve(lab, policy_SA)
    rows, weights = _exact_scores(policy_SA, exact.visits_S)
    count = len(rows)
    scaled = rows * np.sqrt(weights * count)[:, None]
    advantage = exact.advantage_SA.ravel() * np.sqrt(weights * count)
    found = gram_model(scaled @ scaled.T, advantage, np.arange(count), parameters=12, damping=1e-9)
    fisher = scaled.T @ scaled / count
    gradient = scaled.T @ advantage / count
    assert found.slope_in_sample == pytest.approx(local_slope(gradient, fisher + 1e-9 * np.eye(12)), rel=1e-6)

    def gain_and_kl(step: np.ndarray) -> tuple[float, float]:
        new_SA = softmax(logits + step.reshape(3, 4))
        return solve(lab, new_SA).expected_return - exact.expected_return, float(exact.visits_S @ state_kl(policy_SA, new_SA))

    best = np.linalg.solve(fisher + 1e-9 * np.eye(12), gradient)
    for length in (0.01, 0.001):
        gain, kl = gain_and_kl(length * best / np.linalg.norm(best))
        assert gain / math.sqrt(kl) == pytest.approx(found.slope_in_sample, rel=30 * length)
        for _ in range(50):
            other = rng.standard_normal(12)
            gain, kl = gain_and_kl(length * other / np.linalg.norm(other))
            assert gain <= found.slope_in_sample * math.sqrt(kl) * (1 + 30 * length)
    assert random_team(rng, lab).shape == policy_SA.shape


def test_the_achievable_stage_is_the_stage_certificate_with_other_gains() -> None:
    setting = episode_setting(3)
    models = [LocalModel(0.5, 2.0), LocalModel(0.1, 0.0)]
    terms = [UpdateTerms(9.0, 0.004, groups=8, standard_error=0.01), UpdateTerms(9.0, 0.002, groups=8, standard_error=0.02)]
    found = certify_achievable_stage(models, [0.01, 0.02], terms, setting, Confidence(method="normal"))
    gains = [0.5 * 0.1 - 2.0 * 0.01, 0.1 * math.sqrt(0.02)]
    plain = certify_stage(
        [UpdateTerms(g, t.kl, groups=8, standard_error=t.standard_error) for g, t in zip(gains, terms, strict=True)],
        setting,
        Confidence(method="normal"),
    )
    assert found == plain and found.surrogate == pytest.approx(sum(gains))


def test_order_sensitivity_sees_an_effect_of_place_and_not_of_agents() -> None:
    rng = np.random.default_rng(3)
    stages, agents = 60, ["a", "b", "c"]
    orders = [list(rng.permutation(agents)) for _ in range(stages)]
    rows = [(place + 1, agent) for order in orders for place, agent in enumerate(order)]
    noise = 0.01 * rng.standard_normal(len(rows))
    skill = {"a": 0.0, "b": 1.0, "c": 5.0}
    places, names = [p for p, _ in rows], [a for _, a in rows]
    none = order_sensitivity(places, names, [skill[a] + e for a, e in zip(names, noise, strict=True)])
    assert abs(none.excess) < 0.003 and none.p_value > 0.01
    some = order_sensitivity(places, names, [skill[a] + 0.02 * p + e for (p, a), e in zip(rows, noise, strict=True)])
    assert some.p_value < 0.01 and some.excess > 0.01
    assert some.by_position == sorted(some.by_position)
    with pytest.raises(ValueError, match="order"):
        order_sensitivity([1, 1], ["a", "b"], [0.0, 1.0])


def test_the_slope_is_the_best_gain_in_a_ball_of_kl() -> None:
    """lem:lin-quad: along F^-1 g, as far as x' F x / 2 = delta, the linear gain is slope sqrt(delta)."""
    rng = np.random.default_rng(5)
    rows, gradient = rng.standard_normal((12, 4)), rng.standard_normal(4)
    fisher, delta = rows.T @ rows / 12, 0.03
    step = np.linalg.solve(fisher, gradient)
    step *= math.sqrt(delta / (0.5 * step @ fisher @ step))
    assert local_slope(gradient, fisher) * math.sqrt(delta) == pytest.approx(float(gradient @ step))


def test_groups_that_are_all_alike_have_one_slope_by_either_estimate() -> None:
    """Where every group has the same gradients and advantages, the other half says what this half says: the cross-fitted slope
    is the in-sample one, which is the Fisher matrix's."""
    rng = np.random.default_rng(6)
    rows_MP, advantage_M = np.tile(rng.standard_normal((3, 5)), (4, 1)), np.tile(rng.standard_normal(3), 4)
    found = gram_model(rows_MP @ rows_MP.T, advantage_M, np.repeat(np.arange(4), 3), parameters=5, damping=0.2)
    fisher = rows_MP.T @ rows_MP / 12 + 0.2 * np.eye(5)
    assert found.slope > 0 and found.slope == pytest.approx(found.slope_in_sample)
    assert found.slope == pytest.approx(local_slope(rows_MP.T @ advantage_M / 12, fisher))
