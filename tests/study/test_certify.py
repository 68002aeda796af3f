"""`certify` and `diagnose` on whole runs."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import yaml
from made_up_run import plain_rows, write_rows

from teamtr_lora.algorithm.calibration import Measured, calibrate
from teamtr_lora.algorithm.certificate import Setting, UpdateTerms, certify_stage
from teamtr_lora.cli import main
from teamtr_lora.cli.text.certificates import _words

SMALL = ["training.stages=2", "rollout.items_per_stage=6", "rollout.episodes_per_item=4", "training.inner_epochs=1",
         "evaluation.items=8", "evaluation.every_stages=1", "diagnostics.probe_every_stages=2", "diagnostics.probe_items=4",
         "diagnostics.probe_episodes_per_item=2", "diagnostics.fisher_messages=8"]  # fmt: skip
RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, the second of them probed; read only."""
    folder = tmp_path_factory.mktemp("certify") / "run"
    assert main(["train", RECIPE, *SMALL, "--run-dir", str(folder), "--json"]) == 0
    return folder


def test_certify_reads_a_run_and_says_what_is_vacuous(run: Path, capsys: Any) -> None:
    assert main(["certify", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["stage"] for s in report["stages"]] == [1, 2] and report["gamma"] == pytest.approx(2 / 3)
    for stage in report["stages"]:
        own = [r["certificate"] for r in rows if r["kind"] == "update" and r["stage"] == stage["stage"] and r["certificate"]]
        bound = stage["certificate"]
        penalty = sum(math.sqrt(2) * (2 / 3) * 9 * math.sqrt(u["kl"]) for u in own)  # A_max = 1, 1 / (1 - gamma)^2 = 9
        assert bound["occupancy"] == pytest.approx(penalty)
        assert bound["bound"] == pytest.approx(sum(u["surrogate"] for u in own) - penalty)
        assert bound["vacuous"] == (bound["bound"] <= -4 / 9)  # every reward came at the end: returns are within gamma^2
        assert stage["high_probability"]["bound"] <= bound["bound"]
        evaluations = [r["evaluation"]["mean_reward"] for r in rows if r["kind"] == "stage"]
        assert stage["improvement"] == pytest.approx(evaluations[stage["stage"]] - evaluations[stage["stage"] - 1])
        assert stage["return_improvement"] == pytest.approx(4 / 9 * stage["improvement"])
        assert stage["slack"] == pytest.approx(stage["return_improvement"] - bound["bound"])
        assert stage["violated"] == (stage["slack"] < 0)
        certain, radius = stage["high_probability"], stage["high_probability"]["concentration"]
        assert bool(own) == (penalty + radius > 0), "an accepted update has a penalty"
        parts = {"occupancy": penalty, "concentration": radius, "staleness": 0, "estimation": 0, "clip_bias": 0}
        assert certain["shares"] == pytest.approx({k: v / (penalty + radius) for k, v in parts.items()} if own else {})
        free = stage["distribution_free"]
        hoeffding = sum(0.2 * 3 * math.sqrt(2 * math.log(2 * 3 / 0.05) / u["groups"]) for u in own)  # three updates share 5%
        assert free["concentration"] == pytest.approx(hoeffding)
        assert free["clip_bias"] == pytest.approx(sum(3 * math.sqrt(2 * u["kl"]) for u in own))
        assert free["surrogate"] == pytest.approx(sum(u["surrogate_clipped"] for u in own))
        moved = [r for r in rows if r["kind"] == "update" and r["stage"] == stage["stage"] and r["certificate"]]
        modelled = bool(moved) and all(r["probe"] and r["probe"]["fisher"] for r in moved)
        assert (stage["achievable"] is not None) == modelled
        if modelled:
            fishers = [(r["probe"]["fisher"], r["delta"]) for r in moved]
            gain = sum(f["slope"] * math.sqrt(d) - f["smoothness"] / f["smallest_eigenvalue"] * d for f, d in fishers)
            assert stage["achievable"]["surrogate"] == pytest.approx(gain)
    assert any(stage["high_probability"]["shares"] for stage in report["stages"])
    assert report["calibration"]["rows"] == 2
    assert main(["certify", str(run)]) == 0
    assert "the paper's bound, in raw reward" in capsys.readouterr().out


def test_single_updates_are_certified_too(run: Path, capsys: Any) -> None:
    """thm:single with the whole failure probability; the gain is that of the next update's episodes."""
    report = certified(run, capsys)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "update"]
    moved = [(row, after) for row, after in zip(rows, [*rows[1:], None], strict=True) if row["certificate"]]
    assert moved and len(report["updates"]) == len(moved)
    z, measured = NormalDist().inv_cdf(0.95), 0
    for update, (row, after) in zip(report["updates"], moved, strict=True):
        assert (update["stage"], update["update"], update["agent"]) == (row["stage"], row["update"], row["agent"])
        terms = row["certificate"]
        bound = terms["surrogate"] - math.sqrt(2) * (2 / 3) * 9 * math.sqrt(terms["kl"])
        assert update["decision"] == row["decision"] and update["certificate"]["bound"] == pytest.approx(bound)
        assert update["high_probability"]["bound"] == pytest.approx(bound - z * terms["surrogate_standard_error"])
        assert update["by_turns"]["surrogate"] == terms["surrogate_undiscounted"]
        if after is None or after["stage"] != row["stage"]:
            assert update["improvement"] is update["return_improvement"] is update["slack"] is None
            continue
        gain, measured = after["reward_mean"] - row["reward_mean"], measured + 1
        assert update["improvement"] == pytest.approx(gain) and update["return_improvement"] == pytest.approx(4 / 9 * gain)
        error = math.hypot(row["reward_standard_error"], after["reward_standard_error"])
        assert update["improvement_standard_error"] == pytest.approx(error)
        assert update["slack"] == pytest.approx(4 / 9 * gain - bound)
    assert report["update_calibration"]["rows"] == report["update_by_turns_calibration"]["rows"] == measured > 0
    for stage in report["stages"]:
        own = [u for u in report["updates"] if u["stage"] == stage["stage"]]
        assert stage["certificate"]["bound"] == pytest.approx(sum(u["certificate"]["bound"] for u in own))
    assert main(["certify", str(run), "--updates"]) == 0
    said = capsys.readouterr().out
    assert f"{measured} update{'' if measured == 1 else 's'} with a measured improvement" in said
    assert all(f"{row['stage']}.{row['update']} {row['agent']}, {row['decision']} (thm:single)" in said for row, _ in moved)


def test_bounds_that_say_nothing_do_not_dilute_the_violations() -> None:
    def row(kl: float, improvement: float) -> Measured:
        return Measured(certify_stage([UpdateTerms(0.1, kl)], Setting(1.0, 0.2, 1.0)), improvement, 0.01)

    violated, kept, vacuous = row(0.01, -0.5), row(0.01, 0.5), row(9.0, 0.5)
    said = _words(calibrate([violated, kept, vacuous, vacuous]), "stage")
    assert "vacuous 50%, could certify" in said
    assert "violated 25% (50% of those that are not vacuous, 25% beyond the noise of the measurement)" in said
    assert "violated 50% (50% beyond" in _words(calibrate([violated, kept]), "stage"), "all of them say something"
    assert "violated 0% (0% beyond" in _words(calibrate([vacuous]), "stage"), "none does"


def test_an_update_that_used_episodes_again_is_certified_with_its_stage_only(edited: Any, capsys: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {"fresh_episodes": 0} if row["kind"] == "update" and row["update"] > 1 else {}

    report = certified(edited(change), capsys)
    assert report["updates"] and all(u["update"] == 1 and u["improvement"] is None for u in report["updates"])
    assert {s["theorem"] for s in report["stages"]} == {"cached episodes"}


def test_dependent_groups_are_bounded_by_blocks(edited: Any, capsys: Any) -> None:
    """lem:beta-block: L from every other block, and as many values as there are such blocks."""
    groups = [0.1, 0.2, 0.3, 0.4, 0.5]

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == "update" and row["certificate"]:
                row["certificate"] |= {"surrogate_clipped": 0.3, "surrogate_clipped_groups": groups, "groups": 5}
                row["certificate"] |= {"largest_weight": 1.75, "turn_kl": [1e-4] * 6}

    folder = edited(change)
    moved = [sum(bool(row["certificate"]) for row in rows) for rows in _updates_by_stage(folder)]
    assert any(moved)

    def found(*options: str) -> list[tuple[float, float | None]]:
        assert main(["certify", str(folder), "--json", *options]) == 0
        free = [stage["distribution_free"] for stage in json.loads(capsys.readouterr().out)["stages"]]
        return [(bound["surrogate"], bound["concentration"]) for bound in free]

    def radius(blocks: int, failure: float) -> float:
        return 1.75 * 0.2 * 6 * math.sqrt(2 * math.log(2 / failure) / blocks)  # six messages, more than 1 / (1 - gamma)

    whole, pairs = [(0.3, radius(5, 0.05 / 3))], [((0.1 + 0.3) / 2, radius(2, 0.05 / 3 - 2 * 0.001))]
    assert found() == [pytest.approx((n * whole[0][0], n * whole[0][1])) for n in moved]
    assert found("--beta", "0") == found()
    assert found("--beta", "0.001") == [pytest.approx((n * pairs[0][0], n * pairs[0][1])) for n in moved]
    assert found("--block", "2") == [pytest.approx((n * 0.15, n * radius(1, 0.05 / 3))) for n in moved]
    assert found("--block", "3") == [(pytest.approx(n * 0.3), None if n else 0) for n in moved]  # no two blocks of three


def _updates_by_stage(folder: Path) -> list[list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    return [[row for row in updates if row["stage"] == stage] for stage in (1, 2)]


def test_without_discount_nothing_is_certified_but_by_turns(run: Path, tmp_path: Path, capsys: Any) -> None:
    """What is logged then: def:kltok has a factor of 1 - gamma."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("discount: auto", "discount: 1.0"))
    rows = plain_rows(folder)
    for row in rows:
        if row.get("certificate"):
            row["certificate"] |= {"gamma": 1.0, "kl": 0.0, "surrogate": row["certificate"]["surrogate_undiscounted"]}
    write_rows(folder, rows)
    assert main(["certify", str(folder), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    moved = {row["stage"] for row in rows if row.get("certificate")}
    assert moved
    for stage in (stage for stage in stages if stage["stage"] in moved):
        for kind in ("certificate", "high_probability", "distribution_free", "achievable"):
            bound = stage[kind]
            assert bound is None or (bound["bound"] is None and bound["vacuous"] and not bound["can_certify"]), kind
        assert stage["by_turns"]["bound"] is not None
    assert main(["certify", str(folder)]) == 0
    assert "infinite without a discount" in " ".join(capsys.readouterr().out.split())


def test_the_gradients_signal_is_told_of_both_ends_of_a_run(run: Path, tmp_path: Path, capsys: Any) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    rows = plain_rows(folder)
    updates = [row for row in rows if row["kind"] == "update"]
    for share, row in zip((0.5, None, 0.25, -0.25, 0.125, 0.375), updates, strict=True):
        row["gradient_signal"] = share
    write_rows(folder, rows)
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gradient"] == {"signal": 0.2, "first quarter": 0.5, "last quarter": 0.375}


def test_a_sampling_error_that_is_not_known_is_not_a_missing_discount(run: Path, tmp_path: Path, capsys: Any) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    rows = plain_rows(folder)
    for row in rows:
        if row.get("certificate"):
            row["certificate"] |= {"surrogate_standard_error": None}
    write_rows(folder, rows)
    assert main(["certify", str(folder)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "without a discount" not in said and "the sampling error of L is not known" in said


def test_diagnose_reads_the_tables_from_the_run_alone(run: Path, capsys: Any) -> None:
    assert main(["diagnose", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "update"]
    (stale,) = report["staleness"]
    probes = [row["probe"] for row in updates if row["stage"] == 2]
    assert stale["stage"] == 2 and len(probes) == 3 and all(row["probe"] is None for row in updates if row["stage"] == 1)
    gaps = [probe["gap"] for probe in probes if probe["gap"]]
    assert stale["delta_stale"]["excess"] == pytest.approx(sum(g["value"] - g["null"] for g in gaps))
    assert stale["d_occ"]["value"] == pytest.approx(sum(p["context_shift"]["value"] for p in probes))
    assert [row["update"] for row in report["importance"]] == [2, 3]
    assert [row["update"] for row in report["context_drift"]] == [2, 3]
    assert {(row["estimator"], row["fraction"]) for row in report["monitors"]} == {
        (name, share) for name in ("exact", "k3", "k1") for share in (0.25, 0.5)
    }
    largest = [row["diagnostics"]["kl_messages"]["largest"] for row in updates if row["diagnostics"]["kl_messages"]]
    assert len(set(largest)) > 1 and report["kl_spread"]["messages"]["largest"] == max(largest)
    exact = [row["diagnostics"]["monitor"]["exact"]["25"]["deviations"] for row in updates if row["diagnostics"]["monitor"]]
    assert report["monitors"][0]["median"] == pytest.approx(np.median(exact))
    assert [row["estimator"] for row in report["kl_estimators"]] == ["exact", "k3", "k1"]
    accuracy = [row["evaluation"]["avg_at_k"] for row in rows if row["kind"] == "stage"]
    assert report["stability"]["deviation"] == pytest.approx(np.diff(accuracy).std(ddof=1))
    assert report["cost"]["rollout_episodes"] == 2 * 3 * 24 and report["cost"]["probe_episodes"] == 3 * 8
    assert report["cost"]["seconds"]["probe"] > 0 and report["cost"]["diagnostics_share"] > 0
    assert "coordination" in report["coordination"]
    assert main(["diagnose", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "KL estimators" in shown and "stability" in shown and "cost" in shown


Edit = Callable[[list[dict[str, Any]]], None]


@pytest.fixture
def edited(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """The run with its rows, or words of its recipe, changed."""

    def make(change: Edit = lambda rows: None, **words: str) -> Path:
        folder = tmp_path / "run"
        shutil.copytree(run, folder, ignore=shutil.ignore_patterns("adapters", "checkpoint", "episodes"))
        rows = plain_rows(run)
        change(rows)
        write_rows(folder, rows)
        recipe = folder / "recipe.yaml"
        for old, new in words.items():
            assert f"{old}:" in recipe.read_text()
            lines = recipe.read_text().splitlines()
            recipe.write_text("\n".join(line.split(old)[0] + f"{old}: {new}" if line.strip().startswith(f"{old}:") else line
                                        for line in lines) + "\n")  # fmt: skip
        return folder

    return make


def test_certify_without_an_accepted_update_is_one_line(edited: Callable[..., Path], capsys: Any) -> None:
    def refuse(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {"decision": "rejected", "alpha": None, "certificate": None} if row["kind"] == "update" else {}

    assert main(["certify", str(edited(refuse))]) == 2
    assert "nothing to certify" in capsys.readouterr().err


def moved(rows: list[dict[str, Any]], fresh: list[int], kl: float = 0.01) -> None:
    """Every update accepted with one KL, learned from a rollout of its own where `fresh` says so."""
    terms = next(row["certificate"] for row in rows if row["kind"] == "update" and row["certificate"])
    for row in rows:
        if row["kind"] == "update":
            row["fresh_episodes"] = row["episodes"] * fresh[row["update"] - 1]
            row["certificate"] = {**terms, "kl": kl, "surrogate": 0.1}


def certified(folder: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["certify", str(folder), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(
    ("fresh", "theorem", "occupancy", "staleness"),
    [
        ([1, 1, 1], "thm:stage", 3.0, None),
        ([1, 0, 1], "cached episodes", math.sqrt(2) + 1, 1.0),
        ([1, 0, 0], "cached episodes", math.sqrt(3), 3.0),
    ],
)
def test_what_bounds_a_stage_is_read_from_whose_episodes_it_used(
    edited: Any, capsys: Any, fresh: list[int], theorem: str, occupancy: float, staleness: float | None
) -> None:
    folder = edited(lambda rows: moved(rows, fresh))
    unit = math.sqrt(2) * (2 / 3) * 9 * 0.1
    for stage in certified(folder, capsys)["stages"]:
        assert stage["theorem"] == theorem and (stage["by_turns"] is None) == (theorem != "thm:stage")
        assert stage["certificate"]["occupancy"] == pytest.approx(occupancy * unit)
        if staleness is None:
            assert stage["stale"] is None
        else:
            assert stage["stale"]["occupancy"] == pytest.approx(3 * unit)
            assert stage["stale"]["staleness"] == pytest.approx(staleness * unit)
    assert main(["certify", str(folder)]) == 0
    assert ("thm:stage_stale would charge" in capsys.readouterr().out) == (staleness is not None)


@pytest.mark.parametrize(
    ("recombine", "theorem", "occupancy"), [(False, "thm:stage", 3.0), (True, "cached episodes", math.sqrt(3))]
)
def test_weights_make_a_stages_episodes_those_of_the_team_before_each_update(
    edited: Any, capsys: Any, recombine: bool, theorem: str, occupancy: float
) -> None:
    """Recombined, messages are weighted by themselves alone: L is of the team that played."""

    def weighted(rows: list[dict[str, Any]]) -> None:
        moved(rows, [1, 0, 0])
        next(row for row in rows if row["kind"] == "update" and row["update"] == 2)["certificate"]["largest_weight"] = 2.25

    folder = edited(weighted)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["training"] |= {"resampling": "importance"}
    recipe["team"] |= {"recombine": recombine, "router": {"kind": "blind", "rounds": 1}, "protocol": {"view": "per_agent"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    found = certified(folder, capsys)
    assert found["largest_weight"] == (None if recombine else 2.25)
    assert main(["certify", str(folder)]) == 0
    said = "have trajectory weights, so that L and the KL are of the team just before each update; the largest is 2.25."
    assert (said in " ".join(capsys.readouterr().out.split())) == (not recombine)
    for stage in found["stages"]:
        assert stage["theorem"] == theorem and (stage["by_turns"] is None) == recombine == (stage["stale"] is not None)
        assert stage["certificate"]["occupancy"] == pytest.approx(occupancy * math.sqrt(2) * (2 / 3) * 9 * 0.1)


def filled(rows: list[dict[str, Any]], fresh: list[int]) -> None:
    """Every number that the tables are made of, chosen here."""
    moved(rows, fresh)
    gap = {"value": 0.5, "null": 0.2, "signed": -0.3, "standard_error": 0.1, "stale": 0.0, "fresh": 0.3}
    fisher = {"messages": 8, "damping": 0.1, "slope": 2.0, "slope_in_sample": 3.0, "smallest_eigenvalue": 4.0, "smoothness": 8.0}
    weights = {"ess": 0.5, "p95": 2.0, "p99": 3.0, "largest": 4.0, "over_ten": 0.0, "mean": 1.5, "mean_standard_error": 0.1}
    probe = {"episodes": 8, "tokens": 50, "gap": gap, "context_shift": {"value": 0.4, "null": 0.1, "coupled": 0.2},
             "weights": weights, "token_shift": None, "fisher": fisher | {"step_kl": 0.02, "measured_kl": 0.02}}  # fmt: skip
    errors = {"surrogate_standard_error": 0.02, "surrogate_undiscounted_standard_error": 0.05}
    own = errors | {"surrogate_undiscounted": 0.3, "turn_kl": [0.02], "zeta_clip": 0.1, "zeta_ratio": 0.2, "zeta_norm": 0.3}
    for row in rows:
        if row["kind"] == "update":
            row["certificate"] |= own
            row |= {"probe": probe, "importance": None, "delta": 0.04, "kl_message_sum": 0.02, "sampled_tokens": 100}
            row["seconds"] = {"rollout": 6.0, "optimize": 4.0, "diagnostics": 1.0, "probe": 5.0}
        elif row["evaluation"]:
            row["evaluation"] |= {"mean_reward": 0.1 * row["stage"], "mean_reward_standard_error": 0.03 + 0.01 * row["stage"]}


def test_certify_with_numbers_chosen_by_hand(edited: Any, capsys: Any) -> None:
    second = certified(edited(lambda rows: filled(rows, [1, 1, 1])), capsys)["stages"][1]
    z, unit = NormalDist().inv_cdf(1 - 0.05 / 3), math.sqrt(2) * (2 / 3) * 9
    assert second["improvement"] == pytest.approx(0.1) and second["improvement_standard_error"] == pytest.approx(
        math.hypot(4, 5) / 100
    )
    assert second["high_probability"]["concentration"] == pytest.approx(3 * z * 0.02)
    assert second["by_turns"]["concentration"] == pytest.approx(3 * z * 0.05)
    assert second["by_turns"]["surrogate"] == pytest.approx(0.9) and second["by_turns"]["occupancy"] == 0
    assert second["by_turns_slack"] == pytest.approx(0.1 - (0.9 - 3 * z * 0.05))
    # kappa sqrt(delta) - a delta with a = 8 / 4; the radius is 0.04 a message, half of that as def:kltok counts
    assert second["achievable"]["surrogate"] == pytest.approx(3 * (2 * 0.2 - 2 * 0.04))
    assert second["achievable"]["occupancy"] == pytest.approx(3 * unit * math.sqrt(0.02))
    assert second["achievable"]["concentration"] == pytest.approx(3 * z * 0.02)


def test_weights_of_a_window_are_not_taken_for_those_from_the_stage_start(edited: Any, capsys: Any) -> None:
    def weighted(rows: list[dict[str, Any]]) -> None:
        filled(rows, [1, 1, 1])
        for row in rows:
            if row["kind"] == "update":
                row["importance"] = dict.fromkeys(row["probe"]["weights"], 9.0)

    assert main(["diagnose", str(edited(weighted)), "--json"]) == 0
    assert [row["mean"] for row in json.loads(capsys.readouterr().out)["importance"]] == [1.5, 1.5]


def test_diagnose_with_numbers_chosen_by_hand(edited: Any, capsys: Any) -> None:
    folder = edited(lambda rows: filled(rows, [1, 0, 1]))
    assert main(["diagnose", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["staleness"]
    assert first["delta_stale"] == pytest.approx({"value": 1.5, "null": 0.6, "excess": 0.9})
    assert second["delta_stale_paired"] == pytest.approx(3 * (0.3 - math.sqrt(2 / math.pi) * 0.1))
    assert second["d_occ"]["excess"] == pytest.approx(0.9) and second["d_occ_coupled"] == pytest.approx(0.6)
    by_place = report["staleness_by_update"][1]
    assert by_place["gap_signed"] == pytest.approx(-0.3)
    assert by_place["gap_signed_standard_error"] == pytest.approx(0.1 / math.sqrt(2))
    assert all(row["mean"] == 1.5 and row["mean_not_one"] == 2 for row in report["importance"])
    zeta = {row["what"]: row["mean"] for row in report["zeta"]}
    penalty = math.sqrt(2) * (2 / 3) * 9 * (math.sqrt(0.02) + 0.1)  # two updates from one rollout, then one
    assert zeta["proxy, per update"] == pytest.approx(0.6) and zeta["proxy, per stage"] == pytest.approx(1.8)
    assert zeta["share of the penalty, if it were charged"] == pytest.approx(3 * 1.8 / (3 * 1.8 + penalty))
    assert all(row["largest_gain"] == pytest.approx(2 * 0.2) and row["measured_gain"] == 0.1 for row in report["local_gain"])
    cost = report["cost"]
    assert cost["rollout_tokens"] == 4 * 100 and cost["probe_tokens"] == 6 * 50 and cost["rollout_episodes"] == 4 * 24
    assert cost["diagnostics_share"] == pytest.approx(0.1) and cost["probe_share"] == pytest.approx(0.5)


def test_diagnose_does_not_show_what_is_not_known_as_zero(edited: Any, capsys: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == "update":
                row["kl"]["k3"] = {"mean": None, "standard_error": None, "bound": None}
                row["diagnostics"]["messages_over_delta"] = None

    folder = edited(change)
    assert main(["diagnose", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    exact, k3, _ = report["kl_estimators"]
    assert exact["mean"] > 0 and exact["standard_error_over_exact"] == 1
    assert k3["mean"] is k3["standard_error"] is k3["standard_error_over_exact"] is None
    assert report["kl_spread"]["messages_over_delta"] is None and report["kl_spread"]["messages"]["p50"] > 0
    assert main(["diagnose", str(folder)]) == 0


@pytest.mark.parametrize("looked", [True, False])
def test_what_no_update_was_there_for_is_not_blamed_on_a_setting(edited: Any, capsys: Any, looked: bool) -> None:
    nothing = {"kl_messages": None, "kl_groups": None, "monitor": {}, "context_shift": None}

    def skip_all(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["kind"] == "update":
                row |= {"decision": "skipped", "kl": {}, "certificate": None}
                row["diagnostics"] = row["diagnostics"] | nothing if looked else None

    assert main(["diagnose", str(edited(skip_all)), "--json"]) == 0
    missing = json.loads(capsys.readouterr().out)["missing"]
    assert missing["kl_estimators"] == "every update was skipped"
    for name in ("kl_spread", "monitors", "context_drift"):
        assert ("diagnostics.from_updates" in missing[name]) != looked, missing[name]


def test_a_discount_of_the_users_own_counts_rewards_at_the_end(edited: Any, capsys: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        moved(rows, [1, 1, 1], kl=1e-4)
        for row in rows:
            if row["kind"] == "update":
                row["certificate"] |= {"gamma": 0.5, "surrogate_undiscounted": 0.4}
            else:
                row["evaluation"]["mean_return"] = 0.25 * row["evaluation"]["mean_reward"]

    report = certified(edited(change, discount="0.5"), capsys)
    assert report["end_discount"] == report["return_range"] == 0.25
    for stage in report["stages"]:
        assert stage["return_improvement"] == pytest.approx(0.25 * stage["improvement"])
        assert stage["certificate"]["occupancy"] == pytest.approx(3 * math.sqrt(2) * 0.5 * 4 * 0.01)


def test_episodes_that_ended_early_leave_returns_their_whole_range(edited: Any, capsys: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["kind"] == "update" and row["messages"])["messages"] -= 1

    assert certified(edited(change), capsys)["return_range"] == 1


def test_stages_that_were_not_evaluated_say_so(run: Path, edited: Any, capsys: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row |= {"evaluation": None} if row["kind"] == "stage" else {}

    hint = "evaluation.every_stages=1"
    assert main(["certify", str(edited(change))]) == 0 and hint in capsys.readouterr().out.replace("\n", "")
    assert main(["certify", str(run)]) == 0 and hint not in capsys.readouterr().out.replace("\n", "")


def test_a_row_being_written_is_no_row_yet(edited: Any, capsys: Any) -> None:
    whole = edited()
    expected = certified(whole, capsys)
    metrics = whole / "metrics.jsonl"
    with open(metrics, "ab") as file:
        file.write(metrics.read_bytes().splitlines()[-1][:40])
    assert certified(whole, capsys) == expected
    assert main(["diagnose", str(whole)]) == 0


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "other"}', '{"kind": "stage"}', "NaN", "\udcff"])
def test_a_damaged_row_is_one_line_that_names_it(edited: Any, capsys: Any, line: str) -> None:
    folder = edited()
    metrics = folder / "metrics.jsonl"
    first, *rest = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([first, line.encode(errors="surrogateescape"), *rest, b""]))
    for command in ("certify", "diagnose"):
        assert main([command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert "metrics.jsonl: line 2" in said and said.count("\n") == 1
    metrics.unlink()
    assert main(["certify", str(folder)]) == 2 and "metrics.jsonl: missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["certify", "diagnose"])
def test_a_team_of_the_registry_is_no_run(tmp_path: Path, capsys: Any, command: str) -> None:
    assert main([command, str(tmp_path / "column_sum")]) == 2
    said = capsys.readouterr().err
    assert "no run here" in said and said.count("\n") == 1


def test_what_cannot_be_certified_says_why(edited: Any, capsys: Any) -> None:
    def outside(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["kind"] == "update")["reward_mean"] = 1.5

    folder = edited(outside)
    assert main(["certify", str(folder)]) == 2 and "task.reward_range = [0, 1]" in capsys.readouterr().err
    assert main(["diagnose", str(folder)]) == 0
    (folder / "baseline.json").write_text("{}")
    assert main(["certify", str(folder)]) == 2 and "a run of `baseline`" in capsys.readouterr().err
    rows = plain_rows(folder)
    bare = [row | ({"certificate": None, "probe": None, "diagnostics": None} if row["kind"] == "update" else {}) for row in rows]
    write_rows(folder, bare)
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"]["zeta"] == "not measured in a run of `baseline`"
