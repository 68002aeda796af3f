"""What `adapters` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.text.tables import print_table, with_error
from teamtr_lora.common.consoles import Console, say
from teamtr_lora.common.visible import visible_line
from teamtr_lora.registry.imports import Imported
from teamtr_lora.registry.verify import Verified


def print_teams(rows: list[dict[str, Any]], root: Path) -> None:
    if not rows:
        _say(f"{root}: no teams; teamtr-lora adapters import RUN --team NAME stores one")
        return
    table = []
    for row in rows:
        if "number" in row:
            accuracy = with_error(row["metrics"].get("avg_at_k"), row["metrics"].get("standard_error"), ".3f")
            values = [row["number"], row["base"], row["task"], ",".join(row["agents"]), accuracy]
            table.append([row["team"], *map(str, values), row["made_by"], row["created"]])
    if table:
        _columns(table, "team", "version", "base", "task", "agents", "accuracy", "made by", "created")
    for row in rows:
        if "number" not in row:
            _say(f"{row['team']}: {row.get('problem', str(row['adapters']) + ' adapter versions, no team version')}")


def print_described(found: dict[str, Any]) -> None:
    """A team, an agent's versions, or one version: whichever `describe` found."""
    if "adapters" in found:
        table = []
        for row in found["adapters"]:
            used = ",".join(map(str, row["used_by"])) or "-"
            table.append([row["version"], row["made_by"], row["parent"] or "-", used, row["created"]])
        _columns(table, "version", "made by", "from", "used by team version", "created")
        return
    left_out = {"recipe", "metrics", "files", "lineage", "agents", "base", "format"}
    lines = {key: value for key, value in found.items() if key not in left_out}
    lines["base"] = f"{found['base']['source']} {found['base']['revision'] or ''}".strip()
    lines["base weights"] = found["base"]["weights_hash"]
    lines |= {f"agent {agent}": version for agent, version in found.get("agents", {}).items()}
    lines |= {f"file {name}": digest for name, digest in found.get("files", {}).items()}
    lines |= {
        f"metric {name}": f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for name, value in found["metrics"].items()
    }
    for step in found.get("lineage", []):
        old, new = (step[side].partition("-")[2] or step[side] for side in ("old", "new"))  # numbers are a run's or a registry's
        lines[f"replaced {step['agent']}"] = f"{old} by {new}: {step['how']}"
    shown = {key: ",".join(map(str, value)) if isinstance(value, list) else value for key, value in lines.items()}
    _columns([[key, "-" if value in (None, "") else str(value)] for key, value in shown.items()])


def print_verified(found: Verified) -> None:
    for problem in found.problems:
        _say(str(problem))
    for note in found.notes:
        _say(f"not checked: {note}")
    count = f"{found.adapters} adapter versions and {found.teams} team versions"
    if found.rows or found.checkpoints:
        count = f"{found.adapters} adapter versions, {found.rows} rows and {found.checkpoints} checkpoints"
    _say(f"{count}: {len(found.problems)} problems" if found.problems else f"{count}: every hash fits")


def print_imported(done: Imported, root: Path) -> None:
    for adapter in done.adapters:
        _say(f"{root}/{adapter.team}/{adapter.agent}/{adapter.version}")
    if done.team:
        _say(f"team {done.team.team} is at version {done.team.number}; try: teamtr-lora ask {root}/{done.team.team} QUESTION")
    for note in done.notes:
        _say(note)


def _columns(rows: Sequence[Sequence[str]], *heads: str) -> None:
    """Never cut: hashes and paths are there to be copied."""
    table = Table(*(heads or ("", "")), box=None, pad_edge=False, show_header=bool(heads), header_style="bold")
    for row in rows:
        table.add_row(*(escape(visible_line(value)) for value in row))
    print_table(Console(), table)


def _say(line: str) -> None:
    say(visible_line(line))
