"""Episodes of another team, weighted: exact expectations in a tabular team, where every group can be enumerated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tabular_lab import Array, Lab, episode_lab, random_team, softmax, solve, state_kl

from teamtr_lora.algorithm.advantage import group_advantages
from teamtr_lora.algorithm.variants.reuse import HoldOut
from teamtr_lora.training.batches import judging_weights

AGENT = 0  # the one that is updated; another one speaks between its messages


@dataclass(frozen=True)
class Trajectories:
    """All episodes that begin in one state: the item of a group."""

    states_KT: Array
    actions_KT: Array
    return_K: Array

    def probability(self, lab: Lab, team_SA: Array) -> Array:
        p_K = np.ones(len(self.return_K))
        for t in range(self.states_KT.shape[1]):
            s, a = self.states_KT[:, t], self.actions_KT[:, t]
            p_K *= team_SA[s, a]
            if t + 1 < self.states_KT.shape[1]:
                p_K *= lab.transition_SAS[s, a, self.states_KT[:, t + 1]]
        return p_K

    def scores(self, lab: Lab, team_SA: Array) -> Array:
        """Gradient of the log-probability of the updated agent's messages by its logits: [K, S * A]."""
        rows = np.zeros((len(self.return_K), *team_SA.shape))
        for k, (states, actions) in enumerate(zip(self.states_KT, self.actions_KT, strict=True)):
            for s, a in zip(states, actions, strict=True):
                if lab.agent_S[s] == AGENT:
                    rows[k, s] -= team_SA[s]
                    rows[k, s, a] += 1
        return rows.reshape(len(rows), -1)


def small_lab(seed: int) -> Lab:
    lab = episode_lab(np.random.default_rng(seed), agents=2, turns=2, contexts=2, actions=2)
    return replace(lab, reward_SA=(lab.reward_SA > np.median(lab.reward_SA[-2:])).astype(float))  # right or wrong


def trajectories(lab: Lab, start: int) -> Trajectories:
    found = list(itertools.product([start], [0, 1], [2, 3], [0, 1]))  # state, action, state, action
    states, actions = np.array([(s0, s1) for s0, _, s1, _ in found]), np.array([(a0, a1) for _, a0, _, a1 in found])
    return Trajectories(states, actions, lab.reward_SA[states[:, 1], actions[:, 1]])


def drifted(rng: np.random.Generator, team_SA: Array, size: float) -> Array:
    return softmax(np.log(team_SA) + size * rng.standard_normal(team_SA.shape))


def advantages(return_E: Array, group_E: Array, weight_E: Array | None, kind: str = "no_norm") -> Array:
    given = None if weight_E is None else torch.from_numpy(weight_E)
    found = group_advantages(torch.from_numpy(return_E), torch.from_numpy(group_E), clip=1e9, eps=1e-6, kind=kind, weight_E=given)
    return found.clipped_E.double().numpy()


def expected_gradient(lab: Lab, plays_SA: Array, today_SA: Array, size: int, estimate: Any) -> Array:
    """E over all groups of `size` episodes of one item that `plays_SA` plays, of the mean of `estimate` times the score."""
    total = np.zeros(today_SA.size)
    for start in (0, 1):
        paths = trajectories(lab, start)
        old_K, new_K = paths.probability(lab, plays_SA), paths.probability(lab, today_SA)
        members_QG = np.array(list(itertools.product(range(len(old_K)), repeat=size)))
        chance_Q = old_K[members_QG].prod(axis=1)
        group_E, k_E = np.repeat(np.arange(len(members_QG)), size), members_QG.ravel()
        signal_E = estimate(paths.return_K[k_E], group_E, (new_K / old_K)[k_E])
        total += lab.start_S[start] * ((np.repeat(chance_Q, size) * signal_E) @ paths.scores(lab, today_SA)[k_E]) / size
    return total


def ours(return_E: Array, group_E: Array, weight_E: Array) -> Array:
    return weight_E * advantages(return_E, group_E, weight_E)


def own_weight_in_the_mean(return_E: Array, group_E: Array, weight_E: Array) -> Array:
    mean_G = np.bincount(group_E, weight_E * return_E) / np.bincount(group_E, weight_E)
    return weight_E * (return_E - mean_G[group_E])


WRONG = {
    "no weights": lambda r, g, w: advantages(r, g, None),
    "weights in the mean only": lambda r, g, w: advantages(r, g, w),
    "weights twice": lambda r, g, w: w * ours(r, g, w),
    "no 1 - 1/G": lambda r, g, w: ours(r, g, w) / (1 - 1 / np.bincount(g)[g]),
    "the other way round": lambda r, g, w: advantages(r, g, 1 / w) / w,
    "the episode's own weight in its mean": own_weight_in_the_mean,
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_the_weighted_gradient_has_exactly_the_expectation_of_the_fresh_one(size: int, seed: int) -> None:
    """A team far from today's has played, both agents different. Nothing but the weights makes the expectations agree."""
    rng, lab = np.random.default_rng(seed), small_lab(seed)
    today_SA = random_team(rng, lab, 0.7)
    played_SA = drifted(rng, today_SA, 0.8)
    fresh = expected_gradient(lab, today_SA, today_SA, size, lambda r, g, w: advantages(r, g, None))
    assert np.abs(fresh).max() > 1e-3
    assert np.abs(expected_gradient(lab, played_SA, today_SA, size, ours) - fresh).max() < 1e-7
    policy_gradient = _policy_gradient(lab, today_SA)
    np.testing.assert_allclose(fresh, (1 - 1 / size) * policy_gradient, atol=1e-6)
    for name, wrong in WRONG.items():
        off = np.abs(expected_gradient(lab, played_SA, today_SA, size, wrong) - fresh).max()
        assert off > 3e-3 * np.abs(fresh).max() + 1e-6, name


def _policy_gradient(lab: Lab, team_SA: Array) -> Array:
    """Of the expected return by the updated agent's logits, by finite differences of the linear solve."""
    logits, step, out = np.log(team_SA), 1e-5, np.zeros(team_SA.shape)
    for s, a in itertools.product(*map(range, team_SA.shape)):
        if lab.agent_S[s] == AGENT:
            ends = []
            for sign in (1, -1):
                moved = logits.copy()
                moved[s, a] += sign * step
                ends.append(solve(lab, softmax(moved)).expected_return)
            out[s, a] = (ends[0] - ends[1]) / (2 * step)
    return out.ravel()


def test_an_episode_with_all_of_its_groups_weight_has_no_others_to_be_compared_with() -> None:
    found = advantages(np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, dtype=int), np.array([4.0, 1e-16, 1e-16, 1e-16]))
    assert found[0] == 0 and found[1:] == pytest.approx([-0.75, -0.75, 0.0]), "the others are compared with it"


def test_equal_weights_are_none_and_leaving_one_out_is_its_mean() -> None:
    rng = np.random.default_rng(0)
    return_E, group_E = rng.random(12), np.repeat(np.arange(3), 4)
    weight_E = rng.uniform(0.3, 2.0, 12)
    for kind in ("group", "no_norm", "no_clip", "leave_one_out"):
        plain = advantages(return_E, group_E, None, kind)
        np.testing.assert_allclose(advantages(return_E, group_E, np.full(12, 1.7), kind), plain, rtol=1e-6)
        assert np.abs(advantages(return_E, group_E, weight_E, kind) - plain).max() > 1e-2
    for e in range(12):
        others = [i for i in range(12) if group_E[i] == group_E[e] and i != e]
        off = return_E[e] - np.average(return_E[others], weights=weight_E[others])
        assert advantages(return_E, group_E, weight_E, "leave_one_out")[e] == pytest.approx(off, rel=1e-6)
        assert advantages(return_E, group_E, weight_E)[e] == pytest.approx(0.75 * off, rel=1e-6)
        mine = [i for i in range(12) if group_E[i] == group_E[e]]
        centred = [
            0.75 * (return_E[i] - np.average(np.delete(return_E[mine], j), weights=np.delete(weight_E[mine], j)))
            for j, i in enumerate(mine)
        ]
        variance = np.average(np.square(centred), weights=weight_E[mine])
        assert advantages(return_E, group_E, weight_E, "no_clip")[e] == pytest.approx(
            0.75 * off / np.sqrt(variance + 1e-6), rel=1e-6
        )
    equal = group_advantages(
        torch.ones(3), torch.zeros(3, dtype=torch.long), clip=1.0, eps=1e-6, weight_E=torch.tensor([1.0, 2, 3])
    )
    assert equal.clipped_E.tolist() == [0.0] * 3 and equal.zero_variance_groups == 1


def test_the_gradients_variance_falls_as_the_window_grows() -> None:
    """Rollouts of the last teams, each a small step apart: the more of them, the less noise, around the same mean."""
    rng, lab = np.random.default_rng(5), small_lab(1)
    today_SA = random_team(rng, lab, 0.7)
    exact = expected_gradient(lab, today_SA, today_SA, 2, lambda r, g, w: advantages(r, g, None)) * (1 - 1 / 4) / (1 - 1 / 2)
    teams = [drifted(rng, today_SA, 0.15) for _ in range(4)]
    trials, size = 400, 4
    gradient_TWP = np.zeros((trials, len(teams), today_SA.size))
    for place, team_SA in enumerate(teams):
        for start in (0, 1):
            paths = trajectories(lab, start)
            old_K, new_K = paths.probability(lab, team_SA), paths.probability(lab, today_SA)
            k_E = rng.choice(len(old_K), trials * size, p=old_K / old_K.sum())
            signal_E = ours(paths.return_K[k_E], np.repeat(np.arange(trials), size), (new_K / old_K)[k_E])
            terms = (signal_E[:, None] * paths.scores(lab, today_SA)[k_E]).reshape(trials, size, -1).mean(1)
            gradient_TWP[:, place] += lab.start_S[start] * terms
    variance = {n: float(gradient_TWP[:, :n].mean(1).var(0).sum()) for n in (1, 2, 4)}
    assert variance[2] < 0.65 * variance[1] and variance[4] < 0.35 * variance[1]
    mean, error = gradient_TWP.mean(1).mean(0), gradient_TWP.mean(1).std(0) / np.sqrt(trials)
    assert (np.abs(mean - exact) < 4 * error + 1e-9).all()


def draw_batch(rng: np.random.Generator, lab: Lab, team_SA: Array, kl_S: Array, items: int) -> tuple[list[Any], Array, set[int]]:
    """Episodes of a batch, the KL of the updated agent's message in each, and the groups whose returns differ."""
    episodes, kl_E, mixed = [], [], set()
    for item in range(items):
        paths = trajectories(lab, int(rng.choice(2, p=lab.start_S[:2])))
        p_K = paths.probability(lab, team_SA)
        members = rng.choice(len(p_K), 3, p=p_K / p_K.sum())
        if len(set(paths.return_K[members])) > 1:
            mixed.add(item)
        for k in members:
            episodes.append(SimpleNamespace(item_id=str(item), group=item))
            kl_E.append(kl_S[paths.states_KT[k, 0]])
    return episodes, np.array(kl_E), mixed


@pytest.mark.parametrize(("items", "holdout"), [(16, 0.25), (12, 0.5), (8, 0.25)])
def test_the_weighted_held_out_kl_has_the_expectation_of_the_whole_batch(items: int, holdout: float) -> None:
    """Groups without differences in return are held out first, so plain means over held-out messages are biased. The weighted
    mean over many divisions is the batch's, and over many batches the team's own KL."""
    rng = np.random.default_rng(2)
    lab = episode_lab(rng, agents=2, turns=2, contexts=2, actions=2)
    reward_SA = np.zeros_like(lab.reward_SA)
    reward_SA[2] = [1.0, 0.0]  # after the first context mostly 2 follows, where returns differ; after the other always 1
    reward_SA[3] = [1.0, 1.0]
    transition_SAS = lab.transition_SAS.copy()
    transition_SAS[0, :, 2:], transition_SAS[1, :, 2:] = [0.9, 0.1], [0.0, 1.0]
    start_S = np.array([0.5, 0.5, 0.0, 0.0])
    lab = replace(lab, reward_SA=reward_SA, transition_SAS=transition_SAS, start_S=start_S)
    team_SA = np.full((4, 2), 0.5)
    new_SA = softmax(np.array([[0.0, 1.5], [0.0, 0.2], [0.0, 0.0], [0.0, 0.0]]))
    kl_S = state_kl(team_SA, new_SA)
    assert kl_S[0] > 5 * kl_S[1] and kl_S[2] == 0
    weighted, plain, whole = [], [], []
    rule = HoldOut(SimpleNamespace(holdout=holdout))
    for _ in range(150):
        episodes, kl_E, mixed = draw_batch(rng, lab, team_SA, kl_S, items)
        if not 1 < len(mixed) < items:
            continue
        divisions = []
        for seed in range(12):
            held = set(rule.divide(episodes, mixed, False, seed).judge)
            held_E = np.array([e.group in held for e in episodes])
            weight_E = judging_weights(episodes, episodes, held, mixed)
            assert weight_E[held_E].mean() == pytest.approx(1.0)
            divisions.append((np.average(kl_E[held_E], weights=weight_E[held_E]), kl_E[held_E].mean()))
        weighted.append(np.mean([w for w, _ in divisions]))
        plain.append(np.mean([p for _, p in divisions]))
        whole.append(kl_E.mean())
    off = np.array(weighted) - np.array(whole)
    assert abs(off.mean()) < 4 * off.std() / np.sqrt(len(off)) + 1e-9
    bias = np.array(plain) - np.array(whole)
    assert abs(bias.mean()) > 5 * bias.std() / np.sqrt(len(bias)), "without weights the estimate is another one"
    assert np.mean(weighted) == pytest.approx(np.mean(whole), rel=0.02)
    assert np.mean(whole) == pytest.approx(float(solve(lab, team_SA).visits_S[:2] @ kl_S[:2]), rel=0.12)
