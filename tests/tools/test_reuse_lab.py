"""The lab behind `theory_lab.py --part reuse`: its exact quantities, what each way of using episodes costs and sees, claims."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import reuse_lab as lab
import reuse_studies as studies

TASKS = [lab.Columns(3), lab.Differ(3, kinds=2, spread=1.0)]


def draws(seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng([7, seed]) for seed in range(seeds)]


def team_of(task: lab.Task, seeds: int = 1) -> np.ndarray:
    return np.stack([task.first_team(rng) for rng in draws(seeds)])


def rollout_of(task: lab.Task, groups: int, episodes: int = 3, seeds: int = 1) -> lab.Rollout:
    rngs = draws(seeds)
    return lab.play(task, team_of(task, seeds), rngs, lab.new_items(task, rngs, groups), episodes)


@pytest.mark.parametrize("task", TASKS)
def test_exact_success_and_visits_are_those_of_many_episodes(task: lab.Task) -> None:
    played = rollout_of(task, groups=20_000)
    success_S, visits_SNC = task.solve(team_of(task))
    assert played.return_SGE.mean() == pytest.approx(success_S[0], abs=0.01)
    for agent in range(task.agents):
        seen_C = np.bincount(played.context_SGEN[..., agent].ravel(), minlength=task.contexts) / played.return_SGE.size
        np.testing.assert_allclose(seen_C, visits_SNC[0, agent], atol=0.01)


def test_a_sum_is_right_where_every_total_is() -> None:
    context, action = np.array([[2, 5, 3], [2, 5, 3]]), np.array([[1, 3, 2], [1, 3, 1]])  # 1; 2 and a carry; 1 and a carry
    assert lab.Columns(3).reward(context, action).tolist() == [1, 0]
    assert lab.Columns(3).context(np.array([2, 2]), np.array([1, 2])).tolist() == [4, 5]


def test_a_step_ends_at_the_edge_and_nothing_moves_without_a_direction() -> None:
    task = lab.Columns(3)
    team_SNCA, visits_SNC = team_of(task, 2), task.solve(team_of(task, 2))[1]
    direction_SCA = np.stack([np.random.default_rng(0).standard_normal((6, 4)), np.zeros((6, 4))])
    new_SNCA = lab.step(team_SNCA, 1, direction_SCA, 0.05, visits_SNC[:, 1])
    kl_S = (visits_SNC[:, 1] * studies.context_kl(team_SNCA, new_SNCA, 1)).sum(-1)
    np.testing.assert_allclose(kl_S, [0.05, 0], atol=1e-9)
    np.testing.assert_array_equal(new_SNCA[:, [0, 2]], team_SNCA[:, [0, 2]])
    assert (direction_SCA[0] * (new_SNCA - team_SNCA)[0, 1]).sum() > 0


def test_weights_are_how_much_likelier_a_team_is_to_play_an_episode() -> None:
    task = lab.Columns(3)
    played, other_SNCA = rollout_of(task, groups=20_000), team_of(task, 2)[1:]
    weight_SGE = np.exp(played.log_weights(other_SNCA))
    assert weight_SGE.mean() == pytest.approx(1, abs=0.05)
    assert (weight_SGE * played.return_SGE).mean() == pytest.approx(task.solve(other_SNCA)[0][0], abs=0.02)
    assert played.weights(other_SNCA).max() == lab.LARGEST_WEIGHT
    assert played.effective_share(team_of(task))[0] == pytest.approx(1)
    assert played.effective_share(other_SNCA)[0] == pytest.approx(1 / (weight_SGE**2).mean(), rel=0.05)


def test_weights_enter_the_mean_of_a_group() -> None:
    played = replace(rollout_of(lab.Columns(3), groups=1), return_SGE=np.array([[[1.0, 0, 0]]]))
    signal_SGE = lab.signals(played, np.array([[[2.0, 1, 1]]]), "no_norm")
    np.testing.assert_allclose(signal_SGE[0, 0], [2 * 2 / 3, -2 / 3 * 2 / 3, -2 / 3 * 2 / 3], rtol=1e-6)


def test_what_goes_on_keeps_the_messages_that_an_update_left_as_they_were() -> None:
    task, rngs = lab.Columns(4), draws(2)
    last = rollout_of(task, groups=30, seeds=2)
    kept = (task.unchanged(2), last.action_SGEN)
    after = lab.play(task, team_of(task, 2), rngs, last.items_SGN, 3, kept)
    np.testing.assert_array_equal(after.action_SGEN[..., :2], last.action_SGEN[..., :2])
    assert (after.action_SGEN[..., 2:] != last.action_SGEN[..., 2:]).any()
    assert lab.Differ(4).unchanged(2).tolist() == [True, True, False, True]


def learner(task: lab.Task, name: str, seeds: int = 2, episodes: int = 72) -> lab.Learner:
    return lab.Learner(task, lab.VARIANTS[name], seeds, episodes, 3, 0.02)


def test_a_branched_group_shares_its_beginning() -> None:
    played = learner(lab.Columns(4), "branched").sample([2, 0, 1, 3], 0, None)
    assert (played.action_SGEN[..., :2] == played.action_SGEN[:, :, :1, :2]).all()
    assert (played.action_SGEN[..., 2] != played.action_SGEN[:, :, :1, 2]).any()


@pytest.mark.parametrize("task", [lab.Columns(4), lab.Differ(4)])
def test_all_ways_but_one_have_the_same_messages(task: lab.Task) -> None:
    for name, variant in lab.VARIANTS.items():
        spent = learner(task, name).run(3).messages / (3 * 72 * 4)
        assert spent < 1 if variant.by_ess else spent == pytest.approx(1, abs=0.06), name


def test_a_seed_does_not_depend_on_how_many_there_are() -> None:
    for name in ("window, continued", "by effective size"):
        few, many = (learner(lab.Columns(4), name, seeds).run(3).success_KS for seeds in (1, 3))
        np.testing.assert_allclose(few[:, 0], many[:, 0])


def test_the_window_learns_from_earlier_rollouts_only_and_the_next_update_from_this_one() -> None:
    task = lab.Columns(4)
    first, second = (rollout_of(task, groups, seeds=2) for groups in (20, 21))
    worse = replace(second, return_SGE=1 - second.return_SGE)
    seen = {}
    for name in ("window", "window + newest", "TeamTR"):
        for newest in (second, worse):
            it = learner(task, name)
            it.team_SNCA = team_of(task, 2)
            it.kept = [first]
            seen[name, newest is worse] = it.direction(it.team_SNCA, 1, newest)
            assert [part.items_SGN.shape[1] for part in it.kept] == ([20] if name == "TeamTR" else [20, 21])
    assert (seen["window", False] == seen["window", True]).all() and seen["window", False].any()
    assert not np.allclose(seen["window + newest", False], seen["window + newest", True])
    assert not np.allclose(seen["TeamTR", False], seen["TeamTR", True])


def test_rollouts_that_are_too_unlike_todays_drop_out() -> None:
    task = lab.Columns(4)
    it = learner(task, "window")
    it.kept = [rollout_of(task, 20, seeds=2)]
    it.team_SNCA = team_of(task, 2)
    it.team_SNCA[1] = np.roll(it.team_SNCA[1], 1, axis=-1)
    it.drop_stale()
    assert it.kept[0].used_S.tolist() == [True, False]


@pytest.mark.parametrize(("agents", "order", "new"), [(3, "random", 7), (8, "random", 39.5), (3, "fixed", 8), (3, "reverse", 6)])
def test_messages_of_a_stage(agents: int, order: str, new: float) -> None:
    assert studies.messages_of_a_stage(agents, "round_robin", order) == (agents**2, new)


def test_reused_episodes_have_the_fresh_gradient_and_less_variance() -> None:
    rows = studies.window_gradients(300, windows=(1, 3, 7))
    for name in ("fresh rollout", "window of 1", "window of 3", "window of 7"):
        assert rows[name]["off"] < 1.8 * rows[name]["by chance"], name
    assert rows["window of 7, no weights"]["off"] > 2.5 * rows["window of 7, no weights"]["by chance"]
    variances = [rows[f"window of {length}"]["variance"] for length in (1, 3, 7)]
    assert variances[1] < 0.45 * variances[0] and variances[2] < 0.55 * variances[1]


def test_even_groups_held_out_first_measure_the_whole_batch_by_their_weights() -> None:
    rows = studies.held_out_kl(300)
    for step in ("another rollout", "the rest"):
        weighted, bare = rows["held out, even ones first"], rows["the same, no weights"]
        assert abs(weighted[f"step of {step}"] - 1) < 3 * weighted[f"error, {step}"]
        assert bare[f"step of {step}"] < 1 - 4 * bare[f"error, {step}"]
    assert rows["held out, even ones first"]["left to fit"] > rows["held out at random"]["left to fit"]


def test_a_judge_must_be_fresh() -> None:
    rows = studies.dependence(20)
    assert rows["fresh"]["gain"] == pytest.approx(1, abs=0.15)
    assert rows["continued"]["gain"] > 1.3 and rows["continued"]["variance"] > 1.4


def test_the_tool_prints_and_writes(
    tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studies, "CELLS", studies.CELLS[:1])
    monkeypatch.setattr(studies, "STAGES", 1)
    monkeypatch.setattr(studies, "REPLICATES", 20)
    out = tmp_path / "lab.json"
    monkeypatch.setattr(sys, "argv", ["theory_lab.py", "--part", "reuse", "--seeds", "2", "--json", str(out)])
    tool("theory_lab").main()
    found = json.loads(out.read_text())["studies"]
    assert all(heading in capsys.readouterr().out for heading in list(found)[:1]) and len(found) == 5
    assert set(next(iter(found.values()))) > set(lab.VARIANTS)
