"""The certificate's terms against a brute-force recomputation, and `certify` on whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.cli import main
from teamtr_lora.training import update as update_module
from teamtr_lora.training.update import AgentUpdater

SMALL = ["training.stages=2", "rollout.items_per_stage=8", "rollout.episodes_per_item=4", "training.inner_epochs=2",
         "evaluation.items=32", "evaluation.every_stages=1", "diagnostics.probe_every_stages=2", "diagnostics.probe_items=4",
         "diagnostics.probe_episodes_per_item=2", "diagnostics.fisher_messages=8"]  # fmt: skip
RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")


def logp(playable: Any, message: Any, temperature: float) -> float:
    ids = torch.tensor([message.prompt_ids + message.token_ids])
    with torch.no_grad():
        logits = playable.bank.model(input_ids=ids, use_cache=False).logits[0, len(message.prompt_ids) - 1 : -1].double()
    return float(torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(message.token_ids)[:, None]).sum())


def test_terms_are_those_of_the_held_out_episodes(make_team: Any, config: Any, accelerator: Any, twins: Any) -> None:
    episodes = twins
    playable, settings = make_team(), config()
    updater = AgentUpdater(playable, settings, accelerator)
    before = playable.bank.snapshot("left")
    outcome = updater.update("left", episodes, 0)
    assert outcome.accepted and outcome.terms is not None
    advantages = outcome.advantages.clipped_E.tolist()
    informative = {e.group for e, a in zip(episodes, advantages, strict=True) if a}
    _, groups = update_module._hold_out(episodes, informative, settings.trust_region, 0)
    held = [e for e in episodes if e.group in groups]
    after = playable.bank.snapshot("left")
    playable.bank.activate("left")
    temperature, totals = settings.rollout.temperature, {"discounted": [], "raw": []}
    for episode in held:
        mates = [e for e in held if e.group == episode.group and e is not episode]
        ratio = 0.0
        for message in (m for m in episode.messages if m.agent == "left"):
            new = logp(playable, message, temperature)
            playable.bank.restore("left", before)
            ratio += math.exp(new - logp(playable, message, temperature)) - 1
            playable.bank.restore("left", after)
        for name, value in (("discounted", lambda e: e.discounted_return(updater.discount)), ("raw", lambda e: e.reward)):
            totals[name].append(ratio * (value(episode) - np.mean([value(e) for e in mates])))
    terms = outcome.terms
    assert terms.surrogate == pytest.approx(np.mean(totals["discounted"]), abs=1e-6)
    assert terms.surrogate_undiscounted == pytest.approx(np.mean(totals["raw"]), abs=1e-6)
    assert terms.groups == len(groups) and len(terms.turn_kl) == 1
    accepted = outcome.readings[outcome.step.accepted.alpha]  # type: ignore[union-attr]
    assert terms.turn_kl[0] == pytest.approx(accepted.message_sum_kl, rel=1e-6)
    assert terms.kl == accepted.discounted_kl


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
        assert bound["vacuous"] == (bound["bound"] <= -1)
        assert stage["high_probability"]["bound"] <= bound["bound"]
        evaluations = [r["evaluation"]["mean_reward"] for r in rows if r["kind"] == "stage"]
        assert stage["improvement"] == pytest.approx(evaluations[stage["stage"]] - evaluations[stage["stage"] - 1])
        moved = [r for r in rows if r["kind"] == "update" and r["stage"] == stage["stage"] and r["certificate"]]
        modelled = bool(moved) and all(r["probe"] and r["probe"]["fisher"] for r in moved)
        assert (stage["achievable"] is not None) == modelled
        if modelled:
            fishers = [(r["probe"]["fisher"], r["delta"]) for r in moved]
            gain = sum(f["slope"] * math.sqrt(d) - f["smoothness"] / f["smallest_eigenvalue"] * d for f, d in fishers)
            assert stage["achievable"]["surrogate"] == pytest.approx(gain)
    assert report["calibration"]["rows"] == 2
    assert main(["certify", str(run)]) == 0
    assert "certificates in raw reward" in capsys.readouterr().out


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
    exact = [row["diagnostics"]["monitor"]["exact"]["25"]["deviations"] for row in updates if row["diagnostics"]["monitor"]]
    assert report["monitors"][0]["median"] == pytest.approx(np.median(exact))
    assert [row["estimator"] for row in report["kl_estimators"]] == ["exact", "k3", "k1"]
    accuracy = [row["evaluation"]["avg_at_k"] for row in rows if row["kind"] == "stage"]
    assert report["stability"]["deviation"] == pytest.approx(np.diff(accuracy).std(ddof=1))
    assert report["cost"]["rollout_episodes"] == 2 * 3 * 32 and report["cost"]["probe_episodes"] == 3 * 8
    assert report["cost"]["seconds"]["probe"] > 0 and report["cost"]["diagnostics_share"] > 0
    assert "coordination" in report["coordination"]
    assert main(["diagnose", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "KL estimators" in shown and "stability" in shown and "cost" in shown


def test_certify_without_an_accepted_update_is_one_line(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    assert main(["train", RECIPE, *SMALL, "training.stages=1", "training.min_informative_groups=999", "--run-dir", str(run)]) == 0
    assert main(["certify", str(run)]) == 2
    assert "nothing to certify" in capsys.readouterr().err
