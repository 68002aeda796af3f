"""tools/oracle.py: a second opinion on every candidate that leaves the run as it is, and what is counted of it."""

import json
from pathlib import Path
from typing import Any

import cells
import oracle
import pytest

from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.metrics import UpdateRow, read_rows
from teamtr_lora.tasks import Task
from teamtr_lora.team import Episode

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
IN_TURN = ([RECIPES / "quickstart.yaml"], TWO_AGENTS)
UNHEARD = ([RECIPES / "bases" / "nano.yaml", RECIPES / "tasks" / "distinct.yaml"], [])
SMALL = ["training.stages=1", "rollout.items_per_stage=6", "rollout.episodes_per_item=4", "evaluation.items=4", "base.device=cpu"]


def recipe_in(folder: Path, kind: tuple[list[Path], list[str]] = IN_TURN) -> Recipe:
    files, own = kind
    recipe = load_recipe(files, [*SMALL, *own])
    return recipe.model_copy(update={"output_dir": str(folder)}).placed_in(recipe.folder)


def hashes(run: Path) -> dict[str, str]:
    return {agent: version["content_hash"] for agent, version in json.loads((run / "team.json").read_text()).items()}


@pytest.mark.parametrize("kind", [IN_TURN, UNHEARD], ids=["in turn", "unheard"])
def test_every_candidate_is_read_again_and_the_run_is_not_changed(tmp_path: Path, kind: tuple[list[Path], list[str]]) -> None:
    path = tmp_path / "verdicts.jsonl"
    cells.train(recipe_in(tmp_path / "plain", kind))
    cells.train(
        recipe_in(tmp_path / "watched", kind),
        watch=lambda trainer: trainer.add_callback(oracle.Oracle(trainer, path, items=12, episodes_per_item=2)),
    )
    assert hashes(tmp_path / "watched") == hashes(tmp_path / "plain")
    verdicts = oracle.read_verdicts(path)
    rows = [row for row in read_rows(tmp_path / "watched") if isinstance(row, UpdateRow)]
    assert rows and any(row.alpha for row in rows)
    for row in rows:
        own = [v for v in verdicts if (v.stage, v.update, v.agent) == (row.stage, row.update, row.agent)]
        assert [v.alpha for v in own] == row.alphas_tried
        assert [v.alpha for v in own if v.accepted] == ([row.alpha] if row.alpha is not None else [])
        for verdict in own:
            assert verdict.delta == row.delta and verdict.true_kl_error > 0
            if verdict.accepted:
                assert verdict.kl == row.kl["exact"].mean and verdict.gain == row.surrogate_gain
                assert verdict.true_kl != verdict.kl
    first = {v.own_team for v in verdicts if v.update == 1}
    later = {v.own_team for v in verdicts if v.update > 1}
    assert (first, later) == ({True}, {kind is IN_TURN}), "what a stage's later updates gain is not asked of its first team"
    gate, true = (sum(getattr(v, name) for v in verdicts if v.accepted) for name in ("kl", "true_kl"))
    assert 0.2 * gate < true < 5 * gate, "other episodes of the same policies"


@pytest.mark.parametrize(("kind", "plays"), [(IN_TURN, 4), (UNHEARD, 2)], ids=["in turn", "unheard"])
def test_it_plays_again_when_what_an_agent_says_may_have_changed(
    tmp_path: Path, kind: tuple[list[Path], list[str]], plays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, play = [], PlayableTeam.play

    def noted(self: PlayableTeam, task: Task, plan: PlayPlan, *progress: Any) -> list[Episode]:
        played.append(plan.purpose)
        return play(self, task, plan, *progress)

    monkeypatch.setattr(PlayableTeam, "play", noted)
    two_stages = [*kind[1], "training.stages=2"]
    cells.train(
        recipe_in(tmp_path / "run", (kind[0], two_stages)),
        watch=lambda trainer: trainer.add_callback(oracle.Oracle(trainer, tmp_path / "v.jsonl", items=2, episodes_per_item=2)),
    )
    assert len({purpose for purpose in played if "/oracle/" in purpose}) == plays


def verdict(**changed: float | bool) -> oracle.Verdict:
    values = {"stage": 1, "update": 1, "agent": "a", "alpha": 1.0, "accepted": True, "delta": 0.02, "kl": 0.01, "kl_bound": 0.02}
    values |= {"gain": 0.1, "true_kl": 0.015, "true_kl_error": 0.001, "true_gain": 0.1, "true_gain_error": 0.01}
    return oracle.Verdict(**(values | changed))  # type: ignore[arg-type]


def test_what_is_counted() -> None:
    found = oracle.verdict_shares(
        [
            verdict(),
            verdict(
                update=2, true_kl=0.03, true_kl_error=0.006
            ),  # the bound is wrong, if not clearly, and the accepted step out of region
            verdict(update=3, true_gain=-0.1),  # clearly harms, and the gate saw a gain
            verdict(update=3, alpha=0.5, accepted=False),  # a longer one was taken
            verdict(update=4, accepted=False, gain=-0.1),  # refused in region for a gain that is there
            verdict(
                update=5, accepted=False, kl_bound=0.5, true_kl=0.51, gain=-0.1, true_gain=-0.001
            ),  # out of region, its bound too low
        ]
    )
    assert found["readings"] == 6 and found["bound_holds"] == pytest.approx(4 / 6)
    assert found["bound_clearly_fails"] == pytest.approx(1 / 6)
    assert found["accepted_out_of_region"] == pytest.approx(1 / 3) and found["furthest_accepted"] == pytest.approx(1.5)
    assert found["sign_right"] == pytest.approx(4 / 6) and found["clear_sign_right"] == pytest.approx(3 / 5)
    assert found["accepted_that_harm"] == pytest.approx(1 / 3)
    assert found["refused_in_region"] == 1 and found["refused_that_gain"] == 1
    assert oracle.verdict_shares([])["bound_holds"] is None


def test_gains_beside_another_team_are_not_counted() -> None:
    other = [
        verdict(own_team=False, true_gain=-0.1),
        verdict(update=2, accepted=False, own_team=False, true_gain=0.2, true_kl=0.03),
    ]
    found, plain = oracle.verdict_shares([verdict(true_gain=0.05), *other]), oracle.verdict_shares([verdict(true_gain=0.05)])
    for share in ("sign_right", "clear_sign_right", "accepted_that_harm", "refused_in_region", "refused_that_gain"):
        assert found[share] == plain[share], share
    assert found["readings"] == 3 and found["bound_holds"] == pytest.approx(2 / 3), "a KL is as good as any"


def test_an_update_that_was_made_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    rows = [verdict(true_kl=0.5), verdict(alpha=0.5), verdict(true_kl=0.1)]
    path.write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    assert [(v.alpha, v.true_kl) for v in oracle.read_verdicts(path)] == [(1.0, 0.1), (0.5, 0.015)]
    assert oracle.read_verdicts(tmp_path / "none") == []


def test_the_bound_holds_for_episodes_that_nobody_chose_where_the_mean_does_not(tmp_path: Path) -> None:
    """A small study: the bound is to hold in 95% of readings, a mean is too low in about half of them."""
    path, longer = tmp_path / "verdicts.jsonl", ["training.stages=4", "rollout.items_per_stage=12", "evaluation.every_stages=0"]
    cells.train(
        recipe_in(tmp_path / "run", (IN_TURN[0], [*TWO_AGENTS, *longer])),
        watch=lambda trainer: trainer.add_callback(oracle.Oracle(trainer, path, items=24, episodes_per_item=2)),
    )
    verdicts = oracle.read_verdicts(path)
    shares = oracle.verdict_shares(verdicts)
    assert len(verdicts) >= 12 and (shares["bound_holds"] or 0) >= 0.85 and (shares["accepted_bound_holds"] or 0) >= 0.85
    assert sum(v.true_kl <= v.kl for v in verdicts) / len(verdicts) <= 0.75, "an oracle that any reading satisfies says nothing"
