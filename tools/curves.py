"""A figure of a few curves with intervals, as an SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 56, 440, 40, 312
COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#bf8700", "#8250df", "#bc4c00", "#57606a", "#d4408e")
STYLE = "text { font: 12px system-ui, sans-serif; fill: #24292f } .card { fill: #ffffff } .grid { stroke: #d8dee4 }"


@dataclass(frozen=True)
class Point:
    """`half` of the interval around y; 0: none is drawn."""

    x: float
    y: float
    half: float = 0.0


def drawn(title: str, curves: Mapping[str, Sequence[Point]], x_label: str = "stage", y_label: str = "accuracy") -> str:
    """One curve a name; y goes from 0 to 1."""
    xs = sorted({point.x for points in curves.values() for point in points}) or [0.0]
    span = (xs[-1] - xs[0]) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        low = min(max(y, 0.0), 1.0)
        return LEFT + (x - xs[0]) / span * (RIGHT - LEFT), BOTTOM - low * (BOTTOM - TOP)

    parts = [f'<rect class="card" width="{WIDTH}" height="{HEIGHT}"/>', f'<text x="{LEFT}" y="22">{escape(title)}</text>']
    for step in range(6):
        _, y = at(xs[0], step / 5)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{step / 5:g}</text>')
    for x in xs[:: max(1, len(xs) // 8)]:
        parts.append(f'<text x="{at(x, 0)[0]:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle">{x_label}</text>')
    parts.append(f'<text transform="translate(16 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>')
    for place, (name, points) in enumerate(curves.items()):
        colour, across = COLOURS[place % len(COLOURS)], 6 * (place / max(1, len(curves) - 1) - 0.5)
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(point.x, point.y) for point in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point in points:
            x, low = at(point.x, point.y - point.half)
            high = at(point.x, point.y + point.half)[1]
            if point.half:
                parts.append(
                    f'<line x1="{x + across:.1f}" y1="{low:.1f}" x2="{x + across:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
                )
        y = TOP + 20 * place + 8
        parts.append(f'<line x1="{RIGHT + 20}" y1="{y - 4}" x2="{RIGHT + 44}" y2="{y - 4}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{RIGHT + 50}" y="{y}">{escape(name)}</text>')
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{STYLE}</style>\n{body}\n</svg>\n'
