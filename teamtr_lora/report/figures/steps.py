"""Were the steps safe, and did they gain? Every update against its trust region."""

from __future__ import annotations

from collections import Counter
from typing import Any

from teamtr_lora.report.figures.drawing import (
    DECISIONS,
    SYMBOLS,
    Drawing,
    Drawn,
    axes,
    band,
    bars,
    errors,
    line,
    log_axis,
    numbered,
    points,
    scattered,
    two_panels,
    update_hover,
)
from teamtr_lora.report.reasons import reason
from teamtr_lora.report.run_data import RunData

NONE_YET = "No update has been made yet."
SKIPPED = "Every update was skipped, as rewards did not vary: nothing was measured about a step."
UPDATES = "The run did not record it; set diagnostics.from_updates=true."


def kl_against_delta(run: RunData) -> Drawn:
    estimator = run.stored.recipe.trust_region.estimator
    measured = [(place, row) for place, row in numbered(run.updates) if row.kl.get(estimator)]
    if not measured:
        return SKIPPED if run.updates else NONE_YET
    traces: list[dict[str, Any]] = []
    for decision in DECISIONS:
        own = [(place, row) for place, row in measured if row.decision == decision]
        readings = [row.kl[estimator] for _, row in own]
        bounds = [r.bound if r.bound is not None else r.mean for r in readings]
        if own:
            said = [f"{update_hover(row)}<br>{reason(row)}" for _, row in own]
            trace = points(decision, [place for place, _ in own], [_positive(b) for b in bounds], color=f"${decision}",
                           symbol=SYMBOLS[decision], text=said, customdata=[_positive(r.mean) for r in readings],
                           hovertemplate="%{text}<br>KL %{customdata:.2g}, bound %{y:.2g}<extra></extra>")  # fmt: skip
            traces.append(trace)
    places, deltas = [place for place, _ in measured], [row.delta for _, row in measured]
    traces.append(line("delta", places, deltas, color="$limit", dash="dash", mode="lines", hovertemplate="delta %{y:.3g}"))
    taken = [row.alpha or 0.0 for _, row in measured]
    steps = bars("step length", places, taken, color="$muted", yaxis="y2", showlegend=False, hovertemplate="x%{y:.2f}")
    layout = two_panels("update", f"KL bound ({estimator})", "step length", share=0.2)
    layout["yaxis"] |= log_axis(traces)
    layout["yaxis2"] |= {"range": [0, 1.05 * max(1.0, *taken)], "tickvals": [0, 0.5, 1]}
    return Drawing([*traces, steps], layout)


def message_kl(run: RunData) -> Drawn:
    known = [(place, row.diagnostics, row.delta) for place, row in numbered(run.updates) if row.diagnostics]
    spreads = [(place, d.kl_messages, delta) for place, d, delta in known if d.kl_messages]
    if not spreads:
        return (SKIPPED if known else UPDATES) if run.updates else NONE_YET
    places = [place for place, _, _ in spreads]
    quantile = {q: [_positive(getattr(s, q)) for _, s, _ in spreads] for q in ("p50", "p90", "p99", "largest")}
    traces = band("half to 90% of the messages", places, quantile["p50"], quantile["p90"], color="$band1")
    traces += band("90 to 99%", places, quantile["p90"], quantile["p99"], color="$band2")
    traces.append(line("median message", places, quantile["p50"], color="$agent0", mode="lines", hovertemplate="%{y:.2g}"))
    traces.append(line("largest", places, quantile["largest"], color="$agent1", mode="lines", hovertemplate="%{y:.2g}"))
    deltas = [delta for _, _, delta in spreads]
    traces.append(line("delta", places, deltas, color="$limit", dash="dash", mode="lines", hovertemplate="delta %{y:.3g}"))
    return Drawing(traces, axes("update", "KL of single messages", yaxis=log_axis(traces)))


def gain(run: RunData) -> Drawn:
    measured = [(place, row) for place, row in numbered(run.updates) if row.surrogate_gain is not None]
    if not measured:
        return SKIPPED if run.updates else NONE_YET
    traces = []
    for decision in DECISIONS:
        own = [(place, row) for place, row in measured if row.decision == decision]
        if not own:
            continue
        said = [update_hover(row) for _, row in own]
        trace = points(decision, [place for place, _ in own], [row.surrogate_gain for _, row in own], color=f"${decision}",
                       symbol=SYMBOLS[decision], text=said, hovertemplate="%{text}<br>gain %{y:.4f}<extra></extra>")  # fmt: skip
        trace["error_y"] = errors([row.surrogate_gain_standard_error for _, row in own])
        traces.append(trace)
    kept = [(place, row.certificate, row) for place, row in measured if row.certificate]
    reward = scattered("in reward, 95% interval", [place for place, _, _ in kept], [c.surrogate_undiscounted for _, c, _ in kept],
                    color="$team", yaxis="y2", text=[update_hover(row) for _, _, row in kept],
                    hovertemplate="%{text}<br>%{y:.4f} reward<extra></extra>")  # fmt: skip
    reward["error_y"] = errors([c.surrogate_undiscounted_standard_error for _, c, _ in kept])
    layout = two_panels("update", "gate's gain", "gain in reward", share=0.44)
    layout["yaxis"]["zeroline"] = layout["yaxis2"]["zeroline"] = True
    return Drawing([*traces, reward], layout)


def decisions(run: RunData) -> Drawn:
    if not run.updates:
        return NONE_YET
    step = 1 if len(run.updates) <= 8 * len(run.agents) else None  # there is no half of an update
    traces = []
    for decision in DECISIONS:
        own = [row for row in run.updates if row.decision == decision]
        why = {agent: Counter(reason(row) for row in own if row.agent == agent) for agent in run.agents}
        said = ["<br>".join(f"{n} x {text}" for text, n in why[agent].most_common(4)) for agent in run.agents]
        counts = [sum(why[agent].values()) for agent in run.agents]
        if own:
            traces.append(bars(decision, run.agents, counts, color=f"${decision}", stack="updates", customdata=said,
                               hovertemplate="%{y} " + decision + "<br>%{customdata}<extra></extra>"))  # fmt: skip
    return Drawing(traces, axes("", "updates", barmode="stack", xaxis={"type": "category"}, yaxis={"dtick": step}))


def _positive(value: float | None) -> float | None:
    """A logarithmic axis has no place for what is not."""
    return value if value is not None and value > 0 else None
