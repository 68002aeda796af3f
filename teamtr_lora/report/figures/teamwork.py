"""Do the agents work together, and what did replacing one of them do?"""

from __future__ import annotations

import math

from teamtr_lora.report.figures.drawing import Drawing, Drawn, axes, bars, errors, line, log_axis, plain
from teamtr_lora.report.run_data import RunData


def coordination(run: RunData) -> Drawn:
    rows = [(row.stage, row.evaluation) for row in run.evaluated if row.evaluation and row.evaluation["coordination"]]
    if not rows:
        return "This task judges the team's answer only, so it cannot be said who was right; Task.message_correct would tell."
    traces = []
    last = rows[-1][1]
    chance = [math.prod([e["agents"][agent]["value"] for agent in run.agents if e["agents"].get(agent)]) for _, e in rows]
    stages = [stage for stage, _ in rows]
    together = line("all right together", stages, [e["coordination"]["value"] for _, e in rows], color="$team",
                    hovertemplate="%{y:.1%}")  # fmt: skip
    together["error_y"] = errors([e["coordination"]["standard_error"] for _, e in rows])
    traces.append(together)
    if all(last["agents"].get(agent) for agent in run.agents):
        traces.append(line("if they were right independently", stages, chance, color="$muted", dash="dash",
                           hovertemplate="%{y:.1%}"))  # fmt: skip
    layout = axes("stage", "share of held-out episodes", yaxis={"tickformat": ".0%", "rangemode": "tozero"})
    return Drawing(traces, layout)


NO_SWAP = "No agent of this run was replaced; teamtr-lora swap replaces one and records it."


def alignment(run: RunData) -> Drawn:
    aligned = [row for row in run.swaps if row.curve]
    if not run.swaps:
        return NO_SWAP
    if not aligned:
        return "The replacement was not aligned first; swap.stage0=true aligns it and records the way."
    traces = []
    for number, row in enumerate(aligned):
        name = f"{row.agent}, after stage {row.stage}"
        color = f"$agent{number % 6}"
        steps = [step for step, _ in row.curve]
        traces.append(line(name, steps, [kl if kl < 1e29 else None for _, kl in row.curve], color=color,
                           hovertemplate="step %{x}: KL %{y:.3g}"))  # fmt: skip
        if row.delta_align:
            traces.append(line("radius of the alignment", [steps[0], steps[-1]], [row.delta_align] * 2, color="$limit",
                               dash="dash", mode="lines", showlegend=not number, hovertemplate="radius %{y:.3g}"))  # fmt: skip
    layout = axes("step of the alignment", "KL(old || new), held out", yaxis=log_axis(traces))
    return Drawing(traces, layout)


def shock(run: RunData) -> Drawn:
    played = [row for row in run.swaps if row.evaluation_before and row.evaluation]
    if not played:
        return NO_SWAP if not run.swaps else "The replacements of this run were not measured on held-out items."
    places = [f"{plain(row.agent)}, after stage {row.stage}" for row in played]
    aligned = [row.evaluation if row.how == "stage0" else None for row in played]
    direct = [row.evaluation_direct or (row.evaluation if row.how == "direct" else None) for row in played]
    traces = []
    for name, color, scores in (
        ("before", "$muted", [row.evaluation_before for row in played]),
        ("swapped in as it came", "$rejected", direct),
        ("aligned first", "$accepted", aligned),
    ):
        if any(scores):
            heights = [score["avg_at_k"] if score else None for score in scores]
            trace = bars(name, places, heights, color=color, hovertemplate="%{y:.1%}")
            trace["error_y"] = errors([score["standard_error"] if score else None for score in scores])
            traces.append(trace)
    layout = axes("", "held-out accuracy", barmode="group", yaxis={"tickformat": ".0%"}, xaxis={"type": "category"})
    return Drawing(traces, layout)
