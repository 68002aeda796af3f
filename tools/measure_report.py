"""How large a report is, how long it takes to make and to open, and how long a folder of many runs takes to list.

    python tools/measure_report.py                               # 1,000 updates, and a folder of 300 runs
    python tools/measure_report.py --updates 3000 --runs 1000

The runs are made up, and written by the run directory's own writer. Opening is timed in headless Chromium, where there is one,
each time in a fresh browser: until the words can be read, and until the first figures are drawn.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from headless_browser import CHROMIUM, open_browser  # noqa: E402
from made_up_run import make_run  # noqa: E402

from teamtr_lora.report.page import plotly_script, report_page
from teamtr_lora.report.run_data import read_named_runs
from teamtr_lora.report.view_server import RunsFolder

FIRST_WORDS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
FIRST_FIGURE = "document.querySelector('.plot .main-svg') !== null"


def main() -> None:
    parser = argparse.ArgumentParser(description="Size and speed of the report, and of the list of runs.")
    parser.add_argument("--updates", type=int, default=1000, help="updates of the long run (default: 1000)")
    parser.add_argument("--runs", type=int, default=300, help="runs in the folder that is listed (default: 300)")
    parser.add_argument("--opens", type=int, default=3, help="browsers to open the report in (default: 3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        measure_report(make_run(folder / "long", args.updates), folder / "report.html", args.opens)
        measure_list(folder / "runs", args.runs)


def measure_report(run: Path, out: Path, opens: int) -> None:
    plotly_script()
    page, seconds = timed(lambda: report_page(read_named_runs([run])))
    out.write_bytes(page)
    print(f"report: {len(page) / 1e6:.1f} MB, made in {seconds:.1f} s")
    for _ in range(opens if CHROMIUM else 0):
        with open_browser() as tab:
            tab.show()
            started = time.monotonic()
            tab.open(out.as_uri())
            tab.wait(FIRST_FIGURE)
            figures, busy = time.monotonic() - started, tab.main_thread_seconds()
            words = tab.run(FIRST_WORDS) / 1000
            print(f"opened: words after {words:.2f} s, figures after {figures:.2f} s ({busy:.2f} s of the browser's main thread)")


def measure_list(folder: Path, count: int) -> None:
    first = make_run(folder / "run-0000", 12, episodes_every=12)
    for number in range(1, count):
        shutil.copytree(first, folder / f"run-{number:04d}")
    runs = RunsFolder(folder)
    for words in ("list of runs, first time", "list of runs, again"):
        found, seconds = timed(lambda: runs.answer("runs", {}))
        print(f"{words}: {len(found['runs'])} runs in {seconds:.2f} s")


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return make(), time.monotonic() - started


if __name__ == "__main__":
    main()
