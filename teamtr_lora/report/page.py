"""The page: what is shown, as data, and the one HTML file that shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from teamtr_lora.report.figures import FIGURES
from teamtr_lora.report.figures.comparison import COMPARING
from teamtr_lora.report.figures.drawing import Figure
from teamtr_lora.report.in_words import compared_in_words, headline, summary, tiles
from teamtr_lora.report.reasons import reason
from teamtr_lora.report.run_data import RunData
from teamtr_lora.report.sample import sampled_transcripts
from teamtr_lora.report.seeds import kinds_of

TRANSCRIPT_BYTES = 2_500_000  # of all transcripts in a report


def report_page(runs: Sequence[RunData]) -> bytes:
    """One self-contained HTML file about one run, or about several compared."""
    pages = [
        run_content(run) | {"transcripts": sampled_transcripts(run.stored.path, TRANSCRIPT_BYTES // len(runs))} for run in runs
    ]
    content = {"mode": "report", "runs": pages, "comparison": comparison(runs) if len(runs) > 1 else None}
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs compared"
    return html_page(title, content, plotly=plotly_script())


def run_content(run: RunData) -> dict[str, Any]:
    """Everything that a page says of a run, but its transcripts."""
    return {
        "name": run.name,
        "rows": len(run.rows),
        "headline": headline(run),
        "words": summary(run),
        "tiles": [asdict(tile) for tile in tiles(run)],
        "sections": _sections(FIGURES, run),
        "updates": _update_table(run),
        "recipe": run.stored.recipe_text(),
    }


def comparison(runs: Sequence[RunData]) -> dict[str, Any]:
    """What a page says of several runs together."""
    kinds = kinds_of(runs)
    return {"headline": f"{len(runs)} runs compared.", "words": compared_in_words(kinds), "sections": _sections(COMPARING, kinds)}


def _sections(figures: Mapping[str, Figure], data: Any) -> list[dict[str, Any]]:
    """Figures under the questions that they answer."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, figure in figures.items():
        drawn = figure.draw(data)
        shown = {"missing": drawn} if isinstance(drawn, str) else {"traces": drawn.traces, "layout": drawn.layout}
        found.setdefault(figure.section, []).append({"name": name, "title": figure.title, "read": figure.read} | shown)
    return [{"title": section, "figures": own} for section, own in found.items()]


def _update_table(run: RunData) -> list[list[Any]]:
    estimator = run.stored.recipe.trust_region.estimator
    found = []
    for row in run.updates:
        kl = row.kl.get(estimator)
        bound = kl.bound if kl else None
        numbers = [row.reward_mean, bound, row.delta, row.alpha, row.surrogate_gain]
        found.append([row.stage, row.agent, row.decision, reason(row), *numbers])
    return found


def html_page(title: str, content: dict[str, Any], *, plotly: str | None = None) -> bytes:
    """`plotly`: the library's own text; without it the page asks the server for it, and may talk to that server alone."""
    script = _asset("page.js")
    # this script starts plotly; no other one in the page ever runs, whatever a transcript holds
    allowed = f"'{_hash(script)}' {'blob:' if plotly else chr(39) + 'self' + chr(39)}"
    library = f'<script type="text/plain" id="library">{plotly}</script>\n' if plotly else ""
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(allowed, server=plotly is None)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} - teamtr-lora</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<main id="page"></main>\n<script type="application/json" id="content">{embedded(content)}</script>\n'
        f"{library}<script>{script}</script>\n</body>\n</html>\n"
    )
    return utf8(page)


def policy(scripts: str, *, server: bool) -> str:
    """No network: what the page needs is in it, or comes from the server that it came from. Plotly sets styles as it draws."""
    connect = "'self'" if server else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def utf8(text: str) -> bytes:
    """Half a surrogate pair, which a model or a file name may hold, has no UTF-8; in JSON its escape is what it was."""
    return text.encode("utf-8", "backslashreplace")


def embedded(content: Any) -> str:
    """JSON that no text in it can end: a script element ends at the first `</script`, wherever that stands."""
    return as_json(content).replace("<", "\\u003c")


def as_json(content: Any) -> str:
    return json.dumps(_compact(content), ensure_ascii=False, separators=(",", ":"))


def _compact(value: Any) -> Any:
    """Five digits are more than anybody sees; JSON has no infinity."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    return [_compact(item) for item in value] if isinstance(value, (list, tuple)) else value


@cache
def plotly_script() -> str:
    """Plotly, out of the wrapper for other loaders that its file has: a browser reads what is in a wrapper twice (0.4 s)."""
    from plotly.offline import get_plotlyjs

    text = str(get_plotlyjs())
    licence, start, end = text.find("*/") + 2, text.find('"use strict";var Plotly='), text.rfind("window.Plotly = Plotly;")
    return text[:licence] + "\n" + text[start:end] if 0 < start < end else text


def _asset(name: str) -> str:
    return files("teamtr_lora.report").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
