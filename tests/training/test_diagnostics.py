"""Diagnostics change nothing of what is learned, survive a resume, and measure what they say."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.algorithm.certificate import leave_one_out
from teamtr_lora.algorithm.occupancy import trajectory_log_weights
from teamtr_lora.base.versions import read_adapter_folder
from teamtr_lora.runs.metrics import TIME_FIELDS, SwapRow, UpdateRow, read_rows
from teamtr_lora.study.diagnose import _of_stages
from teamtr_lora.tasks import DataOrder, Item, Task
from teamtr_lora.training.fisher import fisher_reading
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.scoring import Scorer, message_log_ratios
from teamtr_lora.training.stage import train
from teamtr_lora.training.staleness_probe import surrogate_by_group
from teamtr_lora.training.update_diagnostics import StageContexts, contexts, coupled_difference, shift_between

PROBED = {"probe_every_stages": 1, "probe_items": 4, "probe_episodes_per_item": 4, "fisher_messages": 12, "token_shift_ranks": 3}

# every candidate is accepted, so that there is something to see
NAIVE = {"resampling": "never", "kind": "none", "inner_epochs": 1, **PROBED, "fisher_messages": 0}


Start = Callable[..., TrainingRun]


def updates(folder: Path) -> list[UpdateRow]:
    return [row for row in read_rows(folder) if isinstance(row, UpdateRow)]


def plain(folder: Path, *without: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in (*TIME_FIELDS, *without)} for row in rows]


@pytest.fixture(scope="module")
def probed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    run = start(tmp_path_factory.mktemp("probed"), **PROBED)
    train(run)
    return run


@pytest.fixture(scope="module")
def naive(start: Start, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    run = start(tmp_path_factory.mktemp("naive"), **NAIVE)
    train(run)
    return run


def test_diagnostics_do_not_change_training(start: Start, probed: TrainingRun, tmp_path: Path) -> None:
    off = start(tmp_path, from_updates=False)
    train(off)
    assert off.playable.versions() == probed.playable.versions()
    assert {row.decision for row in updates(tmp_path)} & {"accepted", "shrunk"}, "nothing moved: the comparison is empty"
    apart = ("diagnostics", "probe")
    assert plain(tmp_path, *apart) == plain(probed.run_dir.path, *apart)
    assert all(row.diagnostics is None and row.probe is None for row in updates(tmp_path))


@pytest.mark.parametrize("resampling", ["every_update", "never"])
def test_diagnostics_survive_a_resume_within_a_stage(
    start: Start, probed: TrainingRun, naive: TrainingRun, tmp_path: Path, resampling: str
) -> None:
    whole, how = {"every_update": (probed, PROBED), "never": (naive, NAIVE)}[resampling]
    train(start(tmp_path, stop_after=2, **how))
    train(start(tmp_path, resume=True, **how))
    assert plain(tmp_path) == plain(whole.run_dir.path)
    assert updates(tmp_path)[2].probe.weights["ess"] < 1, "agents updated before the resume count"  # type: ignore[union-attr]


@pytest.mark.parametrize("resampling", ["every_update", "never"])
def test_a_task_that_draws_at_random_is_repeated_too(start: Start, high_tokens: Task, tmp_path: Path, resampling: str) -> None:
    """From the process's own generators: whatever state they are in, and also where a rollout is played again after a resume."""

    drawn: list[tuple[float, ...]] = []

    class Noisy(type(high_tokens)):  # type: ignore[misc]
        def score(self, episodes: Any) -> list[float]:
            drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
            return [s + random.random() + np.random.rand() + float(torch.rand(())) for s in super().score(episodes)]

    def go(folder: Path, process: int, **how: Any) -> list[dict[str, Any]]:
        random.seed(process), np.random.seed(process), torch.manual_seed(process)
        train(start(folder, resampling=resampling, inner_epochs=1, task=Noisy(), **how))
        return plain(folder)

    whole = go(tmp_path / "whole", 1)
    for each in zip(*drawn, strict=True):
        assert len(set(each)) == (2 if resampling == "never" else 4), "evaluations alike, every rollout by itself"
    go(tmp_path / "parts", 2, stop_after=2)
    assert go(tmp_path / "parts", 3, resume=True) == whole
    assert len({row["reward_mean"] for row in whole if row["kind"] == "update"}) == (1 if resampling == "never" else 3)


def test_a_probe_learns_from_nothing_that_the_stage_learns_from(start: Start, tmp_path: Path) -> None:
    """Where the split has enough items; never one twice."""
    run = start(tmp_path, **PROBED | {"probe_items": 12})
    few = start(tmp_path / "few", **PROBED)
    few.rollouts._order = DataOrder(_Numbered(10), 0)  # four are left over, and four are wanted
    for few.state.cursor in range(0, 90, 6):
        assert not _ids(few.rollouts.items(few.state)) & _ids(few.rollouts.probe_items(few.state))
    for size, apart in ((None, 12), (40, 12), (16, 10), (10, 0)):
        run.rollouts._order = DataOrder(_Numbered(size), 0)
        for run.state.cursor in range(0, 90, 6):
            learned = _ids(run.rollouts.items(run.state))
            probed_items = [item.id for item in run.rollouts.probe_items(run.state)]
            assert (apart or 10) <= len(probed_items) == len(set(probed_items)) <= 12
            assert not apart or not learned & set(probed_items)
    run.rollouts._order = DataOrder(_FewOfMany(None), 0)
    assert _ids(run.rollouts.probe_items(run.state)) == {"0", "1", "2"}


def test_an_agent_that_has_not_spoken_to_the_probe(probed: TrainingRun, play: Any) -> None:
    """It weighs nothing, and has nothing to be stale."""
    bank, scorer = probed.playable.bank, probed.updater.scorer
    episodes = play(probed.playable)
    log_M = message_log_ratios(scorer, bank, "one", batch := scorer.batch([]), bank.snapshot("one"))
    assert trajectory_log_weights(log_M, batch.episode_M.numpy(), len(episodes)).tolist() == [0.0] * len(episodes)
    assert not surrogate_by_group(log_M, batch.episode_M.numpy(), episodes).any()


def _ids(items: list[Item]) -> set[str]:
    return {item.id for item in items}


class _FewOfMany:
    """Never runs out, and has three different items."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __getitem__(self, position: int) -> Item:
        return Item(str(position % 3), "?")


class _Numbered:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def __getitem__(self, position: int) -> Item:
        return Item(str(position), "?")


def test_updates_of_a_stage_that_a_swap_cut_short_are_not_diagnosed() -> None:
    rows: list[Any] = [UpdateRow.model_construct(stage=stage, agent=agent) for stage, agent in ((1, "a"), (1, "b"), (2, "a"))]
    again = [UpdateRow.model_construct(stage=2, agent=agent) for agent in ("b", "a")]
    assert _of_stages([*rows, SwapRow.model_construct(stage=1), *again]) == [*rows[:2], *again]
    assert _of_stages([*rows, *again]) == [*rows, *again]


def test_a_probe_reads_what_its_episodes_say(probed: TrainingRun) -> None:
    rows = updates(probed.run_dir.path)
    first, second, third = rows
    for row in rows:
        assert row.probe is not None and row.probe.episodes == 16 and row.probe.tokens > 16 * 3
        assert (row.probe.gap is None) == (row.alpha is None)
    assert first.probe.gap.signed == 0 and first.probe.gap.value == first.probe.gap.null, "one team, one set of episodes"
    assert first.probe.context_shift.coupled == 0 and first.probe.weights["ess"] == pytest.approx(1)
    assert second.probe.context_shift.coupled > 0, "what the first agent says is context of the others"
    assert third.probe.weights["ess"] < second.probe.weights["ess"] < 1
    weights = second.probe.weights
    assert weights["mean"] == pytest.approx(1, abs=4 * weights["mean_standard_error"] + 1e-6)
    shift = first.probe.token_shift
    assert set(shift) == {"in_region", "out_of_region"} and second.probe.token_shift is None
    for reading in shift.values():
        assert len(reading.before) == 4 and sum(reading.before) == pytest.approx(1) == pytest.approx(sum(reading.after))
        assert reading.before[0] == max(reading.before[:3])
    assert sum(shift["out_of_region"].moved) > sum(shift["in_region"].moved) > 0 and shift["out_of_region"].step > 1


def test_the_gap_is_the_difference_of_two_surrogates(naive: TrainingRun) -> None:
    """Against ratios computed here, one message at a time."""
    run, folder = naive, naive.run_dir.path
    row = [row for row in updates(folder) if row.alpha is not None][-1]
    probe = run.diagnostics._probe
    assert probe is not None and row.update > 1
    agent, bank = row.agent, run.playable.bank
    folders = sorted((folder / "adapters" / agent).iterdir())
    logp: dict[tuple[int, int], float] = {}
    for v, version in enumerate(folders[:2]):
        bank.restore(agent, read_adapter_folder(version)[0])
        bank.activate(agent)
        for e, episode in enumerate(probe._start):
            message = next(m for m in episode.messages if m.agent == agent)
            ids = torch.tensor([message.prompt_ids + message.token_ids])
            with torch.no_grad():
                logits = bank.model(input_ids=ids, use_cache=False).logits[0, len(message.prompt_ids) - 1 : -1].double()
            logp[v, e] = float(torch.log_softmax(logits / 0.3, -1).gather(1, torch.tensor(message.token_ids)[:, None]).sum())
    stale = 0.0
    for e, episode in enumerate(probe._start):
        others = [x.reward for x in probe._start if x.group == episode.group and x is not episode]
        stale += (math.exp(logp[1, e] - logp[0, e]) - 1) * (episode.reward - sum(others) / len(others)) / len(probe._start)
    assert row.probe.gap.stale == pytest.approx(stale, abs=1e-6)  # type: ignore[union-attr]
    assert row.probe.gap.signed == pytest.approx(row.probe.gap.stale - row.probe.gap.fresh)  # type: ignore[union-attr]


def test_an_update_tells_how_its_kl_is_spread_and_what_the_monitors_are_worth(probed: TrainingRun) -> None:
    for row in updates(probed.run_dir.path):
        found = row.diagnostics
        assert found is not None and found.kl_messages is not None and found.kl_groups is not None
        assert found.kl_messages.p50 <= found.kl_messages.p90 <= found.kl_messages.p99 <= found.kl_messages.largest
        assert found.kl_groups.largest <= found.kl_messages.largest
        assert found.kl_messages.p50 <= 2 * row.kl_message_sum <= 2 * found.kl_messages.largest
        assert set(found.monitor) == {"exact", "k1", "k3"}
        quarter, half = (np.mean(found.monitor["exact"][share].deviations) for share in ("25", "50"))
        assert quarter > half > 0
        assert (found.context_shift is None) == (row.update == 1)


def test_a_probe_may_be_too_dear(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path, probe_every_stages=2, probe_share=0.1)
    state = run.state
    state.seconds = 100.0
    for stage, spent, due in ((1, 0.0, False), (2, 0.0, True), (4, 9.0, True), (6, 11.0, False)):
        state.probe_seconds = spent
        run.diagnostics.begin_stage(state, stage)
        assert state.probing is due, stage


def test_joint_publishes_at_the_end_of_the_stage(
    start: Start, naive: TrainingRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path, **{**NAIVE, "update": "joint", "probe_every_stages": 0})
    live: list[dict[str, str]] = []
    publish = run.playable.sampler.publish
    monkeypatch.setattr(run.playable.sampler, "publish", lambda v: (live.append({v.agent: v.name}), publish(v))[1])
    record, before = run.record_update, run.playable.versions()
    monkeypatch.setattr(run, "record_update", lambda *a: (record(*a), live.append({}))[0])
    train(run)
    rows = updates(tmp_path)
    assert live[:3] == [{}, {}, {}], "nothing goes live between the updates"
    assert {k: v for d in live for k, v in d.items()} == run.playable.versions() != before
    assert [row.fresh_episodes for row in rows] == [24, 0, 0] and all(row.team_versions == before for row in rows)
    assert run.playable.versions() == naive.playable.versions(), "on one batch that is naive sequential"


@pytest.mark.parametrize(
    ("how", "played"),
    [
        ({"resampling": "every_update"}, [12, 12, 12]),
        ({"resampling": "never"}, [36, 0, 0]),
        ({"resampling": "every_k", "resample_every": 2}, [18, 0, 18]),
    ],
)
def test_a_stage_budget_is_shared_among_its_rollouts(
    start: Start, tmp_path: Path, how: dict[str, Any], played: list[int]
) -> None:
    run = start(tmp_path, matched="stage", items_per_stage=18, episodes_per_item=2, inner_epochs=1, **how)
    train(run)
    rows = updates(tmp_path)
    assert [row.fresh_episodes for row in rows] == played and sum(played) == 18 * 2
    assert run.state.cursor == 18
    items = [json.loads(line)["item"] for path in (tmp_path / "episodes").iterdir() for line in path.read_text().splitlines()]
    assert len(set(items)) == 18, "each of the stage's items once"


def test_contexts_are_kept_for_a_resumed_run(tmp_path: Path, episodes: Any, high_tokens: Task) -> None:
    own = contexts(episodes, high_tokens)
    assert len(own.keys) == sum(len(e.messages) for e in episodes)
    assert own.keys[0].answer is None and own.keys[1].answer == high_tokens.answer(episodes[0].messages[0].text)
    per_round = len(episodes[0].messages)
    unheard = contexts(episodes, high_tokens, per_round)
    assert {key.answer for key in unheard.keys} == {None}, "nobody heard the others of a blind round"
    assert unheard.keys[per_round - 1].turn == per_round - 1 and per_round > 1
    StageContexts(tmp_path / "c.json").begin(4, own)
    again = StageContexts(tmp_path / "c.json")
    other = contexts(episodes[::-1], high_tokens)
    assert again.of(3) is None and again.of(4) is not None
    assert shift_between(again.of(4), other, 7) == shift_between(own, other, 7)  # type: ignore[arg-type]
    assert coupled_difference(episodes, episodes, high_tokens) == 0 < coupled_difference(episodes, episodes[::-1], high_tokens)


def test_the_local_gain_is_of_all_episodes_as_l_is(make_team: Any, config: Any, episodes: Any, move: Any) -> None:
    """As many groups again, played alike, in which the agent was not asked: what it can gain is half as much."""
    team = make_team()
    scorer, before = Scorer.of(team, config()), team.bank.snapshot("left")
    move(team, "left", 0.01)
    silent = copy.deepcopy(episodes)
    for episode in silent:
        episode.group += 8
        episode.messages = [message for message in episode.messages if message.agent != "left"]
    both = [
        fisher_reading(scorer, team.bank, "left", before, played, messages=64, discount=1.0, measured_kl=0.0, seed=0)
        for played in (episodes, episodes + silent)
    ]
    alone, half = both
    assert alone is not None and half is not None and alone.slope_in_sample > 0
    # the gain in the region goes with the slope's root of the Gram form, which is linear in what each episode counts
    assert half.slope_in_sample == pytest.approx(alone.slope_in_sample / 2, rel=1e-6)
    assert half.smoothness == pytest.approx(alone.smoothness / 2, rel=1e-6)


def test_the_fisher_model_predicts_the_measured_kl(probed: TrainingRun, make_team: Any, play: Any, move: Any) -> None:
    """1/2 d'Fd from sampled scores against the gate's exact KL for a small step, and the agent is left as it was."""
    found = [row.probe.fisher for row in updates(probed.run_dir.path) if row.probe and row.probe.fisher]
    assert found and all(f.slope_in_sample > 0 and f.smallest_eigenvalue >= f.damping > 0 for f in found)
    team = make_team()
    episodes = play(team, items=6, episodes=8)
    before = team.bank.snapshot("left")
    move(team, "left", 2e-3)
    after = team.bank.snapshot("left")
    from teamtr_lora.recipe import TeamTRConfig
    from teamtr_lora.training.update import AgentUpdater

    scorer = AgentUpdater(team, TeamTRConfig()).scorer
    reading = fisher_reading(scorer, team.bank, "left", before, episodes, messages=48, discount=0.5, measured_kl=0.0, seed=0)
    assert reading is not None and all(torch.equal(after[n], t) for n, t in team.bank.snapshot("left").items())
    exact = 0.0
    for step in (0, 1):
        team.bank.restore("left", (before, after)[step])
        team.bank.activate("left")
        rows = []
        for episode in episodes:
            message = next(m for m in episode.messages if m.agent == "left")
            ids = torch.tensor([message.prompt_ids + message.token_ids])
            with torch.no_grad():
                logits = team.bank.model(input_ids=ids, use_cache=False).logits[0, len(message.prompt_ids) - 1 : -1].double()
            rows.append(torch.log_softmax(logits, -1))
        if step == 0:
            first = rows
    exact = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(first, rows, strict=True)) / len(episodes)
    assert reading.messages == 48 and reading.step_kl == pytest.approx(exact, rel=0.5)


def test_a_damaged_contexts_file_costs_only_the_drift(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.json"
    for text in ("{", '{"stage": 1}', '{"stage": 1, "contexts": [[1]]}', "[]"):
        path.write_text(text)
        assert StageContexts(path).of(1) is None
    assert "damaged" in caplog.text


def test_smoothness_is_twice_what_the_surrogate_falls_short_of_its_tangent(make_team: Any, play: Any, move: Any) -> None:
    """Agents that speak twice an episode, the tangent by a finite difference, ratios one message at a time."""
    team = make_team(router={"kind": "round_robin", "rounds": 2})
    episodes = play(team, items=4, episodes=4)
    bank, before = team.bank, team.bank.snapshot("left")
    move(team, "left", 2e-2)
    after = bank.snapshot("left")
    from teamtr_lora.recipe import TeamTRConfig
    from teamtr_lora.training.update import AgentUpdater

    scorer = AgentUpdater(team, TeamTRConfig()).scorer

    def logps(share: float) -> list[list[float]]:
        bank.restore("left", {n: before[n] + share * (after[n] - before[n]) for n in before})
        bank.activate("left")
        found = []
        for episode in episodes:
            found.append([])
            for message in (m for m in episode.messages if m.agent == "left"):
                ids = torch.tensor([message.prompt_ids + message.token_ids])
                with torch.no_grad():
                    logits = bank.model(input_ids=ids, use_cache=False).logits[0, len(message.prompt_ids) - 1 : -1].double()
                picked = torch.log_softmax(logits, -1).gather(1, torch.tensor(message.token_ids)[:, None])
                found[-1].append(float(picked.sum()))
        return found

    start, near, far = logps(0.0), logps(0.05), logps(1.0)
    linear = gained = 0.0
    for e, episode in enumerate(episodes):
        others = [x.discounted_return(0.5) for x in episodes if x.group == episode.group and x is not episode]
        advantage = (episode.discounted_return(0.5) - sum(others) / len(others)) / len(episodes)
        for a, b, c in zip(start[e], near[e], far[e], strict=True):
            linear, gained = linear + advantage * (b - a) / 0.05, gained + advantage * math.expm1(c - a)
    short = 2 * (linear - gained) / sum(float(((after[n] - before[n]) ** 2).sum()) for n in before)
    assert short > 0, "this step bends the other way: take another seed"
    bank.restore("left", after)
    reading = fisher_reading(scorer, bank, "left", before, episodes, messages=16, discount=0.5, measured_kl=0.0, seed=0)
    assert reading is not None and reading.messages == 32 and reading.smoothness == pytest.approx(short, rel=0.1)


def test_where_a_part_of_each_group_is_read_a_tiny_step_has_next_to_no_gain(
    make_team: Any, config: Any, episodes: Any, move: Any
) -> None:
    """The worst episode of each group alone: their advantages do not cancel, so ratios have to be centred."""
    team = make_team()
    scorer, before = Scorer.of(team, config()), team.bank.snapshot("left")
    move(team, "left", 1e-4)
    after = team.bank.snapshot("left")
    worst_first = sorted(episodes, key=lambda episode: (episode.group, episode.reward))
    advantage_E = leave_one_out([e.reward for e in worst_first], [e.group for e in worst_first])
    reading = fisher_reading(scorer, team.bank, "left", before, worst_first, messages=8, discount=1.0, measured_kl=0.0, seed=0)
    assert reading is not None and reading.messages == 8 and advantage_E[::4].mean() < -0.1
    way = sum(float(((after[n] - before[n]) ** 2).sum()) for n in before)
    assert reading.smoothness * way / 2 < 1e-3
