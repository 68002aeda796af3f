"""What the commands print when they are done."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from teamtr_lora.rollout.collector import Progress as ProgressCall
from teamtr_lora.team import Episode
from teamtr_lora.training.plan import Plan
from teamtr_lora.training.trainer import TrainSummary


def print_next_steps(console: Console, summary: TrainSummary, example: str) -> None:
    minutes, seconds = divmod(round(summary.seconds), 60)
    console.print()
    console.print(
        f"[bold]held-out accuracy {_share(summary.accuracy_before)} -> {_share(summary.accuracy_after)}[/] on "
        f"{summary.episodes_evaluated} episodes, in {minutes} min {seconds} s"
    )
    console.print(
        f"{summary.updates} updates: {summary.accepted} accepted ({summary.shrunk} of them shrunk), {summary.rejected} rejected, "
        f"{summary.skipped} skipped; accepted outside the trust region: {summary.out_of_region_accepted}"
    )
    run = shlex.quote(summary.run_dir)
    console.print(f"run directory: {escape(summary.run_dir)}\n\nnext:")
    program = _program()
    console.print(f"  {program} ask {run} {escape(shlex.quote(example))}")
    console.print(f"  {program} eval {run} --k 4")
    console.print(f"  {program} init my-team        # a recipe and a reward function of your own")


def _program() -> str:
    """What to type to run this program again: its path where it is not on the shell's."""
    on_path = shutil.which("teamtr-lora") is not None or os.path.basename(sys.argv[0]) != "teamtr-lora"
    return "teamtr-lora" if on_path else shlex.quote(os.path.relpath(sys.argv[0]))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_transcript(episode: Episode) -> None:
    console = Console(highlight=False, emoji=False)
    console.print(f"[bold]question[/]\n{escape(episode.prompt)}")
    for message in episode.messages:
        cut = " [yellow](cut off by the token limit)[/]" if message.truncated else ""
        console.print(f"\n[bold]{message.agent}[/] [dim]{message.version}, {len(message.token_ids)} tokens[/]{cut}")
        console.print(escape(message.text))


def print_plan(plan: Plan) -> None:
    console = Console(highlight=False)
    for title, rows in plan.tables().items():
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        console.print(table)
    console.print(plan.trust_region)


@contextmanager
def progress_bar(label: str) -> Iterator[ProgressCall]:
    """A bar on stderr, so that stdout stays what was asked for."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(label, total=None)
        yield lambda done, total, tokens: progress.update(bar, completed=done, total=total)
