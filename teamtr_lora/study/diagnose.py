"""`diagnose`: the tables of a run's diagnostics, from its directory alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from teamtr_lora.algorithm.occupancy import Subsample, order_sensitivity, reliability, stability
from teamtr_lora.algorithm.trust_region import ESTIMATORS
from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.metrics import MetricsRow, StageRow, SwapRow, UpdateRow, evaluated_as_it_is, first_and_now
from teamtr_lora.runs.stored_run import StoredRun, read_run
from teamtr_lora.study.certified import StageCertificate
from teamtr_lora.study.certify import certify_rows
from teamtr_lora.study.verdict import diagnose_verdict

HALF_NORMAL = math.sqrt(2 / math.pi)  # E|x| of x ~ N(0, 1)
PROBE = "not measured; set diagnostics.probe_every_stages=1"
UPDATES = "not measured; set diagnostics.from_updates"
SKIPPED = "every update was skipped"
ACCEPTED = "no update was accepted"


@dataclass(frozen=True)
class RunDiagnosis:
    """One table a field. `missing` says, for each that has nothing, why."""

    staleness: list[dict[str, Any]]  # by probed stage: Delta_stale and D_occ with their nulls
    staleness_by_update: list[dict[str, Any]]  # by place in the stage's order
    context_drift: list[dict[str, Any]]  # by place, from the training rollouts themselves
    importance: list[dict[str, Any]]  # by place: weights from the stage's first team
    kl_estimators: list[dict[str, Any]]
    kl_spread: dict[str, Any]
    monitors: list[dict[str, Any]]  # by estimator and share of token positions
    zeta: list[dict[str, Any]]
    clipping: dict[str, float | None]
    gradient: dict[str, float | None]
    stability: dict[str, float]
    coordination: dict[str, Any]
    token_shift: dict[str, Any]
    order: dict[str, Any]
    local_gain: list[dict[str, Any]]  # thm:info-lower-stage, by probed update
    cost: dict[str, Any]
    missing: dict[str, str]
    verdict: list[str]  # in plain words, what to do next last


def diagnose_run(folder: Path) -> RunDiagnosis:
    stored = read_run(folder)
    return diagnose_rows(stored, stored.rows())


def diagnose_rows(stored: StoredRun, rows: Sequence[MetricsRow]) -> RunDiagnosis:
    """`diagnose_run` for those who have the run's rows."""
    folder, recipe = stored.path, stored.recipe
    made = [row for row in rows if isinstance(row, UpdateRow)]
    updates = _of_stages(rows)
    stages = [row for row in rows if isinstance(row, StageRow)]
    if not made:
        raise UserError(f"{folder}: no update has been made yet, so there is nothing to diagnose; let train finish one")
    if not updates:
        raise UserError(f"{folder}: a swap cut the only stage short, so there is nothing to diagnose; let train finish one")
    missing: dict[str, str] = {}

    def known(name: str, reason: str, make: Callable[[], Any]) -> Any:
        found = make()
        if not found:
            ours = reason == ACCEPTED or reason.startswith((PROBE, UPDATES))
            missing[name] = "not measured in a run of `baseline`" if stored.baseline and ours else reason
        return found

    evaluated = "needs evaluations of at least three stages; set evaluation.every_stages=1"
    looked = any(row.diagnostics for row in updates)  # where it was, what is missing had no update to be measured on
    drift = "no later update had a rollout of its own" if looked else f"{UPDATES}, with a rollout for later updates too"
    not_judged = "the task does not judge single messages" if evaluated_as_it_is(rows) else "this team was not evaluated"
    return RunDiagnosis(
        staleness=known("staleness", PROBE, lambda: staleness(updates)),
        staleness_by_update=_staleness_by_update(updates),
        context_drift=known("context_drift", drift, lambda: _drift(updates)),
        importance=known("importance", PROBE, lambda: _importance(updates)),
        kl_estimators=known("kl_estimators", SKIPPED, lambda: _estimators(updates)),
        kl_spread=known("kl_spread", SKIPPED if looked else UPDATES, lambda: _kl_spread(updates)),
        monitors=known("monitors", SKIPPED if looked else UPDATES, lambda: _monitors(updates)),
        zeta=known("zeta", ACCEPTED, lambda: _zeta(updates, _certified(stored, rows))),
        clipping={
            "ratio": _mean([row.ratio_clip_rate for row in updates]),
            "advantage": _mean([row.advantage_clip_rate for row in updates]),
            "advantage_overflow": _mean([row.advantage_overflow for row in updates]),
        },
        gradient=known("gradient", "needs updates whose gradient has several micro-batches", lambda: _gradient(updates)),
        stability=known("stability", evaluated, lambda: rise_stability(stages)),
        coordination=known("coordination", not_judged, lambda: _coordination(evaluated_as_it_is(rows))),
        token_shift=known("token_shift", f"{PROBE} and diagnostics.token_shift_ranks", lambda: _token_shift(updates)),
        order=known("order", "needs accepted updates at two places of the order", lambda: _order(updates)),
        local_gain=known("local_gain", f"{PROBE} and diagnostics.fisher_messages", lambda: _local_gain(updates)),
        cost=_cost(made, stages[-1] if stages else None, recipe.training.matched),
        missing=missing,
        verdict=diagnose_verdict(
            updates,
            first_and_now(rows),
            fixed_rate=recipe.training.learning_rate != "auto",
            rate_falls=recipe.training.rate_changes,
            estimator=recipe.trust_region.estimator,
        ),
    )


def _of_stages(rows: Sequence[MetricsRow]) -> list[UpdateRow]:
    """All updates but those of a stage that a swap cut short: such a stage was begun anew."""
    kept: list[UpdateRow] = []
    for row in rows:
        if isinstance(row, UpdateRow):
            kept.append(row)
        elif isinstance(row, SwapRow):
            kept = [update for update in kept if update.stage <= row.stage]
    return kept


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None where there are none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _gradient(updates: Sequence[UpdateRow]) -> dict[str, float | None]:
    """Single updates say little: means over all, and over both ends of the run."""
    shares = [row.gradient_signal for row in updates if row.gradient_signal is not None]
    quarter = max(1, len(shares) // 4)
    ends = {"first quarter": _mean(shares[:quarter]), "last quarter": _mean(shares[-quarter:])}
    return {"signal": _mean(shares)} | ends if shares else {}


def staleness(updates: Sequence[UpdateRow]) -> list[dict[str, Any]]:
    """By probed stage. `delta_stale_paired` takes off what the noise of |stale - fresh| alone would give."""
    found = []
    for stage in sorted({row.stage for row in updates if row.probe}):
        own = [row.probe for row in updates if row.stage == stage and row.probe]
        gaps = [probe.gap for probe in own if probe.gap]
        value, null = math.fsum(g.value for g in gaps), math.fsum(g.null for g in gaps)
        moved = math.fsum(p.context_shift.value for p in own)
        still = math.fsum(p.context_shift.null for p in own)
        found.append(
            {
                "stage": stage,
                "accepted": len(gaps),
                "delta_stale": {"value": value, "null": null, "excess": value - null},
                "delta_stale_paired": math.fsum(abs(g.signed) - HALF_NORMAL * g.standard_error for g in gaps),
                "d_occ": {"value": moved, "null": still, "excess": moved - still},
                "d_occ_coupled": math.fsum(p.context_shift.coupled or 0.0 for p in own),
            }
        )
    return found


def _by_place(updates: list[UpdateRow]) -> list[tuple[int, list[UpdateRow]]]:
    return [(place, [row for row in updates if row.update == place]) for place in sorted({row.update for row in updates})]


def _staleness_by_update(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    found = []
    for place, own in _by_place(updates):
        gaps = [row.probe.gap for row in own if row.probe and row.probe.gap]
        shifts = [row.probe.context_shift for row in own if row.probe]
        if shifts:
            found.append(
                {
                    "update": place,
                    "probes": len(shifts),
                    "accepted": len(gaps),
                    "gap": _mean([g.value for g in gaps]),
                    "gap_null": _mean([g.null for g in gaps]),
                    "gap_signed": _mean([g.signed for g in gaps]),
                    "gap_signed_standard_error": (
                        math.sqrt(math.fsum(g.standard_error**2 for g in gaps)) / len(gaps) if gaps else None
                    ),
                    "shift": _mean([s.value for s in shifts]),
                    "shift_null": _mean([s.null for s in shifts]),
                    "shift_coupled": _mean([s.coupled or 0.0 for s in shifts]),
                }
            )
    return found


def _drift(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    found = []
    for place, own in _by_place(updates):
        shifts = [row.diagnostics.context_shift for row in own if row.diagnostics and row.diagnostics.context_shift]
        if shifts:
            value, null = fmean(s.value for s in shifts), fmean(s.null for s in shifts)
            found.append({"update": place, "stages": len(shifts), "value": value, "null": null, "excess": value - null})
    return found


def _importance(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    """Means over stages; `largest` is the largest of all. Of the weights that were trained with, where an update learned from the
    stage's first episodes: those of a window of rollouts begin elsewhere."""
    found = []
    for place, own in _by_place(updates):
        weights = [(None if row.fresh_episodes else row.importance) or (row.probe.weights if row.probe else None) for row in own]
        known = [w for w in weights if w is not None]
        if known and place > 1:
            row = {name: _mean([w[name] for w in known]) for name in known[0]}
            far = [abs(w["mean"] - 1) > 3 * w["mean_standard_error"] + 1e-6 for w in known]
            found.append(
                {"update": place, "stages": len(known)}
                | row
                | {"largest": max(w["largest"] for w in known), "mean_not_one": sum(far)}
            )
    return found


def _estimators(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    found = []
    for name in ESTIMATORS:
        readings = [row.kl[name] for row in updates if name in row.kl]
        errors = [r.standard_error for r in readings if r.standard_error is not None]
        exact = [error for row in updates if name in row.kl and (error := row.kl["exact"].standard_error)]
        if readings:
            found.append(
                {
                    "estimator": name,
                    "updates": len(readings),
                    "mean": _mean([r.mean for r in readings]),
                    "standard_error": _mean(errors),
                    "standard_error_over_exact": fmean(errors) / fmean(exact) if errors and exact else None,
                }
            )
    return found


def _kl_spread(updates: list[UpdateRow]) -> dict[str, Any]:
    """Means over updates of each update's quantiles, and the largest of all."""
    known = [row.diagnostics for row in updates if row.diagnostics and row.diagnostics.kl_messages]
    found: dict[str, Any] = {}
    for name in ("kl_messages", "kl_groups"):
        spreads = [getattr(d, name) for d in known if getattr(d, name)]
        if spreads:
            quantiles: dict[str, Any] = {q: _mean([getattr(s, q) for s in spreads]) for q in ("p50", "p90", "p99")}
            found[name.removeprefix("kl_")] = quantiles | {"largest": max(s.largest for s in spreads)}
    if found:
        found["messages_over_delta"] = _mean([d.messages_over_delta for d in known])
    return found


def _monitors(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    known = [row.diagnostics.monitor for row in updates if row.diagnostics]
    found = []
    for name in ESTIMATORS:
        for share in sorted({share for monitor in known for share in monitor.get(name, {})}, key=float):
            parts = [monitor[name][share] for monitor in known if name in monitor]
            summary = reliability(float(share) / 100, [Subsample(part.deviations, part.flips) for part in parts])
            found.append({"estimator": name, "updates": len(parts), **asdict(summary)})
    return found


def _zeta(updates: list[UpdateRow], stages: list[StageCertificate]) -> list[dict[str, Any]]:
    """tab:zeta-proxy: per update, per stage, and beside the certificate's penalty, in units of the normalised advantage."""
    terms = [(row.stage, row.certificate) for row in updates if row.certificate]
    if not terms:
        return []
    columns = {name: [getattr(t, f"zeta_{name}") for _, t in terms] for name in ("clip", "ratio", "norm")}
    columns["proxy"] = [math.fsum(parts) for parts in zip(*columns.values(), strict=True)]
    by_stage = {
        stage: math.fsum(z for (s, _), z in zip(terms, columns["proxy"], strict=True) if s == stage) for stage, _ in terms
    }
    gamma = terms[0][1].gamma
    decisions = 1 / (1 - gamma) if gamma < 1 else math.inf
    shares = [
        charged / (charged + s.certificate.penalty)
        for s in stages
        if s.stage in by_stage and 0 < (charged := decisions * by_stage[s.stage]) < math.inf
    ]
    rows = [(f"{name}, per update", values) for name, values in columns.items()]
    rows += [("proxy, per stage", list(by_stage.values())), ("share of the penalty, if it were charged", shares)]
    return [
        {"what": what, "mean": _mean(values), "p50": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
        for what, values in rows
        if values
    ]


def _certified(stored: StoredRun, rows: Sequence[MetricsRow]) -> list[StageCertificate]:
    """Empty where nothing can be certified, or not yet; `certify` says why."""
    try:
        return certify_rows(stored, rows).stages
    except UserError:
        return []


def rise_stability(stages: Sequence[StageRow]) -> dict[str, float]:
    """The spread of the rise in accuracy from one evaluation to the next; empty with fewer than three evaluations."""
    evaluations = [row.evaluation for row in stages if row.evaluation]
    if len(evaluations) < 3 or min(e["episodes"] for e in evaluations) < 2:
        return {}
    found = stability([e["avg_at_k"] for e in evaluations], min(e["episodes"] for e in evaluations))
    return {"deviation": found.deviation, "floor": found.floor, "excess": found.excess, "evaluations": len(evaluations)}


def _coordination(evaluated: list[StageRow | SwapRow]) -> dict[str, Any]:
    last = evaluated[-1] if evaluated else None
    if last is None or last.evaluation is None or not last.evaluation["coordination"]:
        return {}
    keys = ("coordination", "coordination_given_success")
    return {"stage": last.stage, "accuracy": last.evaluation["avg_at_k"], **{key: last.evaluation[key] for key in keys}}


def _token_shift(updates: list[UpdateRow]) -> dict[str, Any]:
    """The newest token shift that a probe measured."""
    for row in reversed(updates):
        if row.probe and row.probe.token_shift:
            shifts = {name: shift.model_dump() for name, shift in row.probe.token_shift.items()}
            return {"stage": row.stage, "agent": row.agent, **shifts}
    return {}


def _order(updates: list[UpdateRow]) -> dict[str, Any]:
    """Whether the undiscounted surrogate of accepted updates depends on their place in the order."""
    rows = [(row.update, row.agent, row.certificate.surrogate_undiscounted) for row in updates if row.certificate]
    if len({place for place, _, _ in rows}) < 2:
        return {}
    places, agents, gains = zip(*rows, strict=True)
    found = order_sensitivity(places, agents, gains)
    return {"updates": len(rows), "excess": found.excess, **asdict(found)}


def _local_gain(updates: list[UpdateRow]) -> list[dict[str, Any]]:
    return [
        {
            "stage": row.stage,
            "agent": row.agent,
            "delta": row.delta,
            "largest_gain": row.probe.fisher.slope * math.sqrt(row.delta),
            "measured_gain": row.certificate.surrogate,
            **row.probe.fisher.model_dump(),
        }
        for row in updates
        if row.probe and row.probe.fisher and row.certificate
    ]


def _cost(updates: list[UpdateRow], last: StageRow | None, matched: str) -> dict[str, Any]:
    phases: dict[str, float] = {}
    for row in updates:
        for phase, seconds in row.seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    own = math.fsum(s for phase, s in phases.items() if phase not in ("diagnostics", "probe"))
    return {
        "matched": matched,
        "updates": len(updates),
        "rollout_episodes": sum(row.fresh_episodes for row in updates),
        "rollout_tokens": sum(row.sampled_tokens for row in updates if row.fresh_episodes),
        "trained_tokens_per_epoch": sum(row.trained_tokens for row in updates),
        "sampled_tokens_with_evaluation": last.sampled_tokens if last else None,
        "probe_episodes": sum(row.probe.episodes for row in updates if row.probe),
        "probe_tokens": sum(row.probe.tokens for row in updates if row.probe),
        "seconds": phases,
        "diagnostics_share": phases.get("diagnostics", 0.0) / own if own else 0.0,
        "probe_share": phases.get("probe", 0.0) / own if own else 0.0,
    }
