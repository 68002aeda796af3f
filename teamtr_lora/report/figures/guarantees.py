"""What is guaranteed? The certificates of the stages beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from teamtr_lora.report.figures.drawing import Drawing, Drawn, axes, bars, errors, line, points
from teamtr_lora.report.run_data import RunData

PENALTIES = {"occupancy": "$agent1", "concentration": "$agent3", "staleness": "$agent4", "clip_bias": "$agent5"}


def certificate_terms(run: RunData) -> Drawn:
    found = run.certificates
    if isinstance(found, str):
        return f"There are no certificates: {found}."
    stages = [s.stage for s in found.stages]
    certain = [s.high_probability for s in found.stages]
    hover = "%{y:+.3f}"
    gains = _finite([c.surrogate for c in certain])
    traces = [bars("surrogate gain L", stages, gains, color="$accepted", stack="up", hovertemplate=hover)]
    for name, color in PENALTIES.items():
        values = _finite([-getattr(c, name) for c in certain])
        if any(values):
            label = f"less {name.replace('_', ' ')}"
            traces.append(bars(label, stages, values, color=color, stack="down", hovertemplate=hover))
    return Drawing(traces, axes("stage", "reward, discounted", barmode="relative"))


def certificates(run: RunData) -> Drawn:
    found = run.certificates
    if isinstance(found, str):
        return f"There are no certificates: {found}."
    stages = found.stages
    traces = []
    for name, color, known in (
        ("the paper's bound", "$agent1", [(s.stage, s.high_probability.bound, s.high_probability.vacuous) for s in stages]),
        ("bound by turns", "$agent0", [(s.stage, s.by_turns.bound, s.by_turns.vacuous) for s in stages if s.by_turns]),
    ):
        for vacuous in (False, True):
            own = [(stage, bound) for stage, bound, empty in known if empty == vacuous and math.isfinite(bound)]
            label, symbol = (f"{name}, vacuous", "x-thin-open") if vacuous else (name, "triangle-down")
            if own:
                traces.append(points(label, [x for x, _ in own], [y for _, y in own], color=color, symbol=symbol,
                                     hovertemplate="at least %{y:+.3f}"))  # fmt: skip
    measured = [(s.stage, s.improvement, s.improvement_standard_error) for s in stages if s.improvement is not None]
    if measured:
        gains = line("measured improvement", [x for x, _, _ in measured], [y for _, y, _ in measured], color="$team",
                     hovertemplate="%{y:+.3f}")  # fmt: skip
        gains["error_y"] = errors([e for _, _, e in measured])
        traces.append(gains)
    layout = axes("stage", "change of the mean reward", yaxis={"zeroline": True})
    return Drawing(traces, layout)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
