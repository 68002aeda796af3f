"""One agent's update: who moves, what is accepted, and that a refusal leaves no trace."""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import skew
from scipy.stats import t as student_t

from teamtr_lora.algorithm.clustered import ClusteredMean
from teamtr_lora.algorithm.variants.region import Gate
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.metrics import UpdateRow
from teamtr_lora.team import Episode
from teamtr_lora.training import gate as gate_module
from teamtr_lora.training import update as update_module
from teamtr_lora.training.certificate_terms import certificate_terms
from teamtr_lora.training.optimize import _step
from teamtr_lora.training.rows import update_row
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.update import AgentUpdater, Split, UpdateOutcome, episode_advantages
from teamtr_lora.training.window import Material, PlayedEpisodes

Updater = Callable[..., tuple[PlayableTeam, AgentUpdater]]


@pytest.fixture
def episodes(twins: list[Episode]) -> list[Episode]:
    return twins


@pytest.fixture
def updater(make_team, config, accelerator) -> Updater:
    def make(team: dict[str, Any] | None = None, **values: Any) -> tuple[PlayableTeam, AgentUpdater]:
        playable = make_team(**(team or {}))
        return playable, AgentUpdater(playable, config(**values))

    return make


def flat(state: Any) -> Any:
    """An optimizer's state_dict with its tensors as bytes, so that == is bit for bit."""
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [flat(value) for value in state]
    return (str(state.dtype), tuple(state.shape), state.numpy().tobytes()) if isinstance(state, torch.Tensor) else state


def fresh(episodes: list[Episode]) -> Material:
    return Material(newest=PlayedEpisodes(episodes))


def split_of(update: AgentUpdater, material: Material, seed: int = 0, agent: str = "left") -> Split:
    split = update._split(agent, material, update._advantages(agent, material), seed)
    assert split is not None
    return split


def judges(split: Split) -> set[int]:
    return set(split.judging.batch.group_M.tolist())


def row_of(outcome: UpdateOutcome, episodes: list[Episode], values: Any) -> UpdateRow:
    return update_row(outcome, Rollout(episodes=episodes, versions={}, seconds=1.0), stage=1, update=1)


@pytest.mark.parametrize("agent", ["left", "right"])
def test_only_the_active_agents_tensors_change(updater: Updater, episodes, state_of, agent: str) -> None:
    playable, update = updater()
    before, versions = state_of(playable.bank.model), playable.versions()
    outcome = update.update(agent, fresh(episodes), 0)
    after = state_of(playable.bank.model)
    assert outcome.accepted and before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    own = {n for n, _ in playable.bank.model.named_parameters() if f".agent_{agent}." in n}
    assert changed <= own
    assert {n for n in own if "lora_B" in n} <= changed, "every B factor has a gradient"
    assert not any(p.requires_grad or p.grad is not None for p in playable.bank.model.parameters())
    assert outcome.version == playable.bank.version(agent) and outcome.version.number == 1
    other = "right" if agent == "left" else "left"
    assert playable.versions()[other] == versions[other] and playable.versions()[agent] != versions[agent]
    assert update.optimizers[other].state_dict()["state"] == {}


def test_an_accepted_step_is_in_region_when_measured_independently(updater: Updater, episodes, double_logp, config) -> None:
    """Both KL bounds, on held-out messages and on those of the gradient, recomputed in float64 from the adapters alone."""
    playable, update = updater(delta=0.02, holdout=0.5)
    _, logp_before = double_logp(playable, "left")
    held: list[Any] = []
    split = update._split
    update._split = lambda *args: held.append(split(*args)) or held[-1]  # type: ignore[method-assign,func-returns-value]
    outcome = update.update("left", fresh(episodes), 7)
    assert outcome.accepted and outcome.step.accepted is not None
    _, logp_after = double_logp(playable, "left")

    def bound_of(batches: list[Any]) -> float:
        groups: dict[int, list[float]] = {}
        for message, group in [pair for b in batches for pair in zip(b.messages, b.group_M.tolist(), strict=True)]:
            with torch.no_grad():
                p, q = logp_before(message), logp_after(message)
            groups.setdefault(group, []).append(float((p.exp() * (p - q)).sum()))
        values = [v for kls in groups.values() for v in kls]
        mean = sum(values) / len(values)
        pulls = [sum(v - mean for v in kls) / len(values) for kls in groups.values()]
        error = math.sqrt(len(groups) / (len(groups) - 1) * sum(pull**2 for pull in pulls))
        assert len(groups) == 4
        lean, student = float(skew(pulls, bias=False)) / 2, float(student_t.ppf(0.95, 3))
        if lean > 0:  # Hall's transformation of Student's quantile
            student = 3 / lean * (1 - float(np.cbrt(1 - lean * (student + lean / 6))))
        return mean + student * error

    bound, fitted = bound_of([held[0].judging.batch]), bound_of(held[0].fit)
    assert bound <= 0.02 and fitted <= 0.02
    assert outcome.step.accepted.kl.bound == pytest.approx(bound, rel=5e-3)
    assert outcome.step.accepted.fitted_bound == pytest.approx(fitted, rel=5e-3)
    assert max(bound, fitted) > 0.25 * 0.02, "step: fill uses the region"
    row = row_of(outcome, episodes, config(delta=0.02))
    assert not row.out_of_region and row.kl["exact"].bound == outcome.step.accepted.kl.bound


@pytest.mark.parametrize("first", [False, True], ids=["with moments", "before any moments"])
def test_a_rejected_update_leaves_no_trace(updater: Updater, episodes, state_of, first: bool) -> None:
    """One evaluation, no stretching, a radius no step of this size can fit in."""
    playable, update = updater(step="shrink", backtracks=1, learning_rate=5e-2, delta=1e-4, inner_epochs=1)
    if not first:
        generator = torch.Generator().manual_seed(0)
        for parameter in playable.bank.parameters("left").values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        update.optimizers["left"].step()
        update.optimizers["left"].zero_grad()
        playable.bank.commit("left")
    model, moments = state_of(playable.bank.model), flat(copy.deepcopy(update.optimizers["left"].state_dict()))
    versions, rng = playable.versions(), torch.get_rng_state()
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and not outcome.accepted and outcome.step.accepted is None
    assert outcome.optimized.steps == 1 and len(outcome.step.readings) == 1
    assert outcome.step.readings[0].kl.bound > 1e-4
    assert state_of(playable.bank.model) == model
    assert flat(update.optimizers["left"].state_dict()) == moments
    assert playable.versions() == versions and outcome.version.name == versions["left"]
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_step_taken_back_twice_leaves_no_trace(updater: Updater, episodes, state_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that is far too large is probed again; the moments that are put back are not those of the first try."""
    playable, update = updater(learning_rate="auto", inner_epochs=2)
    assert update.update("left", fresh(episodes), 0).accepted
    update.dials["left"] = replace(update.dials["left"], rate=3000 * update.dials["left"].rate)
    monkeypatch.setattr(Gate, "choose", lambda self, measure, radius: update_module.StepDecision(None, [measure(1.0)]))
    model, moments = state_of(playable.bank.model), flat(copy.deepcopy(update.optimizers["left"].state_dict()))
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and outcome.optimized.probes >= 2
    assert state_of(playable.bank.model) == model and flat(update.optimizers["left"].state_dict())["state"] == moments["state"]


@pytest.mark.parametrize("rule", ["veto", "positive", "none"])
def test_a_bound_that_is_no_number_is_out_of_region(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    _, update = updater(gain=rule)
    monkeypatch.setattr("teamtr_lora.training.optimize.in_sample_bound", lambda *_: math.nan)
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and not row_of(outcome, episodes, None).out_of_region


@pytest.mark.parametrize(("rule", "gain", "tries"), [("veto", (-0.2, -2e-6), 3), ("positive", (-1e-9, 0.5), 3)])
def test_a_candidate_whose_held_out_gain_the_rule_refuses_is_rejected(
    updater: Updater, episodes, state_of, monkeypatch: pytest.MonkeyPatch, rule: str, gain: tuple[float, float], tries: int
) -> None:
    playable, update = updater(backtracks=tries, gain=rule)
    real = gate_module.read_candidate

    def no_gain(*args: Any) -> Any:
        return replace(real(*args), gain=ClusteredMean(gain[0], 0.1, gain[1]))

    monkeypatch.setattr(gate_module, "read_candidate", no_gain)
    before, moments = state_of(playable.bank.model), flat(update.optimizers["right"].state_dict())
    outcome = update.update("right", fresh(episodes), 0)
    assert outcome.decision == "rejected" and 1 <= len(outcome.step.readings) <= tries
    inside = [r for r in outcome.step.readings if r.kl.bound <= 0.05]
    assert inside, "in region, so only the gain refused it"
    assert rule == "positive" or len(inside) == 1, "under veto nothing is shortened for its gain"
    assert state_of(playable.bank.model) == before and flat(update.optimizers["right"].state_dict()) == moments


def test_a_rejected_update_can_be_repeated_to_the_bit(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected then accepted is the same as accepted at once, the penalty aside: nothing of the first try is left."""
    once, update_once = updater(beta_initial=0.0)
    twice, update_twice = updater(beta_initial=0.0)
    update_once.update("left", fresh(episodes), 0)
    real = Gate.choose
    monkeypatch.setattr(Gate, "choose", lambda self, measure, radius: update_module.StepDecision(None, [measure(1.0)]))
    assert update_twice.update("left", fresh(episodes), 0).decision == "rejected"
    monkeypatch.setattr(Gate, "choose", real)
    update_twice.update("left", fresh(episodes), 0)
    assert once.bank.version("left") == twice.bank.version("left")
    assert flat(update_once.optimizers["left"].state_dict()) == flat(update_twice.optimizers["left"].state_dict())


def test_a_step_too_long_is_shrunk_along_its_own_line(updater: Updater, episodes) -> None:
    playable, update = updater(learning_rate=3e-2, delta=0.01, inner_epochs=1, step="shrink")
    before = playable.bank.snapshot("left")
    candidates: list[dict[str, torch.Tensor]] = []
    real = playable.bank.snapshot
    playable.bank.snapshot = lambda agent: candidates.append(real(agent)) or candidates[-1]  # type: ignore[method-assign,func-returns-value]
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "shrunk" and outcome.step.accepted is not None
    alpha = outcome.step.accepted.alpha
    assert 0 < alpha < 1
    for name, now in playable.bank.tensors("left").items():
        line = before[name] + alpha * (candidates[-1][name] - before[name])
        assert torch.equal(now, line)


def test_no_reward_variance_no_update(updater: Updater, episodes, state_of, config) -> None:
    playable, update = updater()
    for episode in episodes:
        episode.rewards = [0.0, 0.1]
    before, moments, dials = state_of(playable.bank.model), flat(update.optimizers["left"].state_dict()), dict(update.dials)
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "skipped" and outcome.step.readings == [] and outcome.optimized.steps == 0
    assert outcome.advantages.zero_variance_groups == 8 and outcome.trained_tokens == 0
    assert outcome.messages == sum(m.agent == "left" for e in episodes for m in e.messages) > 0  # it spoke, in vain
    assert state_of(playable.bank.model) == before and flat(update.optimizers["left"].state_dict()) == moments
    assert update.dials == dials and outcome.version == playable.bank.version("left") and outcome.version.number == 0
    row = row_of(outcome, episodes, config())
    assert row.alpha is None and row.kl == {} and row.decision == "skipped"


def test_a_step_that_only_groups_without_a_gain_could_judge_is_skipped(updater: Updater, episodes) -> None:
    """One group of eight differs: it teaches, and none of those that judge can gain or lose."""
    for episode in episodes:
        if episode.group:
            episode.rewards = [0.0, 0.0]
    _, update = updater()
    assert update.update("left", fresh(episodes), 0).decision == "skipped"


def test_too_few_informative_groups_are_skipped(updater: Updater, episodes) -> None:
    playable, update = updater(min_informative_groups=3)
    telling = {0, 1, 2, 3}
    for episode in episodes:  # rewards vary in four groups only; both sides get some of them
        if episode.group not in telling:
            episode.rewards = [0.0, 1.0]
    assert update.update("left", fresh(episodes), 0).decision == "skipped"
    _, enough = updater(min_informative_groups=2)
    split = split_of(enough, fresh(episodes))
    fitted = {group for batch in split.fit for group in batch.group_M.tolist()}
    assert len(fitted) == 2 and fitted < telling, "groups without variance have no gradient and are not fitted to"
    assert len(judges(split) & telling) == 2 and len(judges(split) - telling) == 1, "both kinds judge"
    assert enough.update("left", fresh(episodes), 0).decision != "skipped"


def test_an_agent_that_said_nothing_is_skipped(updater: Updater, episodes) -> None:
    _, update = updater()
    for episode in episodes:
        episode.messages = [m for m in episode.messages if m.agent == "right"]
        episode.rewards = episode.rewards[-1:]
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "skipped" and outcome.messages == 0


def test_whole_groups_are_held_out_and_never_trained_on(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, update = updater(minibatches_per_epoch=2, holdout=0.5)
    trained: list[Any] = []
    read: list[Any] = []
    real_optimize, real_read = update_module.optimize, gate_module.read_candidate
    monkeypatch.setattr(
        update_module, "optimize", lambda *a, **k: trained.extend(m.batch for m in a[1]) or real_optimize(*a, **k)
    )
    monkeypatch.setattr(gate_module, "read_candidate", lambda *a: read.append(a[1]) or real_read(*a))
    outcome = update.update("left", fresh(episodes), 3)
    groups = [set(b.group_M.tolist()) for b in trained]
    assert len(groups) == 2 and not groups[0] & groups[1] and len(groups[0]) == len(groups[1]) == 2
    held = set(read[0].group_M.tolist())
    assert len(held) == 4 and not held & (groups[0] | groups[1]) and held | groups[0] | groups[1] == set(range(8))
    assert all(b is read[0] for b in read), "every alpha is read on the same messages"
    assert outcome.messages == 32 and outcome.trained_tokens == sum(b.tokens for b in trained)
    for batch in [*trained, read[0]]:
        assert all(len([g for g in batch.group_M.tolist() if g == group]) == 4 for group in set(batch.group_M.tolist()))


def test_a_group_differs_also_where_the_episode_that_is_read_does_not(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graded returns 0, 1/2, 1 and 1/2 have a mean that the first episode read may have."""
    for i, episode in enumerate(episodes):
        episode.rewards = [0.0] * (len(episode.rewards) - 1) + [(0.5, 0.0, 0.5, 1.0)[i % 4]]
    _, update = updater(judging_episodes=4, holdout=0.5)
    told: list[Any] = []
    real = gate_module.read_candidate
    monkeypatch.setattr(gate_module, "read_candidate", lambda *a: told.append((a[1], a[5])) or real(*a))
    update.update("left", fresh(episodes), 3)
    batch, mixed = told[0]
    assert not batch.advantage_M.any() and set(batch.group_M.tolist()) <= set(mixed)


def test_the_split_follows_the_seed(updater: Updater, episodes) -> None:
    _, update = updater()
    held = [tuple(sorted(judges(split_of(update, fresh(episodes), seed)))) for seed in range(12)]
    assert held == [tuple(sorted(judges(split_of(update, fresh(episodes), seed)))) for seed in range(12)]
    assert len(set(held)) > 4


def test_the_advantage_of_a_message_is_its_episodes_discounted_return(updater: Updater, episodes) -> None:
    """eq:group_adv over the discounted return, gamma = 1 - 1/H with H = 2 messages an episode."""
    _, update = updater(advantage_clip=1.2)
    assert update.discount == 0.5
    for i, episode in enumerate(episodes):
        episode.rewards = [0.3 * (i % 4), float(i % 3)]
    split = split_of(update, fresh(episodes))
    owner = {id(m): e for e in episodes for m in e.messages}
    for batch in [*split.fit, split.judging.batch]:
        for message, got in zip(batch.messages, batch.advantage_M.tolist(), strict=True):
            own = owner[id(message)]
            returns = [e.rewards[0] + 0.5 * e.rewards[1] for e in episodes if e.group == own.group]
            mean = sum(returns) / 4
            spread = math.sqrt(sum((r - mean) ** 2 for r in returns) / 4 + 1e-6)
            wanted = (own.rewards[0] + 0.5 * own.rewards[1] - mean) / spread
            assert got == pytest.approx(min(max(wanted, -1.2), 1.2), abs=1e-6)


def test_masked_truncated_messages_are_judged_and_not_learned_from(updater: Updater, episodes) -> None:
    """A step that moves them moves the team: bounds and certificates are of all that an agent says."""
    for episode in episodes:
        for index, message in enumerate(episode.messages):
            message.finish = "length" if (episode.seed + index) % 3 == 0 else "stop"
    _, mask = updater(truncated_messages="mask")
    _, score = updater(truncated_messages="score")
    outcome = mask.update("left", fresh(episodes), 0)
    kept = sum(not e.messages[0].truncated for e in episodes)
    assert 0 < kept < 32 and outcome.messages == kept
    assert score.update("left", fresh(episodes), 0).messages == 32
    split = split_of(mask, fresh(episodes))
    assert not any(m.truncated for batch in split.fit for m in batch.messages)
    judged = [e.messages[0] for e in episodes if e.group in judges(split)]
    assert sorted(map(id, split.judging.batch.messages)) == sorted(map(id, judged)) and any(m.truncated for m in judged)


def test_a_single_held_out_group_with_messages_is_rejected_not_a_crash(updater: Updater, episodes, config) -> None:
    """Silence may leave one held-out group: its bound is infinite, so the update is rejected and its row can be written."""
    _, update = updater()
    held = sorted(judges(split_of(update, fresh(episodes))))
    assert len(held) == 2
    for episode in episodes:
        if episode.group == held[0]:
            episode.messages = [message for message in episode.messages if message.agent != "left"]
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and {r.kl["exact"].bound for r in outcome.readings.values()} == {math.inf}
    row = row_of(outcome, episodes, config())
    assert UpdateRow.model_validate_json(row.model_dump_json()).decision == outcome.decision


def test_a_minibatch_without_messages_does_not_stop_the_others(updater: Updater, episodes) -> None:
    """One minibatch a fit group; masking empties one of them: the other groups still teach."""
    _, update = updater(truncated_messages="mask", minibatches_per_epoch=6)
    for e in episodes:
        e.messages[0].finish = "stop"
    fit = sorted({group for batch in split_of(update, fresh(episodes)).fit for group in batch.group_M.tolist()})
    for episode in episodes:
        if episode.group == fit[0]:
            episode.messages[0].finish = "length"
    assert update.update("left", fresh(episodes), 0).decision != "skipped"


def test_a_diverged_candidate_is_rejected_and_can_be_logged(updater: Updater, episodes, state_of, config) -> None:
    """An absurd learning rate: infinite weights, NaN readings. Nothing is kept and the run goes on."""
    playable, update = updater(learning_rate=1e30, inner_epochs=1)
    before = state_of(playable.bank.model)
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and state_of(playable.bank.model) == before
    row = row_of(outcome, episodes, config())
    assert UpdateRow.model_validate_json(row.model_dump_json()).decision == "rejected"


def test_importance_weights_are_capped_and_multiply_the_advantage(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages whose sampler claims other log-probabilities than the trainer's weigh exp(trainer - sampler), capped."""
    shift = {id(e.messages[0]): [0.0, 0.4, -0.6, 1.5][i % 4] for i, e in enumerate(episodes)}
    plain: dict[int, float] = {}
    weighted: dict[int, float] = {}

    def kept_in(store: dict[int, float]) -> Callable[..., Any]:
        real = update_module.optimize

        def run(*args: Any, **values: Any) -> Any:
            for batch in (minibatch.batch for minibatch in args[1]):
                store.update({id(m): a for m, a in zip(batch.messages, batch.advantage_M.tolist(), strict=True)})
            return real(*args, **values)

        return run

    for cap, store in ((None, plain), (2.0, weighted)):
        _, update = updater(importance_cap=cap)
        with monkeypatch.context() as patch:
            patch.setattr(update_module, "optimize", kept_in(store))
            outcome = update.update("left", fresh(episodes), 0)
        for episode in episodes if cap is None else []:
            message = episode.messages[0]
            message.sampler_logprobs = [v - shift[id(message)] / len(message.token_ids) for v in message.sampler_logprobs]
    assert plain.keys() == weighted.keys() and len(plain) == 24
    for key, advantage in plain.items():
        assert weighted[key] == pytest.approx(advantage * min(math.exp(shift[key]), 2.0), rel=1e-3, abs=1e-6)
    assert outcome.gap["max_abs"] > 0.25


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_follows_rounding_alone_is_rejected(updater: Updater, episodes, optimizer: str) -> None:
    """An agent that says the same in all episodes of a group, whatever they earn, has a gradient of rounding, which Adam would
    scale up and an automatic rate lengthen to the region's edge."""
    first: dict[int, Any] = {}
    for episode in episodes:
        episode.messages[0] = first.setdefault(episode.group, episode.messages[0])
    for seed in range(2):
        _, update = updater(learning_rate="auto", inner_epochs=4, delta=0.02, optimizer=optimizer)
        outcome = update.update("left", fresh(episodes), seed)
        assert outcome.decision == "rejected" and outcome.optimized.steps > 0, outcome.decision


def test_after_a_kl_that_is_no_number_the_next_rate_is_half(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, update = updater(learning_rate="auto", inner_epochs=1)
    update.dials["left"] = replace(update.dials["left"], rate=1e30)
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and update.dials["left"].rate == pytest.approx(0.5e30)


def test_a_sampler_further_away_than_delta_is_a_loud_warning(
    updater: Updater, episodes, caplog: pytest.LogCaptureFixture
) -> None:
    _, update = updater()
    update.update("left", fresh(episodes), 0)
    assert "away from the trainer" not in caplog.text
    for episode in episodes:
        episode.messages[0].sampler_logprobs = [v - 0.5 for v in episode.messages[0].sampler_logprobs]
    update.update("left", fresh(episodes), 0)
    assert "away from the trainer" in caplog.text and "left" in caplog.text


def test_messages_of_an_earlier_policy_say_nothing_about_the_sampler(
    updater: Updater, episodes, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier rollout's log-probabilities are another policy's: no gap, and no second weight for what changed since."""
    older = [replace(e, messages=[replace(m, version="v0007-older") for m in e.messages]) for e in episodes]
    for episode in older:
        episode.messages[0].sampler_logprobs = [v - 0.5 for v in episode.messages[0].sampler_logprobs]
    changed = {}
    for cap in (None, 2.0):
        _, update = updater(importance_cap=cap)
        outcome = update.update("left", Material(newest=PlayedEpisodes(episodes), earlier=[PlayedEpisodes(older)]), 0)
        changed[cap] = outcome.version.content_hash
        assert outcome.gap["max_abs"] < 1e-3 and "away from the trainer" not in caplog.text
    assert changed[None] == changed[2.0], "the newest rollout's own weights are 1"


def test_the_gate_uses_the_estimator_the_recipe_names(updater: Updater, episodes) -> None:
    for estimator in ("exact", "k1"):
        _, update = updater(estimator=estimator)
        outcome = update.update("left", fresh(episodes), 0)
        for reading in outcome.step.readings:
            full = outcome.readings[reading.alpha]
            assert isinstance(reading.kl, ClusteredMean) and reading.kl == full.kl[estimator]
            assert set(full.kl) == {"exact", "k3", "k1"}, "all are logged, one gates"


def test_updates_are_reproducible(updater: Updater, episodes) -> None:
    results = []
    for _ in range(2):
        playable, update = updater()
        update.update("right", fresh(copy.deepcopy(episodes)), 5)
        results.append((playable.bank.version("right"), flat(update.optimizers["right"].state_dict()), update.dials))
    assert results[0] == results[1]


def test_gradient_checkpointing_changes_memory_and_not_the_result(updater: Updater, episodes) -> None:
    """The recipe promises `gradient_checkpointing`: every decoder layer runs again in the backward pass."""
    counts, versions = [], []
    for switched in (False, True):
        playable, update = updater(gradient_checkpointing=switched, step="shrink", inner_epochs=1)
        runs: list[int] = []
        norm = next(m for n, m in playable.bank.model.named_modules() if n.endswith("layers.1.post_attention_layernorm"))
        norm.register_forward_hook(lambda *_, runs=runs: runs.append(1) if torch.is_grad_enabled() else None)
        assert update.update("left", fresh(episodes), 0).accepted
        counts.append(len(runs))
        versions.append(playable.bank.snapshot("left"))
    assert counts[1] == 2 * counts[0]
    assert all(torch.allclose(versions[0][n], versions[1][n], atol=1e-4) for n in versions[0])


def test_an_interrupted_update_leaves_no_trace(updater: Updater, episodes, state_of, monkeypatch: pytest.MonkeyPatch) -> None:
    playable, update = updater()
    before, moments = state_of(playable.bank.model), flat(update.optimizers["left"].state_dict())

    def interrupt(*_: Any) -> None:
        assert state_of(playable.bank.model) != before, "the interrupt must come after a step to prove anything"
        raise KeyboardInterrupt

    monkeypatch.setattr(update, "_decide", interrupt)
    with pytest.raises(KeyboardInterrupt):
        update.update("left", fresh(episodes), 0)
    assert state_of(playable.bank.model) == before
    assert flat(update.optimizers["left"].state_dict()) == moments


def test_a_rejected_step_has_taught_nothing_about_the_slope(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured for a step that was not taken is no gain of the agent: the slope is that of no gain."""
    monkeypatch.setattr(Gate, "choose", lambda self, measure, radius: update_module.StepDecision(None, [measure(1.0)]))
    _, update = updater()
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and outcome.shown is not None and outcome.shown.gain.mean > 0
    assert [(own.slope, own.radius) for own in update.dials.values()] == [(0.0, 0.05), (None, 0.05)]
    monkeypatch.undo()
    accepted = update.update("left", fresh(episodes), 0)
    assert (reading := accepted.accepted_reading) is not None
    assert update.dials["left"].slope == pytest.approx(0.5 * reading.gain.mean / math.sqrt(reading.kl["exact"].mean))


def test_agents_learn_from_their_own_credit_where_the_task_gives_it(updater: Updater, episodes) -> None:
    """Opposite credits, opposite advantages; the team's return, and what is certified about it, stay the team's."""
    _, update = updater()
    plain = episode_advantages(episodes, "left", update._config.training, update.discount).clipped_E
    assert torch.equal(plain, episode_advantages(episodes, "right", update._config.training, update.discount).clipped_E)
    for i, episode in enumerate(episodes):
        episode.credit = {"left": [float(i % 4), 0.0], "right": [-float(i % 4), 0.0]}
    left = update.update("left", fresh(copy.deepcopy(episodes)), 0)
    right = update.update("right", fresh(copy.deepcopy(episodes)), 0)
    assert torch.equal(left.advantages.clipped_E, -right.advantages.clipped_E) and left.advantages.clipped_E.abs().max() > 1
    assert left.judging is not None and left.judging.batch.advantage_M.any() and left.accepted
    terms = [
        certificate_terms(left.accepted_reading, left.judging, played, config=update._config, gamma=update.discount)
        for played in (episodes, [replace(episode, credit={}) for episode in episodes])
    ]
    assert terms[0] == terms[1], "the certificate is about the team's return"
    assert row_of(left, episodes, None).reward_mean == sum(e.reward for e in episodes) / len(episodes)


def test_a_stretch_that_went_too_far_leaves_the_step_that_fitted(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last length that is tried is not the one that is kept: the adapter, the version and the weights are of the kept one."""
    playable, update = updater(learning_rate=2e-4, inner_epochs=1, delta=1.0)
    lengths: list[float] = []
    real = playable.bank.interpolate
    playable.bank.interpolate = lambda *a: lengths.append(a[-1]) or real(*a)  # type: ignore[method-assign,func-returns-value]
    read = gate_module.read_candidate

    def jumps(*args: Any) -> Any:
        reading = read(*args)
        return reading if lengths[-1] <= 1 else replace(reading, kl=dict.fromkeys(reading.kl, ClusteredMean(9.0, 0.0, 9.0)))

    monkeypatch.setattr(gate_module, "read_candidate", jumps)
    before = playable.bank.snapshot("left")
    candidates: list[dict[str, torch.Tensor]] = []
    snapshot = playable.bank.snapshot
    playable.bank.snapshot = lambda agent: candidates.append(snapshot(agent)) or candidates[-1]  # type: ignore[method-assign,func-returns-value]
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.step.accepted is not None and outcome.step.accepted.alpha == 1.0
    assert [r.alpha for r in outcome.step.readings][:2] == [1.0, 1.5], "longer ones were tried after it"
    for name, now in playable.bank.tensors("left").items():
        assert torch.equal(now, candidates[-1][name])
    assert any(not torch.equal(now, before[name]) for name, now in playable.bank.tensors("left").items())


@pytest.mark.parametrize("rule", ["veto", "positive", "none"])
def test_a_step_that_does_not_improve_in_sample_is_rejected_under_veto(
    updater: Updater, episodes, state_of, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Uphill turned downhill in-sample only: held-out episodes do not see it, so nothing but the in-sample gain can refuse."""
    playable, update = updater(gain=rule)
    real = update_module.measure_in_sample

    def worse(learner: Any, minibatches: Any, report: Any, **how: Any) -> Any:
        seen = real(learner, minibatches, report, **how)
        report.gain = -1e-12
        return seen

    monkeypatch.setattr(update_module, "measure_in_sample", worse)
    before, moments = state_of(playable.bank.model), flat(copy.deepcopy(update.optimizers["left"].state_dict()))
    outcome = update.update("left", fresh(episodes), 0)
    assert (outcome.decision == "rejected") is (rule == "veto")
    if rule == "veto":
        assert outcome.step.readings and any(r.in_region(0.05) for r in outcome.step.readings)
        assert state_of(playable.bank.model) == before and flat(update.optimizers["left"].state_dict()) == moments
        assert outcome.version.number == 0 and outcome.log_ratio_E is None and outcome.accepted_reading is None
        assert update.dials["left"].slope == 0.0 and update.dials["left"].radius == 0.05


def judged_in_sample(monkeypatch: pytest.MonkeyPatch, bound_of: Callable[[int], float]) -> list[int]:
    """Replaces the KL bound on the messages that a step was fitted to; gives what is counted: the passes over them."""
    real, passes = update_module.measure_in_sample, []

    def measured(learner: Any, minibatches: Any, report: Any, **how: Any) -> Any:
        seen = real(learner, minibatches, report, **how)
        passes.append(len(passes))
        report.kl_bound = bound_of(passes[-1])
        return seen

    monkeypatch.setattr(update_module, "measure_in_sample", measured)
    return passes


def test_a_step_too_long_where_it_was_fitted_is_shortened_and_measured_again(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out messages allow the whole step, those it was fitted to say four times too much KL: half of it is kept, and it is
    that half which was read on held-out messages."""
    playable, update = updater(delta=1.0, learning_rate=2e-4, inner_epochs=1, step="shrink")
    judged_in_sample(monkeypatch, lambda count: 4.0 if count == 0 else 0.7)
    before, after = playable.bank.snapshot("left"), {}
    snapshot = playable.bank.snapshot
    playable.bank.snapshot = lambda agent: after.update(snapshot(agent)) or snapshot(agent)  # type: ignore[method-assign]
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "shrunk" and [r.alpha for r in outcome.step.readings] == [1.0, pytest.approx(0.97 / 2)]
    assert [r.fitted_bound for r in outcome.step.readings] == [4.0, 0.7] and outcome.step.accepted is outcome.step.readings[1]
    alpha, kept = outcome.step.readings[1].alpha, playable.bank.tensors("left")
    for name, now in kept.items():
        assert torch.allclose(now, before[name] + alpha * (after[name] - before[name]), atol=1e-7)
    assert (
        outcome.accepted_reading is outcome.readings[alpha]
        and outcome.accepted_reading.message_sum_kl < 0.4 * outcome.readings[1.0].message_sum_kl
    )
    row = row_of(outcome, episodes, None)
    assert row.kl_bound_in_sample == 0.7 and not row.out_of_region and row.alphas_tried == [1.0, alpha]
    assert row.reason == "the whole step was out of region: KL bound 4.0000 above 1 on the episodes it was fitted to"
    longest = replace(outcome.step, readings=[replace(outcome.step.readings[0], alpha=1.31), outcome.step.readings[1]])
    assert row_of(replace(outcome, step=longest), episodes, None).reason == (
        "a longer step was out of region: KL bound 4.0000 above 1 on the episodes it was fitted to at x1.31"
    )
    assert {"gate", "in_sample"} <= outcome.seconds.keys()


def test_a_step_that_never_fits_where_it_was_fitted_is_refused_and_leaves_no_trace(
    updater: Updater, episodes, state_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    playable, update = updater(delta=0.5)
    passes = judged_in_sample(monkeypatch, lambda count: 9.0)
    before, moments = state_of(playable.bank.model), flat(copy.deepcopy(update.optimizers["left"].state_dict()))
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and len(passes) == update_module.FITTED_TRIES
    assert outcome.step.refused is outcome.step.readings[-1] and outcome.log_ratio_E is None
    assert state_of(playable.bank.model) == before and flat(update.optimizers["left"].state_dict()) == moments
    assert "9.0000 above 0.5 on the episodes it was fitted to" in row_of(outcome, episodes, None).reason
    _, automatic = updater(delta=0.5, learning_rate="auto")
    judged_in_sample(monkeypatch, lambda count: 9.0)
    refused = automatic.update("left", fresh(episodes), 0)
    assert refused.step.refused and automatic.dials["left"].rate == pytest.approx(refused.optimized.learning_rate / 2)


@pytest.mark.parametrize("what", ["kl", "gain"])
def test_the_shorter_length_is_judged_on_held_out_messages_too(
    updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whether it leaves the region there, or is shown to harm: such a length is not accepted."""
    playable, update = updater(delta=1.0, learning_rate=2e-4, inner_epochs=1, step="shrink")
    judged_in_sample(monkeypatch, lambda count: 4.0 if count == 0 else 0.7)
    read, readings = gate_module.read_candidate, []

    def second_is_bad(*args: Any) -> Any:
        readings.append(read(*args))
        bad = {"kl": dict.fromkeys(readings[0].kl, ClusteredMean(9.0, 0.0, 9.0)), "gain": ClusteredMean(-2.0, 0.1, -1.0)}
        return readings[-1] if len(readings) == 1 else replace(readings[-1], **{what: bad[what]})

    monkeypatch.setattr(gate_module, "read_candidate", second_is_bad)
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "rejected" and len(readings) == 2 and outcome.version.number == 0


def test_the_next_learning_rate_goes_by_the_larger_bound(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    for bound in (1e-9, 0.999):
        _, update = updater(delta=1.0, learning_rate="auto")
        with monkeypatch.context() as patched:
            judged_in_sample(patched, lambda count, bound=bound: bound)
            outcome = update.update("left", fresh(episodes), 0)
        assert outcome.accepted and outcome.step.accepted is not None and outcome.step.accepted.kl.bound < 0.9
        rates.append(update.dials["left"].rate)
    assert rates[1] < rates[0]


def test_without_a_gate_no_bound_shortens_a_step(updater: Updater, episodes, monkeypatch: pytest.MonkeyPatch) -> None:
    _, update = updater(kind="none", delta=1.0, learning_rate=2e-4)
    passes = judged_in_sample(monkeypatch, lambda count: 9.0)
    outcome = update.update("left", fresh(episodes), 0)
    row = row_of(outcome, episodes, None)
    assert outcome.decision == "accepted" and len(passes) == 1
    assert row.out_of_region and row.kl["exact"].bound < 1.0, "by the bound where it was fitted alone"


def test_the_in_sample_gain_is_of_the_step_that_is_kept(updater: Updater, episodes, double_logp) -> None:
    """min(w A, clip(w) A) - A over the messages of the gradient, recomputed in float64 from the two adapters."""
    playable, update = updater(learning_rate=3e-2, delta=0.02, inner_epochs=1, minibatches_per_epoch=2)
    _, logp_before = double_logp(playable, "left")
    split = split_of(update, fresh(episodes))
    outcome = update.update("left", fresh(episodes), 0)
    assert outcome.decision == "shrunk"
    _, logp_after = double_logp(playable, "left")
    gains, kls = [], []
    for batch in split.fit:
        terms = []
        for message, advantage in zip(batch.messages, batch.advantage_M.tolist(), strict=True):
            with torch.no_grad():
                p, q = logp_before(message), logp_after(message)
            tokens = (torch.arange(len(message.token_ids)), message.token_ids)
            w = math.exp(float((q[tokens] - p[tokens]).sum()))
            terms.append((w - 1) * advantage)
            kls.append(float((p.exp() * (p - q)).sum()))
        gains.append(sum(terms) / len(terms))
    assert len(gains) == 2 and outcome.optimized.gain == pytest.approx(sum(gains) / 2, rel=1e-3)
    assert outcome.optimized.kl == pytest.approx(sum(kls) / len(kls), rel=1e-3)
    row = row_of(outcome, episodes, None)
    assert row.surrogate_gain_in_sample == outcome.optimized.gain and row.kl_in_sample == outcome.optimized.kl
    assert row.surrogate_gain_standard_error == outcome.accepted_reading.gain.standard_error > 0


@pytest.mark.parametrize("kind", ["none", "penalty_fixed", "penalty_adaptive"])
def test_kinds_without_a_gate_keep_the_initial_learning_rate(updater: Updater, episodes, kind: str) -> None:
    _, update = updater(kind=kind, learning_rate="auto", initial_learning_rate=7e-4)
    for seed in range(2):
        outcome = update.update("left", fresh(episodes), seed)
        assert outcome.optimized.learning_rate == 7e-4 and outcome.optimized.probes == 0 and outcome.optimized.steps == 2
    assert {own.rate for own in update.dials.values()} == {None}


def test_each_agent_has_a_learning_rate_of_its_own_that_follows_the_gate(updater: Updater, episodes, monkeypatch) -> None:
    """Probed once; then the gate's reading of the whole step says how much longer the next one may be, twice at most."""
    _, update = updater(learning_rate="auto", initial_learning_rate=0.3, holdout=0.5)
    first = update.update("left", fresh(episodes), 0)
    assert first.optimized.probes > 0 and first.optimized.learning_rate < 0.1 and update.dials["right"].rate is None
    kept = first.step.accepted
    assert kept is not None
    factor = kept.alpha * math.sqrt(0.05 / kept.kl.bound) * first.optimized.steps / 2
    assert update.dials["left"].rate == pytest.approx(first.optimized.learning_rate * min(max(factor, 0.5), 2.0))
    expected, rates = update.dials["left"].rate, []
    monkeypatch.setattr("teamtr_lora.training.optimize._step", lambda *given: rates.append(given[-1]) or _step(*given))
    second = update.update("left", fresh(episodes), 1)
    assert rates[0] == expected and second.optimized.learning_rate == statistics.fmean(rates[second.optimized.probes :])
    assert row_of(second, episodes, None).learning_rate == second.optimized.learning_rate
    _, fixed = updater(learning_rate=3e-3)
    assert fixed.update("left", fresh(episodes), 0).optimized.learning_rate == 3e-3 and fixed.dials["left"].rate is None
