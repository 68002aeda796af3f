"""The inner loop: it climbs, it accumulates, it stops at the boundary, and the penalty holds it back."""

import copy
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from teamtr_lora.algorithm.clustered import clustered_mean
from teamtr_lora.algorithm.fixed_point import unit_exponent
from teamtr_lora.algorithm.step_size import MOST_PROBES
from teamtr_lora.algorithm.surrogate import surrogate_terms
from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.recipe import TrainingSection
from teamtr_lora.team import agent_sequences
from teamtr_lora.training import optimize as optimize_module
from teamtr_lora.training.batches import message_batch
from teamtr_lora.training.optimize import (
    InSample,
    Learner,
    Minibatch,
    OptimizeReport,
    _step,
    in_sample_bound,
    measure_in_sample,
    optimize,
)
from teamtr_lora.training.optimizers import build_optimizer, flatten_state, restore_state
from teamtr_lora.training.scoring import Scorer, keep_current

LEARNER = SimpleNamespace(
    config=SimpleNamespace(trust_region=SimpleNamespace(confidence=0.95)),
    scorer=SimpleNamespace(ranks=SimpleNamespace(broadcast=lambda value: value), takes_segments=True),
)


def in_sample(kl: float, group: int = 0, **means: float) -> InSample:
    """Of a minibatch of one message, which weighs more the higher its group's number is."""
    one = torch.ones(1)
    return InSample(
        kl=kl, log_ratio_M=torch.zeros(1), kl_M=kl * one, group_M=group * one.long(), weight_M=(1 + group) * one, **means
    )


class Climbed(NamedTuple):
    report: OptimizeReport
    adapter: dict[str, torch.Tensor]
    gain: float
    reached: float  # in-sample KL after the last step
    moments: dict[str, Any]


@pytest.fixture
def climb(make_team, episodes, config, accelerator):
    """Optimizes "left" on some of the episodes; gives the report, the adapter afterwards and the objective measured anew."""

    def run(
        *,
        beta: float = 0.0,
        parts: int = 1,
        optimizer=None,
        count: int = 12,
        probe: bool = False,
        faked=False,
        scaler=None,
        **values,
    ):
        playable, settings = make_team(), config(**values)
        scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=settings.training.head_chunk_tokens)
        chosen = episodes[:count]

        def batch_of(some):
            advantages = [(-1.0, 1.0)[e.messages[0].token_ids[0] % 2] for e in some]
            return message_batch(
                agent_sequences(some, "left"),
                advantages,
                tokens_per_microbatch=settings.training.tokens_per_microbatch,
                device=scorer.device,
            )

        playable.bank.activate("left")
        batches = [batch_of(chosen[i::parts]) for i in range(parts)]
        pairs = [Minibatch(batch, keep_current(scorer, batch)) for batch in batches]
        optimizer = (optimizer or torch.optim.SGD)(
            list(playable.bank.parameters("left").values()), lr=settings.training.starting_rate
        )
        start, moments = playable.bank.snapshot("left"), copy.deepcopy(optimizer.state_dict())
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        with playable.bank.training("left") as parameters:
            learner = Learner(
                scorer=scorer,
                optimizer=optimizer,
                parameters=parameters,
                scaler=scaler,
                config=settings,
                region=Variants.of(settings).region,
                start_again=lambda: (playable.bank.restore("left", start), optimizer.load_state_dict(moments)),
            )
            rate = settings.training.starting_rate
            report = optimize(learner, pairs, radius=settings.trust_region.delta, beta=beta, rate=rate, probe=probe)
            reached = measure_in_sample(learner, pairs, replace(report))[0] if parts == 1 and not faked else None
        whole = batch_of(chosen)
        after = torch.cat(keep_current(scorer, whole).logp)
        message_N = torch.cat([p.message_N for p in whole.microbatches])
        start = torch.cat([p.sampler_logp_N for p in whole.microbatches])
        terms = surrogate_terms(after, start, message_N, whole.advantage_M, clip=0.2)
        gain = float(terms.objective_M.mean() - whole.advantage_M.mean())
        if reached is not None:  # a step is judged without clipping
            plain_M = torch.expm1(terms.log_ratio_M.double()) * whole.advantage_M
            assert reached.gain == pytest.approx(float(plain_M.mean()), rel=1e-3, abs=1e-6)
        kl = math.nan if reached is None else reached.kl
        return Climbed(report, playable.bank.snapshot("left"), gain, kl, optimizer.state_dict())

    return run


def test_it_climbs(climb) -> None:
    report, _, gain, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=5e-4, inner_epochs=4, delta=5.0)
    assert report.steps == 4 and not report.stopped_early and report.gradient_norm > 0
    assert gain > 0.02 and report.kl > 0


def test_micro_batches_add_up_to_one_gradient(climb) -> None:
    """One plain gradient step: whatever the micro-batches and chunks, the same new adapter."""
    whole = climb(inner_epochs=1, learning_rate=1.0, max_grad_norm=1e9, tokens_per_microbatch=10**6, head_chunk_tokens=10**4)
    for budget, chunk in ((1, 3), (300, 16)):
        split = climb(inner_epochs=1, learning_rate=1.0, max_grad_norm=1e9, tokens_per_microbatch=budget, head_chunk_tokens=chunk)
        assert split[0].gradient_norm == pytest.approx(whole[0].gradient_norm, rel=1e-4)
        assert all(torch.allclose(split[1][n], whole[1][n], atol=1e-5) for n in whole[1])


def test_the_signal_is_what_the_gradients_of_single_messages_agree_on(climb) -> None:
    """With a message a micro-batch: the mean product of two different ones over the square of all together."""

    def adapter(count: int, rate: float) -> torch.Tensor:
        step = {"inner_epochs": 1, "learning_rate": rate, "max_grad_norm": 1e9, "tokens_per_microbatch": 1}
        return torch.cat([t.double().flatten() for t in climb(count=count, **step).adapter.values()])

    count, start = 5, adapter(1, 1e-12)
    sums = [n * (adapter(n, 1.0) - start) for n in range(1, count + 1)]
    parts = torch.stack([sums[0], *(after - before for before, after in pairwise(sums))]) / count
    products = parts @ parts.T
    agreed = (products.sum() - products.trace()) / (1 - 1 / count)
    found = climb(count=count, inner_epochs=2, learning_rate=1e-12, tokens_per_microbatch=1, max_grad_norm=1e-3).report
    assert found.gradient_signal == pytest.approx(float(agreed / products.sum()), rel=1e-3)
    assert abs(found.gradient_signal) < 0.99 and climb(count=count, tokens_per_microbatch=10**6).report.gradient_signal is None


def test_gradients_are_clipped_to_the_recipes_norm(climb) -> None:
    _, start, *_ = climb(inner_epochs=1, learning_rate=1e-12, max_grad_norm=1e9)
    report, after, *_ = climb(inner_epochs=1, learning_rate=1.0, max_grad_norm=0.01)
    moved = math.sqrt(sum(float((after[n] - start[n]).square().sum()) for n in start))
    assert report.gradient_norm > 0.01 and moved == pytest.approx(0.01, rel=1e-2)


def test_it_stops_where_the_in_sample_kl_reaches_delta(climb) -> None:
    report, stopped, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=1e-2, inner_epochs=30, delta=0.02)
    assert report.stopped_early and 1 <= report.steps < 30 and report.kl >= 0.02
    exact, same, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=1e-2, inner_epochs=report.steps, delta=0.02)
    assert not exact.stopped_early and all(torch.equal(stopped[n], same[n]) for n in same), (
        "the gradient from outside is not used"
    )


def test_a_report_is_of_the_last_pass_and_counts_its_steps(climb) -> None:
    """A pass measures the steps before it; the step after the last pass is the gate's to measure."""
    one = climb(optimizer=torch.optim.AdamW, learning_rate=5e-4, inner_epochs=1, delta=5.0, beta=1.0).report
    assert one.steps == one.planned == 1 and one.kl == 0.0 and one.beta == 1.0, "nothing has been measured yet"
    two = climb(optimizer=torch.optim.AdamW, learning_rate=5e-4, inner_epochs=2, delta=5.0, beta=1.0).report
    single = climb(optimizer=torch.optim.AdamW, learning_rate=5e-4, inner_epochs=1, delta=5.0, beta=1.0)
    assert two.steps == two.planned == 2 and two.kl == pytest.approx(single.reached, rel=1e-5) and two.beta == 0.5


def test_minibatches_are_optimizer_steps(climb) -> None:
    report, *_ = climb(parts=3, inner_epochs=2, learning_rate=1e-4, delta=5.0)
    assert report.steps == 6


def test_the_report_of_the_kept_step_is_of_all_minibatches(climb, monkeypatch) -> None:
    shares = [{"kl": 0.1, "gain": 1.0}, {"kl": 0.2, "gain": 2.0, "clip_rate": 0.3}, {"kl": 0.6, "gain": 6.0, "clip_rate": 0.6}]
    passes = iter([in_sample(**share, group=group) for group, share in enumerate(shares)])
    monkeypatch.setattr("teamtr_lora.training.optimize.accumulate", lambda *_: next(passes))
    report = OptimizeReport(learning_rate=1.0, beta=1.0)
    assert len(measure_in_sample(LEARNER, [None] * 3, report)) == 3
    assert (report.kl, report.gain, report.clip_rate) == pytest.approx((0.3, 3.0, 0.3))
    together = clustered_mean(torch.tensor([0.1, 0.2, 0.6]), torch.arange(3), 0.95, torch.tensor([1.0, 2.0, 3.0]))
    assert report.kl_bound == pytest.approx(together.bound) and together.bound > 0.6, "of all groups, not of each minibatch's"


def test_every_nth_micro_batch_is_measured_where_they_are_in_no_order_and_many(monkeypatch) -> None:
    asked = []
    seen = in_sample(kl=0.1, gain=1.0)
    monkeypatch.setattr("teamtr_lora.training.optimize.accumulate", lambda *given: asked.append(given[3]) or seen)
    batches = [SimpleNamespace(batch=SimpleNamespace(messages=[0] * count, microbatches=[0] * 9)) for count in (64, 256)]
    for whole in (True, False):
        measure_in_sample(LEARNER, batches, OptimizeReport(learning_rate=1.0, beta=1.0), whole=whole)
    assert asked == [None, None, range(9), range(0, 9, 4)]
    monkeypatch.setattr(LEARNER.scorer, "takes_segments", False)
    measure_in_sample(LEARNER, batches, OptimizeReport(learning_rate=1.0, beta=1.0), whole=False)
    assert asked[4:] == [None, None], "padded rows are ordered by length"


def test_the_penalty_holds_the_step_back_and_adapts(climb) -> None:
    free, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=3e-3, inner_epochs=5, delta=5.0, beta=0.0)
    held, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=3e-3, inner_epochs=5, delta=5.0, beta=1000.0)
    assert held.kl < 0.7 * free.kl
    assert free.beta == 0.0
    assert held.beta == 1000.0 / 2**4, "each measurement after a step was far inside delta"
    outside, *_ = climb(optimizer=torch.optim.AdamW, learning_rate=5e-2, inner_epochs=5, delta=1e-4, beta=1.0)
    assert outside.stopped_early and outside.steps == 1 and outside.beta == 2.0


def test_message_kl_sums_or_averages_over_tokens() -> None:
    kl_N, message_N = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 2, 0, 0])
    assert message_kl(kl_N, message_N, 3, "message_sum").tolist() == [13.0, 0.0, 2.0]
    assert message_kl(kl_N, message_N, 3, "token_mean").tolist() == pytest.approx([13 / 3, 0.0, 2.0])


def test_weight_decay_and_rate_come_from_the_recipe() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(TrainingSection(learning_rate=0.125, weight_decay=0.5), [parameter])
    assert isinstance(optimizer, torch.optim.AdamW)
    parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.allclose(parameter, torch.full((3,), 1 - 0.125 * 0.5))


def test_optimizer_state_comes_back_bit_for_bit_and_goes_on_alike() -> None:
    def fresh() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)), torch.nn.Parameter(torch.ones(4))]
        return parameters, build_optimizer(TrainingSection(learning_rate=0.01), parameters)

    def step(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    parameters, optimizer = fresh()
    for seed in range(3):
        step(parameters, optimizer, seed)
    tensors, scalars = flatten_state(optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    others, other = fresh()
    for mine, theirs in zip(others, parameters, strict=True):
        mine.data.copy_(theirs)
    restore_state(other, tensors, scalars)
    for seed in range(3, 6):
        step(parameters, optimizer, seed)
        step(others, other, seed)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert {n: t.tolist() for n, t in flatten_state(other)[0].items()} == {
        n: t.tolist() for n, t in flatten_state(optimizer)[0].items()
    }


def test_an_optimizer_without_moments_yet_restores_to_one() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = build_optimizer(TrainingSection(), parameters)
    assert flatten_state(optimizer) == ({}, {})
    restore_state(optimizer, {}, {})
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(("kl", "stops"), [(0.0999, False), (0.1, True), (0.15, True)])
def test_it_stops_at_delta_and_not_later(climb, monkeypatch, kl: float, stops: bool) -> None:
    passes = iter([in_sample(kl=value) for value in (0.0, kl, kl, kl)])
    monkeypatch.setattr("teamtr_lora.training.optimize.accumulate", lambda *_: next(passes))
    report = climb(inner_epochs=3, delta=0.1, faked=True).report
    assert report.stopped_early is stops and report.steps == (1 if stops else 3)


AUTO = {"learning_rate": "auto", "optimizer": torch.optim.AdamW, "probe": True}


@pytest.mark.parametrize("kl", [0.04, 0.11])
def test_a_pass_that_only_measures_the_last_step_leaves_the_penalty_to_the_gate(climb, monkeypatch, kl: float) -> None:
    """Else it would be adapted twice, by this pass and by the gate. The last planned step was taken, so nothing was stopped."""
    passes = iter([in_sample(kl=value, kl_bound=value, gain=1.0) for value in (0.0, kl)])
    monkeypatch.setattr("teamtr_lora.training.optimize.accumulate", lambda *_: next(passes))
    report = climb(inner_epochs=1, delta=0.1, beta=1.0, faked=True, **AUTO).report
    assert (report.steps, report.planned, report.probes, report.kl) == (1, 1, 0, kl)
    assert report.beta == 1.0 and not report.stopped_early


@pytest.fixture
def rates(monkeypatch) -> list[float]:
    """The learning rate of every optimizer step, also of those that are taken back."""
    found: list[float] = []

    def step(*given: Any) -> Any:
        found.append(given[-1])
        return _step(*given)

    monkeypatch.setattr("teamtr_lora.training.optimize._step", step)
    return found


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("initial", [1e-6, 3e-5, 1e-3, 3e-2, 0.5])
def test_probing_ends_near_the_edge_wherever_it_starts(climb, rates: list[float], initial: float, epochs: int) -> None:
    """Initial rates half a million times apart: the KL after all steps is within a factor of the radius, and mostly inside."""
    delta = 0.02
    got = climb(**AUTO, initial_learning_rate=initial, inner_epochs=epochs, delta=delta)
    assert 1 <= got.report.steps <= epochs and got.report.planned == epochs
    assert got.report.probes <= MOST_PROBES and (got.report.probes > 0) is (rates[got.report.probes] != initial)
    assert delta / 6 < got.reached < 3 * delta, f"{got.reached} after {got.report.steps} steps of {got.report.learning_rate}"
    assert got.gain > 0


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_probe_leaves_no_trace(climb, rates: list[float], epochs: int) -> None:
    """What probing found, taken as the rate to start with: the same adapter and the same moments, bit for bit."""
    probed = climb(**AUTO, initial_learning_rate=0.1, inner_epochs=epochs, delta=0.02, beta=0.3)
    assert probed.report.probes > 0
    kept = rates[probed.report.probes :]
    plain = climb(**(AUTO | {"probe": False}), initial_learning_rate=kept[0], inner_epochs=epochs, delta=0.02, beta=0.3)
    assert plain.report.probes == 0 and rates[probed.report.probes + len(kept) :] == kept
    assert all(torch.equal(probed.adapter[n], plain.adapter[n]) for n in plain.adapter)
    for one, other in zip(probed.moments["state"].values(), plain.moments["state"].values(), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    assert probed.report.gradient_norm == plain.report.gradient_norm


def test_steps_after_the_first_go_as_far_as_it_left_to_go(climb, rates: list[float]) -> None:
    """An agent's rate from its last update is where an update begins; its own readings say how it goes on."""
    known = {"learning_rate": "auto", "optimizer": torch.optim.AdamW, "inner_epochs": 3, "delta": 0.02}
    short = climb(**known, initial_learning_rate=1e-5).report
    assert short.probes == 0 and short.steps == 3 and rates == pytest.approx([1e-5, 4e-5, 1e-4]), "each at most 4 times as long"
    assert short.learning_rate == pytest.approx(5e-5), "the mean"
    rates.clear()
    found = climb(**known, initial_learning_rate=1e-3)
    assert found.report.probes == 0 and len(set(rates)) == 3 and 0.3 * 0.02 < found.reached < 1.5 * 0.02
    rates.clear()
    wild = climb(**known, initial_learning_rate=0.5)
    assert wild.report.probes >= 1 and wild.report.learning_rate < 0.1 and wild.reached < 3 * 0.02
    fixed = climb(**(known | {"learning_rate": 0.5})).report
    assert fixed.probes == 0 and fixed.stopped_early and fixed.steps == 1 and fixed.learning_rate == 0.5


@pytest.mark.parametrize(("bound", "steps", "probes"), [(0.079, 3, 0), (0.081, 1, 0), (0.319, 1, 0), (0.321, 0, 1)])
def test_steps_end_where_the_in_sample_bound_reaches_the_aim(climb, monkeypatch, bound, steps, probes) -> None:
    """At 0.8 of the radius, 0.1: nothing is left to go. A first step twice as far as that, four times the KL, is taken back."""
    bounds = iter([0.0, bound] + [0.01] * 9)
    monkeypatch.setattr("teamtr_lora.training.optimize.in_sample_bound", lambda *_: next(bounds))
    report = climb(learning_rate="auto", initial_learning_rate=1e-4, inner_epochs=3, delta=0.1).report
    assert report.probes == probes and report.steps == (steps or 3) and report.stopped_early is (steps == 1)


@pytest.mark.parametrize(("kl", "gain", "taken_back"), [(0.1, -0.01, True), (0.1, 0.01, False), (1e-9, -1e-12, False)])
def test_a_step_that_harms_its_own_episodes_is_made_shorter(climb, rates, monkeypatch, kl, gain, taken_back) -> None:
    """A wide region allows steps beyond the best of the surrogate. One is taken back, and the steps after it do not go back to
    filling the region. A step that has hardly moved says nothing: rounding decides the sign of its gain."""
    measured = iter([(0.0, 0.0), (kl, gain), (0.0, 0.0), (0.01, 0.01)] if taken_back else [(0.0, 0.0), (kl, gain)])

    def passed(*_: Any) -> InSample:
        kl, gain = next(measured, (0.02, 0.01))
        return in_sample(kl=kl, kl_bound=kl, gain=gain)

    monkeypatch.setattr("teamtr_lora.training.optimize.accumulate", passed)
    report = climb(learning_rate="auto", initial_learning_rate=0.2, inner_epochs=3, delta=0.4, faked=True).report
    assert report.overshot is taken_back and report.probes == taken_back and report.steps == 3
    assert (rates == [0.2, 0.05, 0.05, 0.05]) if taken_back else max(rates) > 0.2


def test_the_bound_in_sample_is_that_of_the_groups() -> None:
    kl_M, group_M, weight_M = torch.tensor([0.1, 0.2, 0.6, 0.3]), torch.tensor([3, 3, 7, 8]), torch.tensor([1.0, 2.0, 1.0, 1.0])
    assert in_sample_bound(kl_M, group_M, weight_M, 0.9) == clustered_mean(kl_M, group_M, 0.9, weight_M).bound > 0.28
    assert in_sample_bound(kl_M, torch.zeros(4), weight_M, 0.9) == pytest.approx(1.4 / 5), (
        "one group has no bound, so the mean speaks"
    )


class Overflowing(torch.amp.GradScaler):
    """Some of its gradients, from number `first` on, are infinite, as those of half precision can be."""

    def __init__(self, times: int, first: int = 1) -> None:
        super().__init__("cpu", init_scale=1.0)
        self.times, self.before = times, first - 1

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.before:
            self.before -= 1
        elif self.times:
            self.times -= 1
            optimizer.param_groups[0]["params"][0].grad.fill_(math.inf)
        super().unscale_(optimizer)


def test_a_step_that_overflows_is_no_measurement(climb) -> None:
    """The adapter has not moved then: its KL of 0 is not that of a small learning rate."""
    parts = AUTO | {"initial_learning_rate": 0.1, "inner_epochs": 2, "delta": 0.02, "tokens_per_microbatch": 64}
    once, never = (climb(**parts, scaler=Overflowing(n)) for n in (1, 0))
    assert once.report.learning_rate == never.report.learning_rate and once.report.probes == never.report.probes
    assert once.report.steps == never.report.steps
    assert once.report.gradient_signal == never.report.gradient_signal is not None
    assert all(torch.equal(value, never.adapter[name]) for name, value in once.adapter.items())
    assert climb(**AUTO, scaler=Overflowing(10**6)).report.steps == 0, "it ends, and has taken no step"


def test_a_penalty_is_adapted_once_to_a_step_however_often_the_next_one_overflows(climb) -> None:
    settled = {"learning_rate": 1e-4, "inner_epochs": 3, "delta": 5.0, "beta": 1.0}
    never, often = (climb(**settled, scaler=Overflowing(times, first=2)).report for times in (0, 4))
    assert never.beta == often.beta == 0.25 and never.steps == often.steps == 3


def test_a_first_micro_batch_with_a_tiny_gradient_leaves_room_for_the_others(climb, monkeypatch) -> None:
    """The unit of the sum comes from the first one; where the others are 2^30 times as large, the pass is made again."""
    plain = climb(inner_epochs=2, learning_rate=1e-2, tokens_per_microbatch=64)
    monkeypatch.setattr(optimize_module, "unit_exponent", lambda first: unit_exponent(first) - 30)
    tiny = climb(inner_epochs=2, learning_rate=1e-2, tokens_per_microbatch=64)
    assert tiny.report.steps == plain.report.steps == 2
    assert tiny.report.gradient_norm == pytest.approx(plain.report.gradient_norm, rel=1e-6)
    assert all(torch.allclose(value, plain.adapter[name], rtol=1e-5, atol=1e-9) for name, value in tiny.adapter.items())


def test_the_rate_is_what_the_optimizer_steps_with(climb) -> None:
    """One step of plain gradient descent: twice the rate, twice the way."""
    start = climb(inner_epochs=1, learning_rate=1e-12, max_grad_norm=1e9).adapter

    def way(rate: float) -> float:
        adapter = climb(inner_epochs=1, learning_rate=rate, max_grad_norm=1e9).adapter
        return math.sqrt(sum(float((adapter[n] - start[n]).square().sum()) for n in start))

    assert way(0.2) == pytest.approx(2 * way(0.1), rel=1e-3)
