"""Draws the README's picture from a run: accuracy by stage, and KL against delta by update with every decision marked.

    python tools/draw_quickstart.py                      # from the shipped extract of a quickstart run
    python tools/draw_quickstart.py runs/quickstart      # makes the extract anew from a run of yours, then draws it
    python tools/draw_quickstart.py runs/quickstart --folder /tmp/picture

The folder (teamtr_lora/docs/quickstart) gets `metrics.jsonl`, the few numbers of the run that the picture shows, and
`quickstart.svg`. The picture paints its own background, so it can be read on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "teamtr_lora" / "docs" / "quickstart"
DATA, PICTURE = "metrics.jsonl", "quickstart.svg"

WIDTH, HEIGHT = 880, 360
TOP, BOTTOM = 72, 272  # of both panels
LEGEND = 338
LEFT_PANEL, RIGHT_PANEL = (62, 408), (492, 858)
DECISIONS = ("accepted", "shrunk", "rejected", "skipped")
STYLE = (FOLDER / "quickstart.css").read_text()


def extract(run: Path) -> list[dict[str, Any]]:
    """The numbers of a run that the picture shows, in the order in which they were measured."""
    from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows

    rows: list[dict[str, Any]] = []
    for row in read_rows(run):
        if isinstance(row, StageRow) and row.evaluation:
            accuracy, error = row.evaluation["avg_at_k"], row.evaluation["standard_error"]
            rows.append({"kind": "evaluation", "stage": row.stage, "accuracy": accuracy, "standard_error": error})
        elif isinstance(row, UpdateRow):
            kl = row.kl["exact"] if row.kl else None
            shown = {name: getattr(row, name) for name in ("stage", "agent", "decision", "delta")}
            measured = {"kl": kl.mean if kl else None, "bound": kl.bound if kl else None, "success_rate": row.success_rate}
            rows.append({"kind": "update", **shown, **measured})
    return [{key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()} for row in rows]


def draw(rows: Iterable[dict[str, Any]]) -> str:
    rows = list(rows)
    updates = [row for row in rows if row["kind"] == "update"]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    if not updates or not evaluations:
        raise SystemExit("draw_quickstart: the run has no update or no evaluation yet; let train finish a stage")
    stages = max(row["stage"] for row in updates)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="Accuracy by stage, and KL against delta by update">'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>'
    parts = [head, f"<style>\n{STYLE}</style>", card]
    parts += _accuracy(evaluations, updates, stages)
    parts += _kl(updates, stages)
    return "\n".join([*parts, "</svg>", ""])


def _accuracy(evaluations: list[dict[str, Any]], updates: list[dict[str, Any]], stages: int) -> list[str]:
    left, right = LEFT_PANEL
    first, last = evaluations[0], evaluations[-1]
    seen = [row["accuracy"] - row["standard_error"] for row in evaluations] + [row["success_rate"] for row in updates]
    low = math.floor(min(seen) * 5) / 5
    parts = [
        _text(left - 34, 30, f"Held-out accuracy: {first['accuracy']:.2f} before, {last['accuracy']:.2f} after", "title"),
        _text(left - 34, 48, "each point: the team as it was then", "quiet"),
        *_axes(LEFT_PANEL, [k / 5 for k in range(round(low * 5), 6)], low, 1.0, "{:.1f}", stages),
    ]

    def place(stage: float, value: float) -> tuple[float, float]:
        return left + (right - left) * stage / stages, _height(value, low, 1.0)

    per_stage = len(updates) / stages
    for number, row in enumerate(updates):
        x, y = place(number / per_stage, row["success_rate"])
        parts.append(f'<circle class="faint" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    points = [place(row["stage"], row["accuracy"]) for row in evaluations]
    parts.append(f'<polyline class="curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    for row, (x, y) in zip(evaluations, points, strict=True):
        up, down = (_height(row["accuracy"] + sign * row["standard_error"], low, 1.0) for sign in (1, -1))
        parts.append(f'<line class="curve" x1="{x:.1f}" y1="{up:.1f}" x2="{x:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
    parts.append(f'<circle class="dot" cx="{left}" cy="{LEGEND - 4}" r="4.5"/>')
    parts.append(_text(left + 10, LEGEND, "held-out items ± standard error"))
    parts.append(f'<circle class="faint" cx="{left + 240}" cy="{LEGEND - 4}" r="2.5"/>')
    parts.append(_text(left + 248, LEGEND, "training rollouts"))
    return parts


def _kl(updates: list[dict[str, Any]], stages: int) -> list[str]:
    left, right = RIGHT_PANEL
    top = 1.25 * max(row["delta"] for row in updates)
    kept = sum(row["decision"] in ("accepted", "shrunk") for row in updates)
    delta = updates[0]["delta"]
    parts = [
        _text(left - 40, 30, f"KL of the {len(updates)} updates, {kept} of them accepted", "title"),
        _text(left - 40, 48, "mark: mean on held-out messages; bar: its upper bound", "quiet"),
    ]
    parts += _axes(RIGHT_PANEL, [0, delta / 2, delta], 0, top, "{:g}", stages)
    y = _height(delta, 0, top)
    parts.append(f'<line class="delta" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
    parts.append(_text(right - 4, y - 6, f"delta = {delta:g} nats a message", "limit", "end"))
    step = (right - left) / len(updates)
    for number, row in enumerate(updates):
        x = left + step * (number + 0.5)
        kl, bound = (min(row[name] or 0.0, top) for name in ("kl", "bound"))
        middle, high = _height(kl, 0, top), _height(bound, 0, top)
        said = f"stage {row['stage']}, {row['agent']}: {row['decision']}, KL {kl:.4f}, bound {bound:.4f}"
        stem = f'<line x1="{x:.1f}" y1="{middle:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'
        cap = f'<line x1="{x - 3:.1f}" y1="{high:.1f}" x2="{x + 3:.1f}" y2="{high:.1f}"/>'
        mark = _mark(x, middle, row["decision"])
        parts.append(f'<g class="{row["decision"]}"><title>{said}</title>{stem}{cap}{mark}</g>')
    x = left
    for decision in DECISIONS:
        if any(row["decision"] == decision for row in updates):
            parts.append(f'<g class="{decision}">{_mark(x + 4, LEGEND - 4, decision)}</g>{_text(x + 14, LEGEND, decision)}')
            x += 104
    return parts


def _axes(panel: tuple[int, int], ticks: list[float], low: float, high: float, form: str, stages: int) -> list[str]:
    left, right = panel
    parts = []
    for tick in ticks:
        y = _height(tick, low, high)
        parts.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        parts.append(_text(left - 8, y + 4, form.format(tick), "quiet", "end"))
    for stage in range(stages + 1):
        x = left + (right - left) * stage / stages
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{BOTTOM}" x2="{x:.1f}" y2="{BOTTOM + 4}"/>')
        parts.append(_text(x, BOTTOM + 18, str(stage), "quiet", "middle"))
    parts.append(f'<line class="axis" x1="{left}" y1="{BOTTOM}" x2="{right}" y2="{BOTTOM}"/>')
    parts.append(_text((left + right) / 2, BOTTOM + 36, "stage", "quiet", "middle"))
    return parts


def _mark(x: float, y: float, decision: str) -> str:
    if decision == "accepted":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    if decision == "shrunk":
        return f'<path d="M{x:.1f} {y - 4.5:.1f} l4.5 8 h-9 z"/>'
    return f'<path d="M{x - 4:.1f} {y - 4:.1f} l8 8 m0 -8 l-8 8"/>'


def _height(value: float, low: float, high: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (min(max(value, low), high) - low) / (high - low)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN_DIR", help="a run directory (default: the shipped extract)")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="where metrics.jsonl and quickstart.svg are")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.run is not None:
        lines = [json.dumps(row) + "\n" for row in extract(args.run)]
        (args.folder / DATA).write_text("".join(lines))
    rows = [json.loads(line) for line in (args.folder / DATA).read_text().splitlines()]
    (args.folder / PICTURE).write_text(draw(rows))
    print(f"wrote {args.folder / PICTURE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
