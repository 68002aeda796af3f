"""Every variant does what its name says, in the one loop."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.algorithm.advantage import group_advantages
from teamtr_lora.algorithm.trust_region import RADIUS_RANGE, GateReading, StepDecision, track_target
from teamtr_lora.algorithm.variants.gain import GAINS
from teamtr_lora.algorithm.variants.matched import MATCHED
from teamtr_lora.algorithm.variants.ordering import ORDERS, ordering
from teamtr_lora.algorithm.variants.publishing import UPDATES
from teamtr_lora.algorithm.variants.radii import RADII
from teamtr_lora.algorithm.variants.region import REGIONS, Gate
from teamtr_lora.algorithm.variants.resampling import RESAMPLING, Resampling
from teamtr_lora.algorithm.variants.reuse import REUSE
from teamtr_lora.algorithm.variants.schedule import SCHEDULES
from teamtr_lora.recipe import problems
from teamtr_lora.runs.metrics import UpdateRow, read_rows
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.stage import train

ROOT = Path(__file__).resolve().parents[2]
TABLES = (RESAMPLING, UPDATES, ORDERS, MATCHED, REGIONS, RADII, GAINS, REUSE, SCHEDULES)


Start = Callable[..., TrainingRun]


def updates(run: TrainingRun) -> list[UpdateRow]:
    return [row for row in read_rows(run.run_dir.path) if isinstance(row, UpdateRow)]


def trained(run: TrainingRun) -> list[UpdateRow]:
    train(run)
    return updates(run)


@pytest.mark.parametrize(
    ("how", "fresh"),
    [
        ({"resampling": "every_update"}, [24, 24, 24]),
        ({"resampling": "every_k", "resample_every": 2}, [24, 0, 24]),
        ({"resampling": "never"}, [24, 0, 0]),
    ],
)
def test_resampling_samples_when_it_says(start: Start, tmp_path: Path, how: dict[str, Any], fresh: list[int]) -> None:
    run = start(tmp_path, order="fixed", **how)
    rows = trained(run)
    assert [row.fresh_episodes for row in rows] == fresh
    assert all(row.episodes == 24 and row.messages == 24 for row in rows)
    assert rows[0].decision in ("accepted", "shrunk"), "an update that changes nothing proves nothing"
    for i, row in enumerate(rows):  # a rollout is from the team before the update it was sampled for
        source = max(j for j in range(i + 1) if fresh[j])
        assert row.team_versions == rows[0].team_versions | {r.agent: r.version for r in rows[:source]}
    evaluated = 2 * 3 * 3 * 1  # before and after: items x messages, of at most 5 tokens
    assert run.state.sampled_tokens <= sum(fresh) * 3 * 5 + evaluated * 5
    assert len(list((tmp_path / "episodes").iterdir())) == sum(map(bool, fresh))


def test_on_one_batch_the_order_of_the_agents_does_not_matter(start: Start, tmp_path: Path) -> None:
    """So a joint update of all agents is naive sequential: nothing of one agent's update enters another's."""
    runs = [start(tmp_path / str(i), resampling="never", order=order) for i, order in enumerate(("fixed", "reverse"))]
    for run in runs:
        train(run)
    assert runs[0].playable.versions() == runs[1].playable.versions()


def test_none_takes_a_step_that_the_gate_refuses(start: Start, tmp_path: Path) -> None:
    wild = {"learning_rate": 0.05, "delta": 0.01, "inner_epochs": 4, "order": "fixed"}
    free = trained(start(tmp_path / "none", kind="none", **wild))
    gated = trained(start(tmp_path / "gate", kind="gate", **wild))
    assert free[0].out_of_region and free[0].decision == "accepted" and free[0].alpha == 1 and free[0].beta == 0
    assert not any(row.out_of_region for row in gated)
    assert gated[0].decision in ("shrunk", "rejected")


def test_penalties_hold_back_without_a_gate(start: Start, tmp_path: Path) -> None:
    wild = {"learning_rate": 0.02, "delta": 0.01, "inner_epochs": 4, "order": "fixed", "beta_initial": 0.5}
    fixed = trained(start(tmp_path / "fixed", kind="penalty_fixed", **wild))
    adaptive = trained(start(tmp_path / "adaptive", kind="penalty_adaptive", **wild))
    assert all(row.decision == "accepted" and row.alpha == 1 and not row.stopped_early for row in fixed + adaptive)
    assert {row.beta for row in fixed} == {0.5}
    assert all(row.beta > 0.5 for row in adaptive), "far outside the region the weight doubles"


def test_a_linear_schedule_falls_from_the_rate_to_nothing_and_is_not_for_found_rates(start: Start, tmp_path: Path) -> None:
    rows = trained(start(tmp_path, stages=2, learning_rate=2e-3, schedule="linear", inner_epochs=1))
    assert [row.learning_rate for row in rows] == [2e-3, 2e-3, 2e-3, 1e-3, 1e-3, 1e-3]
    assert [SCHEDULES["linear"]().share(stage, 4) for stage in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]
    (problem,) = problems({"team": {"agents": [{"name": "a"}]}, "training": {"schedule": "linear"}})
    assert "training.schedule = 'linear': a learning rate that is found anew" in str(problem)


def test_an_adaptive_radius_tracks_its_target(start: Start, tmp_path: Path) -> None:
    radius, target, share = 0.01, 0.01, 0.6  # accepted steps have a mean KL of this share of the radius
    for _ in range(30):
        radius = track_target(radius, share * radius, target)
    assert share * radius == pytest.approx(target, rel=1e-6)
    assert track_target(0.01, 1e-9, 0.01) == pytest.approx(0.015) and track_target(0.01, 0.0, 0.01) == 0.01
    for _ in range(30):
        radius = track_target(radius, 1e-9, target)
    assert radius == pytest.approx(RADIUS_RANGE * target)
    rows = trained(start(tmp_path, kind="adaptive_radius", stages=2, order="fixed"))
    first, second = rows[:3], rows[3:]
    assert {row.delta for row in first} == {0.1}
    for before, after in zip(first, second, strict=True):
        assert after.delta == pytest.approx(track_target(0.1, before.kl["exact"].mean or 0.0, 0.1))
        assert not after.out_of_region


@pytest.mark.parametrize("kind", ["group", "no_norm", "no_clip", "leave_one_out"])
def test_advantages_by_kind_against_numpy(kind: str) -> None:
    rng = np.random.default_rng(0)
    returns, groups, clip = rng.random(24) ** 4, np.repeat(np.arange(4), 6), 0.9
    got = group_advantages(torch.from_numpy(returns), torch.from_numpy(groups), clip=clip, eps=1e-6, kind=kind)
    for g in range(4):
        mine = returns[groups == g]
        if kind == "leave_one_out":
            expected = np.array([x - np.delete(mine, i).mean() for i, x in enumerate(mine)])
        else:
            expected = mine - mine.mean()
            expected = expected if kind == "no_norm" else expected / np.sqrt(mine.var() + 1e-6)
            expected = np.clip(expected, -clip, clip) if kind in ("group", "no_norm") else expected
        np.testing.assert_allclose(got.clipped_E.numpy()[groups == g], expected, rtol=1e-5, atol=1e-7)


def test_an_explicit_order_is_kept_and_must_name_every_agent() -> None:
    assert ordering(["b", "c", "a"]).arrange(["a", "b", "c"], "0") == ["b", "c", "a"]
    recipe = {"team": {"agents": [{"name": "a"}, {"name": "b"}]}, "training": {"order": ["a", "a"]}}
    (problem,) = problems(recipe)
    assert problem.key == "training.order" and "names every agent once" in problem.wrong


def test_two_rules_for_one_radius_are_refused() -> None:
    (problem,) = problems({"team": {"agents": [{"name": "a"}]}, "trust_region": {"radii": "gain_weighted", "kind": "none"}})
    assert problem.key == "trust_region.radii"


@pytest.mark.parametrize(
    ("sections", "key", "fix"),
    [
        ({"training": {"update": "joint"}}, "training.update", "training.resampling=never"),
        ({"training": {"matched": "stage"}, "rollout": {"items_per_stage": 32}}, "rollout.items_per_stage", "use 33"),
        ({"training": {"matched": "stage"}, "rollout": {"items_per_stage": 9}}, "rollout.items_per_stage", "use 18"),
    ],
)
def test_budgets_and_joint_updates_that_cannot_be_are_refused(sections: dict[str, Any], key: str, fix: str) -> None:
    (problem,) = problems({"team": {"agents": [{"name": name} for name in "abc"]}, **sections})
    assert problem.key == key and fix in problem.fix
    fixed = {"training.update": {"training": {"update": "joint", "resampling": "never"}}}.get(key, sections)
    if key == "rollout.items_per_stage":
        fixed = sections | {"rollout": {"items_per_stage": int(fix.split()[1])}}
    assert problems({"team": {"agents": [{"name": name} for name in "abc"]}, **fixed}) == []


class AfterTheFirst(Resampling):
    """Sampled before the first and the second update of a stage, and then no more."""

    words = "before the first two updates"

    def sampled_before(self, place: int) -> int:
        return min(place, 1)


class Halves(Gate):
    """The gate, but never more than half of the optimizer's step."""

    words = "at most half of the step"

    def choose(self, measure: Callable[[float], GateReading], radius: float) -> StepDecision:
        return super().choose(lambda alpha: replace(measure(alpha / 2), alpha=alpha / 2), radius)


def test_a_new_rule_is_one_class_and_one_line_in_a_table(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe accepts both names, the loop follows them, and nothing else has to know."""
    named = {"training": {"resampling": "after_the_first"}, "trust_region": {"kind": "halves"}}
    team = {"team": {"agents": [{"name": "a"}]}}
    assert {problem.key for problem in problems(team | named)} == {"training.resampling", "trust_region.kind"}
    monkeypatch.setitem(RESAMPLING, "after_the_first", AfterTheFirst)
    monkeypatch.setitem(REGIONS, "halves", Halves)
    assert problems(team | named) == []
    run = start(tmp_path, resampling="after_the_first", kind="halves", step="shrink")
    rows = trained(run)
    assert [row.fresh_episodes for row in rows] == [24, 24, 0]
    assert rows[0].decision == "shrunk" and rows[0].alpha == 0.5 and all((row.alpha or 0) <= 0.5 for row in rows)
    assert run.playable.versions()["one"] == rows[0].version != rows[0].team_versions["one"]


def test_the_loop_and_the_update_compare_no_names() -> None:
    """Variants are asked, not compared: no name of any table stands in the files of the loop and of an update."""
    names = {name for table in TABLES for name in table}
    for file in ("stage", "run", "stage_rollouts", "window", "update", "optimize", "gate", "run_diagnostics", "staleness_probe"):
        tree = ast.parse((ROOT / "teamtr_lora" / "training" / f"{file}.py").read_text())
        compared = {
            constant.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare)
            for constant in ast.walk(node)
            if isinstance(constant, ast.Constant)
        }
        assert not compared & names, file
    loop = (ROOT / "teamtr_lora" / "training" / "stage.py").read_text()
    assert len(loop.splitlines()) < 150


def test_every_variant_says_what_it_is() -> None:
    for table in TABLES:
        for kind in table.values():
            assert kind.words and not kind.words.endswith(".")
