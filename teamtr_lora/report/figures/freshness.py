"""Did the data stay fresh? How far the team moved away from the one that began the stage, and what that does to old episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    rows = [] if isinstance(run.diagnosis, str) else run.diagnosis.staleness_by_update
    names = {"Gap": ("gap", "$agent0"), "Gap from noise alone": ("gap_null", "$band1")}
    return _by_place(rows, names, "|stale - fresh| surrogate", "%{y:.4f}") if rows else PROBE


def context_drift(run: RunData) -> Drawn:
    rows = [] if isinstance(run.diagnosis, str) else run.diagnosis.context_drift
    names = {"contexts that differ": ("value", "$agent1"), "from noise alone": ("null", "$band3")}
    return _by_place(rows, names, "total variation", "%{y:.3f}") if rows else UPDATES


def _by_place(rows: Sequence[Mapping[str, Any]], names: Mapping[str, tuple[str, str]], y: str, hover: str) -> Drawing:
    """Bars beside each other by place in the stage; `names`: by what a bar is called, its key in the rows and its colour."""
    places = [f"update {row['update']}" for row in rows]
    traces = [
        bars(name, places, [row[key] for row in rows], color=color, hovertemplate=hover) for name, (key, color) in names.items()
    ]
    return Drawing(traces, axes("place in the stage", y, barmode="group", xaxis={"type": "category"}))


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
