"""Did the data stay fresh? How far the team moved away from the one that began the stage, and what that does to old episodes."""

from __future__ import annotations

from typing import Any

from teamtr_lora.report.figures.drawing import Drawing, Drawn, axes, bars, line, plain, two_panels
from teamtr_lora.report.run_data import RunData

PROBE = "Not measured in this run; diagnostics.probe_every_stages=1 measures it in every stage, on extra episodes."
UPDATES = "Not measured in this run; diagnostics.from_updates=true measures it where later updates have episodes of their own."
SHIFT = "Not measured in this run; diagnostics.probe_every_stages=1 with diagnostics.token_shift_ranks=10 measures it."


def staleness(run: RunData) -> Drawn:
    found = run.diagnosis
    if isinstance(found, str) or not found.staleness:
        return PROBE
    stages, noise = [row["stage"] for row in found.staleness], "the same from noise alone"
    stale, drift = ([row[name] for row in found.staleness] for name in ("delta_stale", "d_occ"))
    traces = [
        bars("stale surrogate (Delta_stale)", stages, [each["value"] for each in stale], color="$agent0"),
        bars(noise, stages, [each["null"] for each in stale], color="$band1"),
        bars("drift of contexts (D_occ)", stages, [each["value"] for each in drift], color="$agent1", yaxis="y2"),
        bars(noise, stages, [each["null"] for each in drift], color="$band3", yaxis="y2"),
    ]
    layout = two_panels("stage", "Delta_stale", "D_occ", share=0.42)
    return Drawing([trace | {"hovertemplate": "%{y:.4f}"} for trace in traces], layout | {"barmode": "group"})


def gap_by_place(run: RunData) -> Drawn:
    found = run.diagnosis
    if isinstance(found, str) or not found.staleness_by_update:
        return PROBE
    rows = found.staleness_by_update
    places = [f"update {row['update']}" for row in rows]
    traces = [
        bars("Gap", places, [row["gap"] for row in rows], color="$agent0", hovertemplate="%{y:.4f}"),
        bars("Gap from noise alone", places, [row["gap_null"] for row in rows], color="$band1", hovertemplate="%{y:.4f}"),
    ]
    return Drawing(traces, axes("place in the stage", "|stale - fresh| surrogate", barmode="group", xaxis={"type": "category"}))


def context_drift(run: RunData) -> Drawn:
    found = run.diagnosis
    if isinstance(found, str) or not found.context_drift:
        return UPDATES
    rows = found.context_drift
    places = [f"update {row['update']}" for row in rows]
    traces = [
        bars("contexts that differ", places, [row["value"] for row in rows], color="$agent1", hovertemplate="%{y:.3f}"),
        bars("from noise alone", places, [row["null"] for row in rows], color="$band3", hovertemplate="%{y:.3f}"),
    ]
    return Drawing(traces, axes("place in the stage", "total variation", barmode="group", xaxis={"type": "category"}))


def importance(run: RunData) -> Drawn:
    found = run.diagnosis
    if isinstance(found, str) or not found.importance:
        return PROBE
    rows = found.importance
    places = [f"update {row['update']}" for row in rows]
    traces = [bars("effective sample", places, [row["ess"] for row in rows], color="$accepted", hovertemplate="%{y:.0%}")]
    for key, name, color in (("p95", "95% of weights", "$agent0"), ("p99", "99%", "$agent3"), ("largest", "largest", "$agent1")):
        traces.append(line(name, places, [row[key] for row in rows], color=color, yaxis="y2", hovertemplate="weight %{y:.2f}"))
    layout = two_panels("place in the stage", "effective sample", "weight", share=0.42)
    layout["yaxis"] |= {"tickformat": ".0%", "range": [0, 1.05]}
    layout["xaxis"] |= {"type": "category"}
    return Drawing(traces, layout)


def token_shift(run: RunData) -> Drawn:
    found = run.diagnosis
    if isinstance(found, str) or not found.token_shift:
        return SHIFT
    shift = found.token_shift
    traces: list[dict[str, Any]] = []
    for name, words, color, axis in (
        ("in_region", "step taken", "$accepted", "y"),
        ("out_of_region", "out of region", "$rejected", "y2"),
    ):
        own = shift.get(name)
        if not own:
            continue
        ranks = [*(str(rank) for rank in range(1, len(own["before"]))), "rest"]
        flips = f"{words}: {own['flip_rate']:.1%} of first choices changed"
        traces.append(bars(flips, ranks, own["moved"], color=color, yaxis=axis, hovertemplate="moved %{y:.4f}"))
    who = f"rank of the token before ({plain(shift['agent'])}, stage {shift['stage']})"
    layout = two_panels(who, "in region", "out of region", share=0.44)
    layout["xaxis"] |= {"type": "category"}
    return Drawing(traces, layout)
