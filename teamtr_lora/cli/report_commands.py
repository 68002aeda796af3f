"""report, view, runs: what runs look like."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import port, print_json
from teamtr_lora.common.consoles import say
from teamtr_lora.common.errors import UserError

_RUNS = Path("runs")


def add_commands(command: Any) -> None:
    text = "Write one HTML file about a run, or about several compared: summary, figures, transcripts."
    report = command("report", _report, text, json="print the file's name and size as JSON")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the run directory that train printed")
    report.add_argument(
        "--out", type=Path, metavar="FILE.html", help="default: report.html in the run's folder; of several runs, here"
    )

    text = "Open a local page about the runs in a folder, live while they train; it only reads."
    view = command("view", _view, text)
    view.add_argument("folder", type=Path, nargs="?", default=_RUNS, metavar="RUNS_FOLDER", help=f"default: {_RUNS}")
    view.add_argument("--port", type=port, default=8321, metavar="P", help="default: 8321")
    view.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="default: 127.0.0.1, this machine alone; elsewhere readers need a token"
    )

    runs = command("runs", _runs, "How the runs in a folder stand, a line each.", json="print the table as JSON")
    runs.add_argument("folder", type=Path, nargs="?", default=_RUNS, metavar="FOLDER", help=f"default: {_RUNS}")


def _report(args: argparse.Namespace) -> None:
    from teamtr_lora.common.files import write_atomic
    from teamtr_lora.report.page import report_page
    from teamtr_lora.report.run_data import read_named_runs

    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    page = report_page(read_named_runs(args.runs))
    write_atomic(out, page)
    if args.json:
        print_json({"file": str(out), "bytes": len(page)})
    else:
        say(f"{out} ({len(page) / 1e6:.1f} MB): open it in a browser; it needs no network")


def _view(args: argparse.Namespace) -> None:
    from teamtr_lora.report.view_server import serve

    try:
        serve(_folder(args), args.host, args.port, lambda address: print(f"open {address}  (end with Ctrl-C)", flush=True))
    except KeyboardInterrupt:
        print()


def _folder(args: argparse.Namespace) -> Path:
    """The usual folder may come later, with the first run; one that was typed has to be there."""
    folder: Path = args.folder
    if not folder.is_dir() and (folder != _RUNS or folder.exists()):
        raise UserError(f"{folder}: no such folder; give the one that holds your runs (default: {_RUNS})")
    return folder


def _runs(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.runs_table import print_runs
    from teamtr_lora.report.view_server import RunsFolder

    found = RunsFolder(_folder(args)).answer("runs", {})
    if args.json:
        print_json(found)
    else:
        print_runs(found)
