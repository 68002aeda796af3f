"""What `swap` and `rebase` show while they work, and print when they are done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import Progress, TaskID

from teamtr_lora.cli.text.tables import known, print_table, table_of, with_error
from teamtr_lora.common.consoles import Console, print_hanging
from teamtr_lora.common.program import program
from teamtr_lora.rollout.collector import Progress as ProgressCall
from teamtr_lora.swap.compatibility import Check
from teamtr_lora.swap.places import Undone
from teamtr_lora.swap.shock import Shock, TeamScore
from teamtr_lora.swap.stage0 import Alignment
from teamtr_lora.swap.swap_report import Listener, RebaseReport, SwapReport

_COLOUR = {"ok": "green", "note": "yellow", "fail": "red"}


class SwapView(Listener):
    """Checks as a table on stdout (or stderr beside JSON), phases as bars on stderr."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bar: TaskID | None = None

    def checks(self, checks: list[Check]) -> None:
        print_checks(self._console, checks)

    def phase(self, text: str) -> ProgressCall | None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
        bar = self._bar = self._progress.add_task(text, total=None)
        return lambda done, total, tokens: self._progress.update(bar, completed=done, total=total)

    def close(self) -> None:
        """No bar may come between the lines of the report."""
        self._progress.stop()


@contextmanager
def swap_view(*, json: bool) -> Iterator[SwapView]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield SwapView(Console(stderr=json), progress)


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    table = table_of("compatibility", "check", "old", "new", "verdict", "fix", left=5)
    for c in checks:
        verdict = f"[{_COLOUR[c.verdict]}]{c.verdict}[/]"
        table.add_row(escape(c.check), escape(c.old), escape(c.new), verdict, escape(c.fix))
    print_table(console, table)


def print_swap(report: SwapReport) -> None:
    console = Console()
    if report.plan:
        console.print("this swap would:")
        for step in report.plan:
            print_hanging(console, f"  {escape(step)}")
        return
    if report.alignment:
        _print_alignment(console, {report.agent: report.alignment})
    _print_scores(console, "swap shock on held-out items", report)
    console.print(f"{escape(report.agent)}: {report.old} -> {report.new} ({report.how}, from {escape(report.source)})")
    console.print("the replacement itself is not certified; go on with training, or take it back:")
    console.print(f"  {program()} swap {escape(shlex.quote(report.team))} --undo", soft_wrap=True)


def print_rebase(report: RebaseReport) -> None:
    console = Console()
    _print_alignment(console, report.alignments)
    _print_scores(console, "the team on held-out items", report)
    console.print(f"{escape(report.team)} on {escape(report.old_base)} -> {escape(report.out)} on {escape(report.new_base)}")


def print_undo(where: str, undone: Undone) -> None:
    console = Console()
    for agent, (gone, back) in undone.changed.items():
        console.print(f"{escape(where)}: {escape(agent)} {gone} -> {back}")
    if undone.trained:
        console.print(f"what {escape(', '.join(undone.trained))} learned after the swap is undone with it")
    if not undone.changed:
        console.print(f"{escape(where)}: the team is the one before the swap already")


def _print_alignment(console: Console, alignments: dict[str, Alignment]) -> None:
    columns = ("agent", "before", "after", "upper bound", "delta_align", "steps")
    table = table_of("KL(old || new) on held-out contexts", *columns)
    for agent, a in alignments.items():
        before, after = (with_error(reading.mean, reading.standard_error) for reading in (a.before, a.after))
        table.add_row(escape(agent), before, after, known(a.after.bound), f"{a.delta:g}", str(a.steps))
    print_table(console, table)


def _print_scores(console: Console, title: str, report: SwapReport | RebaseReport) -> None:
    table = table_of(title, "team", "accuracy", "lost, by item")
    for name in ("before", "direct", "aligned"):
        score: TeamScore | None = getattr(report, name)
        lost: Shock | None = getattr(report, f"shock_{name}", None)
        if score:
            accuracy = with_error(score.accuracy, score.standard_error)
            table.add_row(name, accuracy, "-" if lost is None else with_error(lost.lost, lost.standard_error))
    print_table(console, table)
    console.print(f"{report.sampled_tokens:,} tokens sampled, {report.trained_tokens:,} trained on, {report.seconds:.0f} s")
