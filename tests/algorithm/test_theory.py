"""The theory with exact numbers, on random tabular teams: every lemma and certificate, and that these checks could fail.

Findings about the paper are said where they are tested. `LAB` draws n = 1..5 agents, steps from tiny to huge, and transitions
from uniform to nearly deterministic, where the bounds come close to equality.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tabular_lab as lab_
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tabular_lab import Array, Lab, Step, run_stage, solve

from teamtr_lora.algorithm.certificate import (
    Setting,
    UpdateTerms,
    certify_by_turns,
    certify_cached_stage,
    certify_stage,
    certify_stale_stage,
    clip_bias_bound,
    occupancy_penalty,
)

TINY = 1e-9
AGENTS, SEED = st.integers(1, 5), st.integers(0, 2**32 - 1)
GAMMA = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.97])


@dataclass(frozen=True)
class Case:
    lab: Lab
    cur: Array
    new: Array
    order: list[int]

    def stage(self) -> list[Step]:
        """Every agent moves from `cur` to `new`, one after the other."""
        return run_stage(self.lab, self.cur, self.order, lambda team, i: lab_.replace_agent(self.lab, team, i, self.new))[0]


def draw(agents: int, gamma: float, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    lab = lab_.random_lab(
        rng,
        agents=agents,
        contexts=int(rng.integers(1, 5)),
        actions=int(rng.integers(2, 4)),
        gamma=gamma,
        spread=float(rng.choice([0.02, 0.1, 1.0])),
        round_robin=bool(rng.integers(2)),
    )
    cur = lab_.random_team(rng, lab, float(rng.choice([0.2, 1.0, 3.0])))
    size = float(rng.choice([0.01, 0.3, 1.0, 3.0]))
    return Case(lab, cur, lab_.softmax(np.log(cur) + size * rng.standard_normal(cur.shape)), rng.permutation(agents).tolist())


CASE = st.builds(draw, AGENTS, GAMMA, SEED)


def found(violation: Callable[[Case], bool], cases: int = 1500) -> bool:
    """Whether a wrong statement is caught by some case of the same distribution."""
    gammas = [0.1, 0.3, 0.5, 0.7, 0.9, 0.97]
    return any(violation(draw(seed % 5 + 1, gammas[seed % 6], seed)) for seed in range(cases))


def setting_of(lab: Lab, steps: list[Step]) -> Setting:
    """The exact A_max; the range of returns is a bound that is enough here."""
    return Setting(max(s.advantage_max for s in steps), lab.gamma, 2 / (1 - lab.gamma) if lab.gamma < 1 else 1.0)


# --- the lab itself ---


@given(CASE)
@settings(max_examples=40, deadline=None)
def test_occupancy_and_return_are_those_of_the_series(case: Case) -> None:
    lab, exact = case.lab, solve(case.lab, case.cur)
    flow_SS = np.einsum("sa,sat->st", case.cur, lab.transition_SAS)
    here_S, visits_S = lab.start_S, np.zeros(len(lab.start_S))
    for t in range(1200):
        visits_S = visits_S + lab.gamma**t * here_S
        here_S = here_S @ flow_SS
    np.testing.assert_allclose(exact.visits_S, visits_S, atol=1e-8)
    assert exact.visits_S.sum() * (1 - lab.gamma) == pytest.approx(1)
    assert exact.expected_return == pytest.approx(float(visits_S @ (case.cur * lab.reward_SA).sum(-1)), abs=1e-8)
    np.testing.assert_allclose((case.cur * exact.advantage_SA).sum(-1), 0, atol=1e-9)  # lem:centerapp


@given(CASE)
@settings(max_examples=40, deadline=None)
def test_performance_difference_is_the_surrogate_on_the_new_occupancy(case: Case) -> None:
    before, after = solve(case.lab, case.cur), solve(case.lab, case.new)
    expected = lab_.surrogate(after.visits_S, case.new, before.advantage_SA)
    assert after.expected_return - before.expected_return == pytest.approx(expected, abs=1e-8)


@given(CASE, st.floats(1e-4, 0.5))
@settings(max_examples=30, deadline=None)
def test_a_step_is_as_long_as_asked(case: Case, delta: float) -> None:
    lab, before = case.lab, solve(case.lab, case.cur)
    moved = lab.agent_S == case.order[0]
    weight_S = (1 - lab.gamma) * before.visits_S
    # a probability that is not 0 is at least exp(-745): states that are hardly visited cannot add more than that
    assume(delta < 700 * (weight_S[:, None] * case.cur)[moved].min())
    after = lab_.step_to(lab, case.cur, case.order[0], before.advantage_SA, delta, weight_S)
    np.testing.assert_array_equal(after[~moved], case.cur[~moved])
    assert lab_.kl_functional(lab, before.visits_S, case.cur, after) == pytest.approx(delta, rel=1e-6)


# --- lemmas ---


Prefix = tuple[int, ...]


def random_writer(rng: np.random.Generator, vocabulary: int, longest: int, scale: float = 1.0) -> dict[Prefix, Array]:
    """An autoregressive message policy: for every prefix the probabilities of the next token, of which the last one ends it."""
    writer: dict[Prefix, Array] = {}
    open_prefixes: list[Prefix] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        writer[prefix] = lab_.softmax(scale * rng.standard_normal(vocabulary))
        if len(prefix) + 1 < longest:
            open_prefixes += [(*prefix, token) for token in range(vocabulary - 1)]
    return writer


def message_probabilities(writer: dict[Prefix, Array]) -> dict[Prefix, float]:
    """Every complete message with its probability: one whose last token has no distribution to follow."""
    reached: dict[Prefix, float] = {(): 1.0}
    for prefix in sorted(writer, key=len):
        for token, prob in enumerate(writer[prefix]):
            reached[(*prefix, token)] = reached[prefix] * float(prob)
    return {message: prob for message, prob in reached.items() if message not in writer}


@given(st.integers(2, 4), st.integers(1, 4), SEED)
@settings(max_examples=60, deadline=None)
def test_chain_rule(vocabulary: int, longest: int, seed: int) -> None:
    """lem:chainrule on every message of an autoregressive policy, and lem:avgvssum for the reduction by length."""
    rng = np.random.default_rng(seed)
    cur, new = (random_writer(rng, vocabulary, longest, 2.0) for _ in range(2))
    prob_cur, prob_new = message_probabilities(cur), message_probabilities(new)
    assert math.fsum(prob_cur.values()) == pytest.approx(1)
    whole = math.fsum(p * math.log(p / prob_new[m]) for m, p in prob_cur.items())

    def token_sum(message: tuple[int, ...]) -> float:
        return math.fsum(
            float((cur[message[:u]] * np.log(cur[message[:u]] / new[message[:u]])).sum()) for u in range(len(message))
        )

    summed = math.fsum(p * token_sum(m) for m, p in prob_cur.items())
    averaged = math.fsum(p * token_sum(m) / len(m) for m, p in prob_cur.items())
    assert summed == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert averaged - TINY <= whole <= longest * averaged + TINY


@given(CASE)
@settings(max_examples=40, deadline=None)
def test_active_factor_reduction(case: Case) -> None:
    """lem:activefactor: the KL of the product over all agents' actions, no-ops included, is the active agent's."""
    lab = case.lab
    actions = lab.reward_SA.shape[1]

    def joint(policy_SA: Array, s: int) -> Array:
        everyone = np.ones(1)
        for agent in range(lab.agents):
            acts = np.append(policy_SA[s], 0.0) if agent == lab.agent_S[s] else np.append(np.zeros(actions), 1.0)
            everyone = np.outer(everyone, acts).ravel()
        return everyone

    for s in range(len(lab.start_S)):
        p, q = joint(case.cur, s), joint(case.new, s)
        seen = p > 0
        kl = float((p[seen] * np.log(p[seen] / q[seen])).sum())
        assert kl == pytest.approx(lab_.state_kl(case.cur, case.new)[s], rel=1e-9, abs=1e-12)


def occupancy_ratio(case: Case) -> tuple[float, float]:
    """The left side of lem:occ for the worst f, sign(d' - d), over sqrt(KL); and over the expected TV."""
    before, after = solve(case.lab, case.cur), solve(case.lab, case.new)
    shift = (1 - case.lab.gamma) * float(np.abs(after.visits_S - before.visits_S).sum())
    tv = (1 - case.lab.gamma) * float(before.visits_S @ (np.abs(case.cur - case.new).sum(-1) / 2))
    return shift / math.sqrt(lab_.kl_functional(case.lab, before.visits_S, case.cur, case.new)), shift / tv


@given(CASE)
@settings(max_examples=150, deadline=None)
def test_occupancy_shift_bound(case: Case) -> None:
    """lem:occ and the sharper lem:occexp it comes from. Both hold as printed."""
    factor = case.lab.gamma / (1 - case.lab.gamma)
    over_kl, over_tv = occupancy_ratio(case)
    assert over_kl <= math.sqrt(2) * factor * (1 + 1e-6)
    assert over_tv <= 2 * factor * (1 + 1e-6)


def test_occupancy_shift_check_can_fail() -> None:
    assert found(lambda c: occupancy_ratio(c)[0] > 0.2 * c.lab.gamma / (1 - c.lab.gamma))  # sqrt(2) -> 0.2
    assert found(lambda c: occupancy_ratio(c)[0] > math.sqrt(2))  # gamma / (1 - gamma) dropped
    assert found(lambda c: occupancy_ratio(c)[1] > 1.9 * c.lab.gamma / (1 - c.lab.gamma))  # lem:occexp is nearly reached


# --- certificates ---


def terms(step: Step, surrogate: float) -> UpdateTerms:
    return UpdateTerms(surrogate, step.kl)


@given(CASE)
@settings(max_examples=150, deadline=None)
def test_single_and_stage_certificates(case: Case) -> None:
    """thm:single and thm:stage with exact advantages (zeta = 0), for any order of the agents.

    With an estimator in L the printed thm:single needs L to be its expectation over the data: zeta compares E[A_hat] with A,
    not A_hat.
    """
    steps = case.stage()
    setting = setting_of(case.lab, steps)
    for step in steps:
        assert step.gain >= certify_stage([terms(step, step.fresh)], setting).bound - TINY
    stage = certify_stage([terms(s, s.fresh) for s in steps], setting)
    assert math.fsum(s.gain for s in steps) >= stage.bound - TINY
    # the same penalty bounds the other side: the theorem is two-sided
    assert math.fsum(s.gain for s in steps) <= stage.surrogate + stage.occupancy + TINY


@given(CASE)
@settings(max_examples=150, deadline=None)
def test_stale_certificate(case: Case) -> None:
    """thm:stage_stale and eq:stale_surrogate_gap, with advantages of the intermediate team as the paper defines L^stale."""
    steps = case.stage()
    setting = setting_of(case.lab, steps)
    stale = certify_stale_stage([terms(s, s.stale) for s in steps], setting)
    assert math.fsum(s.gain for s in steps) >= stale.bound - TINY
    assert math.fsum(abs(s.fresh - s.stale) for s in steps) <= stale.staleness + TINY
    if len(steps) == 1:
        assert stale.staleness == 0 and steps[0].stale == pytest.approx(steps[0].fresh, abs=TINY)


@given(CASE)
@settings(max_examples=100, deadline=None)
def test_certificate_for_cached_episodes(case: Case) -> None:
    """What cached episodes give is not L^stale: their advantages are the stage-start team's as well.

    For that surrogate neither eq:surrogate_stale nor its quadratic penalty is the right statement: in the turn-taking protocol
    the stage is one step of one policy, and thm:single for it has a penalty of order sqrt(n), below the fresh stage's n.
    """
    steps = case.stage()
    setting = setting_of(case.lab, steps)
    cached = certify_cached_stage([UpdateTerms(s.cached, s.kl_start) for s in steps], setting)
    assert math.fsum(s.gain for s in steps) >= cached.bound - TINY
    start = solve(case.lab, case.cur)
    assert cached.surrogate == pytest.approx(lab_.surrogate(start.visits_S, case.new, start.advantage_SA), abs=1e-8)
    whole = lab_.kl_functional(case.lab, start.visits_S, case.cur, case.new)
    assert cached.occupancy == pytest.approx(occupancy_penalty(whole, setting), rel=1e-6, abs=1e-12)


def test_certificate_checks_can_fail() -> None:
    def broken(case: Case, factor: Callable[[Lab], float]) -> bool:
        steps = case.stage()
        bound = setting_of(case.lab, steps).advantage_bound
        return any(s.gain < s.fresh - factor(case.lab) * bound * math.sqrt(s.kl) - TINY for s in steps)

    assert not found(lambda c: broken(c, lambda lab: math.sqrt(2) * lab.gamma / (1 - lab.gamma) ** 2), cases=200)
    assert found(lambda c: broken(c, lambda lab: 0.2 * lab.gamma / (1 - lab.gamma) ** 2))  # sqrt(2) -> 0.2
    assert found(lambda c: broken(c, lambda lab: math.sqrt(2) * lab.gamma))  # 1 / (1 - gamma)^2 dropped


def fork(gamma: float, lean: float) -> Case:
    """Agent 0 chooses the way, agent 1 does well on one and badly on the other: the stale bound within (1 - gamma)^1.5."""
    transition = np.zeros((3, 2, 3))
    transition[0, 0, 1] = transition[0, 1, 2] = 1
    lab = Lab(np.array([0, 1, 1]), transition, np.array([[0.0, 0], [1, -1], [1, -1]]), np.array([1.0, 0, 0]), gamma)
    new = np.array([[0.5 + lean, 0.5 - lean], [1 - 1e-6, 1e-6], [1e-6, 1 - 1e-6]])
    return Case(lab, np.full((3, 2), 0.5), new, [0, 1])


def test_stale_check_can_fail() -> None:
    """With sqrt(2) -> 0.2, or without the compounding term, the stale surrogate's gap is not covered."""
    steps = fork(gamma=0.1, lean=0.01).stage()
    stale = certify_stale_stage([terms(s, s.stale) for s in steps], setting_of(fork(0.1, 0.01).lab, steps))
    gap = math.fsum(abs(s.fresh - s.stale) for s in steps)
    assert 0.2 / math.sqrt(2) * stale.staleness < gap <= stale.staleness
    assert gap == pytest.approx(0.9**1.5 * stale.staleness, rel=1e-3)


@given(CASE)
@settings(max_examples=100, deadline=None)
def test_single_step_bound_is_never_positive_from_gamma_one_half(case: Case) -> None:
    """L <= A_max sqrt(2 KL) / (1 - gamma), so L - penalty <= (1 - gamma / (1 - gamma)) * that: no data can change it."""
    steps = case.stage()
    setting = setting_of(case.lab, steps)
    for step in steps:
        certificate = certify_stage([terms(step, step.fresh)], setting)
        assert step.fresh <= clip_bias_bound(step.kl, setting.advantage_bound) * setting.decisions + TINY
        assert certificate.can_certify == (case.lab.gamma < 0.5 and step.kl > 0)  # an agent may never get to speak
        if case.lab.gamma >= 0.5:
            assert certificate.bound <= TINY


def draw_episodes(agents: int, turns: int, seed: int, random_router: bool) -> Case:
    rng = np.random.default_rng(seed)
    lab = lab_.episode_lab(rng, agents=agents, turns=turns, contexts=3, actions=2, spread=float(rng.choice([0.05, 1.0])))
    if random_router:  # who speaks depends on the context
        lab = replace(lab, agent_S=np.concatenate([rng.integers(agents, size=len(lab.start_S) - agents), np.arange(agents)]))
    cur = lab_.random_team(rng, lab)
    size = float(rng.choice([0.05, 0.5, 2.0]))
    return Case(lab, cur, lab_.softmax(np.log(cur) + size * rng.standard_normal(cur.shape)), rng.permutation(agents).tolist())


def by_turns(case: Case, turns: int) -> list[tuple[UpdateTerms, Step]]:
    steps, team, pairs = case.stage(), case.cur, []
    for step in steps:
        after = lab_.replace_agent(case.lab, team, step.agent, case.new)
        pairs.append((UpdateTerms(step.fresh, 0.0, turn_kl=lab_.message_kl(case.lab, team, after, step.agent, turns)), step))
        team = after
    return pairs


@given(AGENTS, st.integers(1, 6), SEED, st.booleans())
@settings(max_examples=150, deadline=None)
def test_certificate_by_turns(agents: int, turns: int, seed: int, random_router: bool) -> None:
    """Undiscounted episodes: only the agent's own later messages can have shifted; whoever speaks at most once pays nothing."""
    case = draw_episodes(agents, max(turns, 2), seed, random_router)
    pairs = by_turns(case, max(turns, 2))
    setting = setting_of(case.lab, [step for _, step in pairs])
    for update, step in pairs:
        certificate = certify_by_turns([update], setting)
        assert abs(step.gain - step.fresh) <= certificate.occupancy + TINY
        if not any(update.turn_kl[1:]):
            assert step.gain == pytest.approx(step.fresh, abs=TINY)
    whole = certify_by_turns([update for update, _ in pairs], setting)
    assert math.fsum(step.gain for _, step in pairs) >= whole.bound - TINY


def test_certificate_by_turns_is_reached() -> None:
    """At a fork that one agent walks alone the bound is an equality, so any smaller constant would be violated."""
    case = fork(gamma=1.0, lean=-0.01)
    case = replace(case, lab=replace(case.lab, agent_S=np.zeros(3, dtype=np.int64)), order=[0])
    ((update, step),) = by_turns(case, 2)
    certificate = certify_by_turns([update], setting_of(case.lab, [step]))
    assert step.gain == pytest.approx(certificate.bound, rel=1e-3) and certificate.bound < -0.019


def test_certificate_by_turns_can_certify() -> None:
    """Three agents that speak once each, better by a little: certified in full, where thm:single with gamma = 1 - 1/H cannot."""
    for seed in range(20):
        case = draw_episodes(3, 3, seed, random_router=False)
        better = lab_.softmax(np.log(case.cur) + 0.3 * solve(case.lab, case.cur).advantage_SA)
        pairs = by_turns(replace(case, new=better), 3)
        setting = setting_of(case.lab, [s for _, s in pairs])
        updates = [u for u, _ in pairs]
        assert certify_by_turns(updates, setting).bound == pytest.approx(math.fsum(s.gain for _, s in pairs))
        assert certify_by_turns(updates, setting).bound > 0
        discounted = [UpdateTerms(u.surrogate, sum(u.turn_kl) / 3) for u in updates]
        assert certify_stage(discounted, replace(setting, gamma=2 / 3)).bound < 0
