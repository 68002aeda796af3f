"""Is the team better? Accuracy on held-out items, and reward on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teamtr_lora.report.figures.drawing import (
    FEW,
    Z95,
    Drawing,
    Drawn,
    Numbers,
    agent_color,
    axes,
    band,
    errors,
    line,
    numbered,
    scattered,
    update_hover,
)
from teamtr_lora.report.run_data import RunData

PERCENT = {"tickformat": ".0%", "rangemode": "tozero"}


def accuracy(run: RunData) -> Drawn:
    rows = [(row.stage, row.evaluation) for row in run.evaluated if row.evaluation]
    if not rows:
        return "The team has not been measured on held-out items yet; the first evaluation comes before the first update."
    stages = [stage for stage, _ in rows]
    means, deviations = [e["avg_at_k"] for _, e in rows], [e["standard_error"] for _, e in rows]
    team = line("team", stages, means, color="$team", hovertemplate="%{y:.1%}<extra>team</extra>", error_y=errors(deviations))
    team["line"]["width"] = 3
    traces = interval(stages, means, deviations) if len(stages) > FEW else []
    traces.append(team)
    for agent in run.agents:
        known = [(stage, e["agents"][agent]) for stage, e in rows if e["agents"].get(agent)]
        if known:
            own = line(f"{agent} alone", [stage for stage, _ in known], [m["value"] for _, m in known],
                       color=agent_color(run.agents, agent), dash="dot", hovertemplate="%{y:.1%}")  # fmt: skip
            own["error_y"] = errors([m["standard_error"] for _, m in known])
            traces.append(own)
    return Drawing(traces, axes("stage", "held-out accuracy", yaxis=PERCENT))


def reward(run: RunData) -> Drawn:
    if not run.updates:
        return "No update has been made yet; every update records the reward of its own episodes."
    traces = []
    for agent in run.agents:
        own = [(place, row) for place, row in numbered(run.updates) if row.agent == agent and row.fresh_episodes]
        if not own:
            continue
        hover, said = "%{text}<br>reward %{y:.3f}<extra></extra>", [update_hover(row) for _, row in own]
        traces.append(scattered(f"before {agent}'s update", [place for place, _ in own], [row.reward_mean for _, row in own],
                                color=agent_color(run.agents, agent), text=said, hovertemplate=hover,
                                error_y=errors([row.reward_standard_error for _, row in own])))  # fmt: skip
    fresh = [(place, row.reward_mean) for place, row in numbered(run.updates) if row.fresh_episodes]
    smooth = moving_mean([value for _, value in fresh], max(3, len(fresh) // 12))
    places = [place for place, _ in fresh]
    traces.append(line("moving mean", places, smooth, color="$team", mode="lines", hovertemplate="%{y:.3f}"))
    return Drawing(traces, axes("update", "mean reward of its episodes", yaxis={"rangemode": "tozero"}))


def interval(x: Sequence[int], means: Sequence[float], deviations: Numbers) -> list[dict[str, Any]]:
    """What error bars would say, as a band."""
    low, high = ([m + side * Z95 * (d or 0.0) for m, d in zip(means, deviations, strict=True)] for side in (-1, 1))
    return band("95% interval", x, low, high, color="$band2")


def moving_mean(values: Sequence[float], width: int) -> Numbers:
    """Of the values around each one; fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(0, i - width // 2), min(len(values), i + width // 2 + 1)) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in ends]
