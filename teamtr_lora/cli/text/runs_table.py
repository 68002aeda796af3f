"""What `runs` prints."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.text.tables import known, print_table
from teamtr_lora.common.consoles import Console
from teamtr_lora.common.quantities import clock, short
from teamtr_lora.common.visible import visible_line

_COLOURS = {"training": "cyan", "starting": "cyan", "finished": "green", "stopped": "yellow", "damaged": "red"}


def print_runs(found: dict[str, Any]) -> None:
    """Newest first, as the page of `view` has them."""
    console = Console()
    if not found["runs"]:
        console.print(f"no runs in {escape(found['folder'])} yet; train writes them there")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for name in ("stage", "before", "now", "decisions", "tokens", "time left"):
        table.add_column(name, justify="right")
    for run in found["runs"]:
        counts = run["counts"] | {"accepted": run["counts"]["accepted"] - run["counts"]["shrunk"]}
        decisions = "/".join(str(counts[name]) for name in ("accepted", "shrunk", "rejected", "skipped"))
        state = f"[{_COLOURS[run['state']]}]{run['state']}[/]"
        ends = [known(run[end], ".3f") for end in ("accuracy_before", "accuracy_now")]
        tokens, left = short(run["sampled_tokens"]), "-" if run["seconds_left"] is None else clock(run["seconds_left"])
        table.add_row(escape(visible_line(run["name"])), state, f"{run['stage']}/{run['stages']}", *ends, decisions, tokens, left)
    print_table(console, table)
    console.print("decisions: accepted whole / shrunk / rejected / skipped", style="dim", highlight=False)
    for run in found["runs"]:
        if run["problem"]:
            console.print(escape(f"{visible_line(run['name'])}: {run['problem']}"), soft_wrap=True)
