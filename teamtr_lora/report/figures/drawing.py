"""What a figure is, and the marks that figures are drawn with: plotly's traces as plain data.

A colour is a role such as `$accepted` or `$agent0`: the page knows what it looks like in light and in dark (page.js, THEMES).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from teamtr_lora.runs.metrics import UpdateRow

Numbers = Sequence[float | None]
Z95 = 1.96
FEW = 90  # marks of one kind that are drawn one by one
DECISIONS = ("accepted", "shrunk", "rejected", "skipped")
SYMBOLS = {"accepted": "circle", "shrunk": "diamond", "rejected": "x", "skipped": "circle-open"}


@dataclass(frozen=True)
class Drawing:
    """`layout` is plotly's; the page adds fonts, colours, sizes and margins."""

    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)


Drawn = Drawing | str
"""A figure, or the sentence that says why there is nothing to draw and which setting would record it."""


@dataclass(frozen=True)
class Figure:
    section: str  # the question that it answers; a new one becomes a new heading
    title: str
    draw: Callable[[Any], Drawn]  # of a RunData, or of the Kinds of runs that are compared
    read: str  # one sentence: how to read it


def plain(text: object) -> str:
    """Text from outside, for names and hovers: plotly takes some markup there."""
    return html.escape(str(text), quote=False)


def log_axis(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For what the traces show. Ticks at 1, 2 and 5 have room for two decades; beyond that they stand at powers of ten."""
    shown = [math.log10(value) for trace in traces for value in trace["y"] if value]
    decades = max(shown, default=0.0) - min(shown, default=0.0)
    return {"type": "log", "tickformat": "~g", "dtick": "D2" if decades <= 2 else math.ceil(decades / 6)}


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with the titles of both axes; `more` is laid over it."""
    found: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for key, value in more.items():
        found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
    return found


def two_panels(x: str, upper: str, lower: str, *, share: float) -> dict[str, Any]:
    """One x axis and two y axes above each other; traces of the lower one say yaxis="y2"."""
    return axes(x, upper, xaxis={"anchor": "y2"}, yaxis={"domain": [share + 0.08, 1]}) | {
        "yaxis2": {"title": {"text": lower}, "domain": [0, share]}
    }


def line(name: str, x: Sequence[Any], y: Sequence[Any], *, color: str, dash: str = "solid", **more: Any) -> dict[str, Any]:
    """With its points, unless they are many: a browser takes its time over thousands of them."""
    mode = "lines+markers" if len(x) <= FEW else "lines"
    look = {"line": {"color": color, "dash": dash, "width": 2}, "marker": {"color": color, "size": 7}}
    return {"type": "scatter", "mode": mode, "name": plain(name), "x": list(x), "y": list(y)} | look | more


def points(name: str, x: Sequence[Any], y: Numbers, *, color: str, symbol: str = "circle", **more: Any) -> dict[str, Any]:
    look = {"marker": {"color": color, "symbol": symbol, "size": 8 if len(x) <= FEW else 5}}
    return {"type": "scatter", "mode": "markers", "name": plain(name), "x": list(x), "y": list(y)} | look | more


def scattered(name: str, x: Sequence[Any], y: Numbers, *, color: str, **more: Any) -> dict[str, Any]:
    """Points while they are few, else a thin line through them."""
    if len(x) <= FEW:
        return points(name, x, y, color=color, **more)
    return line(name, x, y, color=color, **more) | {"line": {"color": color, "width": 1}, "opacity": 0.6}


def bars(name: str, x: Sequence[Any], y: Numbers, *, color: str, stack: str = "", **more: Any) -> dict[str, Any]:
    """Bars while they are few, else an area; `stack` names those that stand on each other."""
    if len(x) <= FEW:
        return {"type": "bar", "name": plain(name), "x": list(x), "y": list(y), "marker": {"color": color}} | more
    fill = {"stackgroup": stack} if stack else {"fill": "tozeroy"}
    look = {"line": {"width": 0, "shape": "hvh"}, "fillcolor": color}
    return {"type": "scatter", "mode": "lines", "name": plain(name), "x": list(x), "y": list(y)} | look | fill | more


def band(name: str, x: Sequence[Any], low: Numbers, high: Numbers, *, color: str) -> list[dict[str, Any]]:
    """The space between two lines."""
    edge = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "hoverinfo": "skip", "name": plain(name)}
    return [edge | {"y": list(low), "showlegend": False}, edge | {"y": list(high), "fill": "tonexty", "fillcolor": color}]


def errors(values: Numbers) -> dict[str, Any]:
    """95% intervals out of standard errors; drawn where they are few."""
    arms = [None if v is None else Z95 * v for v in values]
    return {"type": "data", "array": arms, "thickness": 1.2, "width": 3, "visible": len(arms) <= FEW}


def agent_color(agents: Sequence[str], agent: str) -> str:
    """A role for each agent; a seventh begins anew."""
    return f"$agent{agents.index(agent) % 6}"


def numbered(updates: Sequence[UpdateRow]) -> list[tuple[int, UpdateRow]]:
    """The run's updates, counted from 1: what their figures have on the x axis."""
    return list(enumerate(updates, start=1))


def update_hover(row: UpdateRow) -> str:
    return f"stage {row.stage}, update {row.update}: {plain(row.agent)}, {row.decision}"
