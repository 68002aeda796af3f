"""What did it cost? Time by phase, speed, and memory."""

from __future__ import annotations

from collections import defaultdict

from teamtr_lora.report.figures.drawing import (
    Drawing,
    Drawn,
    agent_color,
    axes,
    bars,
    line,
    numbered,
    scattered,
    two_panels,
    update_hover,
)
from teamtr_lora.report.run_data import RunData
from teamtr_lora.runs.metrics import StageRow, UpdateRow

PHASES = {
    "rollout": "$agent0", "optimize": "$agent1", "gate": "$agent2", "in_sample": "$shrunk", "publish": "$agent3",
    "saving": "$skipped", "diagnostics": "$agent4", "probe": "$agent5", "evaluation": "$team", "transcripts": "$band3",
    "idle": "$muted",
}  # fmt: skip
NONE_YET = "No update has been made yet."


def seconds_by_phase(run: RunData) -> Drawn:
    if not run.updates:
        return NONE_YET
    stages = phase_seconds(run)
    numbers = sorted(stages)
    totals = [sum(stages[stage].values()) for stage in numbers]
    traces = []
    for phase in dict.fromkeys([*PHASES, *(phase for own in stages.values() for phase in own)]):
        seconds = [stages[stage].get(phase, 0.0) for stage in numbers]
        if any(seconds):
            share = sum(seconds) / max(sum(totals), 1e-9)
            color, words = PHASES.get(phase, "$skipped"), phase.replace("_", " ")
            label = f"{words} ({share:.0%})" if share >= 0.005 else f"{words} (<1%)"
            traces.append(bars(label, numbers, seconds, color=color, stack="seconds", hovertemplate="%{y:.1f} s"))
    return Drawing(traces, axes("stage", "seconds", barmode="stack"))


def phase_seconds(run: RunData) -> dict[int, dict[str, float]]:
    """By stage, then by phase. `evaluation` and `idle` are what lies between two rows beside the phases that they name."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    before: float | None = None
    for row in run.rows:
        if isinstance(row, UpdateRow):
            for phase, seconds in row.seconds.items():
                found[row.stage][phase] += seconds
            if before is not None:
                rest = row.time - before - sum(row.seconds.values())
                found[row.stage]["idle"] += max(0.0, rest) if rest < 3600 else 0.0  # longer: the run was stopped in between
        elif isinstance(row, StageRow) and before is not None and row.evaluation:
            found[row.stage]["evaluation"] += max(0.0, row.time - before)
        before = row.time
    return found


def speed(run: RunData) -> Drawn:
    if not run.updates:
        return NONE_YET
    traces = []
    for agent in run.agents:
        own = [(place, row) for place, row in numbered(run.updates) if row.agent == agent and row.fresh_episodes]
        if own:
            speeds, said = [row.tokens_per_second for _, row in own], [update_hover(row) for _, row in own]
            traces.append(scattered(f"before {agent}'s update", [place for place, _ in own], speeds, text=said,
                                    color=agent_color(run.agents, agent),
                                    hovertemplate="%{text}<br>%{y:,.0f} tokens/s<extra></extra>"))  # fmt: skip
    if not traces:
        return "No update of this run has played episodes of its own."
    layout = two_panels("update", "rollout", "training", share=0.4)
    trained = [(place, row) for place, row in numbered(run.updates) if row.seconds.get("optimize")]
    steps = run.stored.recipe.training.minibatches_per_epoch  # a step sees this part of the tokens
    rates = [row.trained_tokens * row.optimizer_steps / steps / row.seconds["optimize"] for _, row in trained]
    traces.append(scattered("training", [place for place, _ in trained], rates, color="$team", yaxis="y2",
                            hovertemplate="%{y:,.0f} tokens/s"))  # fmt: skip
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["yaxis2"] |= {"rangemode": "tozero"}
    return Drawing(traces, layout)


def memory(run: RunData) -> Drawn:
    known = [row for row in run.stages if row.peak_memory_bytes]
    if not known:
        return "No stage is complete yet; every stage records the peak memory so far."
    stages = [row.stage for row in known]
    peak = [row.peak_memory_bytes / 2**30 for row in known]
    tokens = [row.sampled_tokens for row in known]
    traces = [
        line("peak memory", stages, peak, color="$agent0", hovertemplate="%{y:.2f} GiB"),
        line("tokens sampled so far", stages, tokens, color="$agent1", yaxis="y2", hovertemplate="%{y:,}"),
    ]
    layout = two_panels("stage", "GiB", "tokens so far", share=0.42)
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["yaxis2"] |= {"rangemode": "tozero"}
    return Drawing(traces, layout)
