"""Several runs beside each other. Runs that differ in their seed alone are one line: their mean, and its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teamtr_lora.report.figures.drawing import DECISIONS, Drawing, Drawn, Figure, axes, band, bars, line, plain
from teamtr_lora.report.run_data import RunData
from teamtr_lora.report.seeds import Kind, differences, over_seeds


def accuracy_by_kind(kinds: Sequence[Kind]) -> Drawn:
    layout = axes("stage", "held-out accuracy", yaxis={"tickformat": ".0%"})
    return _by_kind(kinds, _accuracies, layout, "%{y:.1%}", within=True) or "No run has been measured on held-out items yet."


def reward_by_kind(kinds: Sequence[Kind]) -> Drawn:
    layout = axes("stage", "mean reward of its episodes")
    return _by_kind(kinds, _rewards, layout, "%{y:.3f}") or "No run has made an update yet."


def accuracy_by_tokens(kinds: Sequence[Kind]) -> Drawn:
    traces = []
    for number, kind in enumerate(kinds):
        for place, run in enumerate(kind.runs):
            rows = [(row.sampled_tokens, row.evaluation["avg_at_k"]) for row in run.evaluated if row.evaluation]
            if rows:
                color, hover = f"$agent{number % 6}", "%{x:,} tokens: %{y:.1%}"
                traces.append(line(kind.label, [x for x, _ in rows], [y for _, y in rows], color=color, hovertemplate=hover,
                                   legendgroup=str(number), showlegend=not place))  # fmt: skip
    if not traces:
        return "No run has been measured on held-out items yet."
    return Drawing(traces, axes("tokens sampled so far", "held-out accuracy", yaxis={"tickformat": ".0%"}))


def decisions_by_kind(kinds: Sequence[Kind]) -> Drawn:
    names = [plain(kind.label) for kind in kinds]
    traces = []
    for decision in DECISIONS:
        shares = []
        for kind in kinds:
            updates = [row for run in kind.runs for row in run.updates]
            shares.append(sum(row.decision == decision for row in updates) / len(updates) if updates else None)
        if any(shares):
            traces.append(bars(decision, names, shares, color=f"${decision}", hovertemplate="%{y:.0%} " + decision))
    if not traces:
        return "No run has made an update yet."
    return Drawing(traces, axes("", "share of updates", barmode="stack", yaxis={"tickformat": ".0%"}, xaxis={"type": "category"}))


def paired_differences(kinds: Sequence[Kind]) -> Drawn:
    found = differences(kinds)
    if len(kinds) < 2:
        return "All runs are of one recipe and differ in their seed at most: there is nothing to compare them with."
    if not found:
        return "The runs were not measured on the same held-out items, so they are not compared item by item."
    traces = []
    for number, each in enumerate(found, start=1):
        test, color = each.test, f"$agent{number % 6}"
        up, down = (None if end is None else abs(end - test.difference) for end in (test.high, test.low))
        arms = {"type": "data", "symmetric": False, "array": [up], "arrayminus": [down]}
        said = f"p = {test.p_value:.2g}" if test.p_value >= 0.001 else "p < 0.001"
        said += "; no interval" if test.no_interval else ""  # the words above the figures say why
        traces.append(line(f"{each.second} ({said})", [test.difference], [plain(each.second)], color=color, mode="markers",
                           error_x=arms, hovertemplate="%{x:+.1%}"))  # fmt: skip
    layout = axes(f"accuracy less that of {plain(found[0].first)}", "", yaxis={"type": "category", "showticklabels": False})
    layout["xaxis"] |= {"tickformat": "+.0%", "zeroline": True}
    layout["showlegend"] = True  # of a single trace, too: its name is nowhere else
    return Drawing(traces, layout)


COMPARED = "Side by side"
COMPARING = {
    "accuracy_by_run": Figure(COMPARED, "Accuracy on held-out items", accuracy_by_kind, read=
        "Higher is better; a shaded band is the 95% interval of the mean over seeds."),
    "paired": Figure(COMPARED, "Is one better than the first?", paired_differences, read=
        "A difference item by item, with its 95% interval: one that does not reach zero is more than luck."),
    "reward_by_run": Figure(COMPARED, "Reward while training", reward_by_kind, read=
        "Mean reward of each stage's own episodes; a shaded band is the 95% interval over seeds."),
    "accuracy_by_tokens": Figure(COMPARED, "Accuracy for the tokens spent", accuracy_by_tokens, read=
        "Further left and higher is better: the same accuracy for fewer sampled tokens."),
    "decisions_by_run": Figure(COMPARED, "What became of the updates", decisions_by_kind, read=
        "The share of updates that were accepted whole, shrunk, rejected and skipped."),
}  # fmt: skip


def _by_kind(
    kinds: Sequence[Kind],
    values: Callable[[RunData], dict[int, float]],
    layout: dict[str, Any],
    hover: str,
    *,
    within: bool = False,
) -> Drawing | None:
    """`within`: the values are shares, and so are the ends of their intervals."""
    traces = []
    for number, kind in enumerate(kinds):
        known = [[values(run) for run in own] for own in kind.by_seed]
        stages = sorted({stage for own in known for by_stage in own for stage in by_stage})
        if not stages:
            continue
        means = [over_seeds([[each[stage] for each in own if stage in each] for own in known]) for stage in stages]
        known_at = [(stage, mean, half) for stage, (mean, half) in zip(stages, means, strict=True) if half is not None]
        if known_at:
            low, high = ([mean + side * half for _, mean, half in known_at] for side in (-1, 1))
            if within:
                low, high = ([min(1.0, max(0.0, value)) for value in ends] for ends in (low, high))
            traces += band(f"{kind.label}, 95%", [stage for stage, _, _ in known_at], low, high, color=f"$pale{number % 6}")
        color = f"$agent{number % 6}"
        traces.append(line(kind.label, stages, [mean for mean, _ in means], color=color, hovertemplate=hover))
    return Drawing(traces, layout) if traces else None


def _accuracies(run: RunData) -> dict[int, float]:
    return {row.stage: row.evaluation["avg_at_k"] for row in run.evaluated if row.evaluation}


def _rewards(run: RunData) -> dict[int, float]:
    """By stage; an update that used episodes again adds nothing."""
    by_stage: dict[int, list[float]] = {}
    for row in run.updates:
        if row.fresh_episodes:
            by_stage.setdefault(row.stage, []).append(row.reward_mean)
    return {stage: sum(own) / len(own) for stage, own in by_stage.items()}
