"""Does a wrong formula make a test fail? Formulas of ours made wrong on purpose, one at a time, and whether the tests notice.

    .venv/bin/python tools/mutants.py [--only "*certificate*"] [--workers 2] [--seconds 300] [--json]
    .venv/bin/python tools/mutants.py --list

The mutants are in tools/mutants.txt: in which file what text becomes which, and the tests that should notice. All of them happen
in a copy of the package and its tests, in a temporary folder: first the named tests have to pass there as it is, then each mutant
is put in, its tests run until the first one fails, and it is taken out again. caught: a test failed. SURVIVED: they all passed.
BROKEN: neither, because a test file could not be imported or the tests took longer than --seconds: such a mutant shows nothing,
and should be written otherwise. The exit status is 0 where every mutant was caught, and 1 otherwise.

Not every change of a formula is a wrong one. Those that change no result (a bound on something that is bounded already, a sum in
another order) cannot be caught and are not in the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".txt")
COPIED = ("teamtr_lora", "tests", "tools", "recipes", "adapters", "pyproject.toml")  # what tests may read
FAILED, PASSED = 1, 0  # pytest's exit statuses; the others are of what could not be run
# Processes begin with what takes long to import, and with nothing of ours.
LONG = "numpy scipy.stats torch torch._dynamo peft accelerate hypothesis pytest pydantic rich transformers.trainer_callback"
MODELS = ("auto.modeling_auto", "auto.tokenization_auto", "qwen3.modeling_qwen3")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([*LONG.split(), *(f"transformers.models.{name}" for name in MODELS)])


@dataclass(frozen=True, kw_only=True)
class Mutant:
    words: str  # what is wrong
    file: str
    text: str  # stands in the file exactly once
    instead: str
    tests: tuple[str, ...]  # of which one should fail

    @property
    def name(self) -> str:
        return f"{Path(self.file).stem}: {self.words}"

    def put_into(self, root: Path) -> str:
        """Makes the file under `root` wrong; returns what it was."""
        path = root / self.file
        before = path.read_text()
        if before.count(self.text) != 1:
            raise ValueError(f"{self.name}: {self.text!r} stands {before.count(self.text)} times in {self.file}, not once")
        path.write_text(before.replace(self.text, self.instead))
        return before


@dataclass(frozen=True, kw_only=True)
class Outcome:
    mutant: str
    outcome: str  # caught, SURVIVED or BROKEN
    seconds: float


def read_table(table: str) -> Iterator[Mutant]:
    """Entries stand apart by empty lines. A mutant is three lines: what is wrong, the text after -, and what replaces it after +.
    Before it may stand == and the file that it and those below it are in, then the tests that should notice, indented, each a
    file or FILE::TEST. Lines that begin with # say more."""
    file, tests = "", []
    for entry in table.strip().split("\n\n"):
        lines = [line for line in entry.splitlines() if not line.startswith("#")]
        if lines and lines[0].startswith("== "):
            file, tests = lines.pop(0)[3:], []
        while lines and lines[0].startswith("   "):
            tests.append(lines.pop(0).strip())
        if not lines:
            continue
        if len(lines) != 3 or lines[1][:2] != "- " or lines[2][:2] != "+ " or not tests:
            raise ValueError(f"not a mutant: {entry!r}")
        yield Mutant(words=lines[0], file=file, text=lines[1][2:], instead=lines[2][2:], tests=tuple(tests))


class FirstFailure:
    """What pytest does otherwise here."""

    def pytest_configure(self) -> None:
        """Hypothesis would look for the smallest example that fails, where any will do."""
        from hypothesis import Phase, settings

        settings.register_profile("first", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("first")

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is no test that fails, which -x would take it for."""
        import pytest

        if report.failed:
            pytest.exit(str(report.longrepr), returncode=pytest.ExitCode.USAGE_ERROR)


def run_pytest(root: Path, tests: Sequence[str], said: Path) -> None:
    """In a process of its own, which ends with pytest's exit status."""
    import pytest

    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == "teamtr_lora"]:
        del sys.modules[name]  # a process of tests may have begun the server of processes with more than is named above
    # compiled files are told apart by time and size, and a mutant may have those of what it replaces
    sys.dont_write_bytecode = True
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[FirstFailure()])))


def run_tests(root: Path, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """pytest's exit status (negative where it was stopped), and what it said."""
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "said"
        process = PROCESSES.Process(target=run_pytest, args=(root, tests, said))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        assert process.exitcode is not None
        return process.exitcode, said.read_text() if said.exists() else ""


def judged(mutant: Mutant, root: Path, seconds: float) -> Outcome:
    """Tries a mutant in a copy, and leaves that as it was."""
    started, before = time.monotonic(), mutant.put_into(root)
    try:
        status, _ = run_tests(root, mutant.tests, seconds)
    finally:
        (root / mutant.file).write_text(before)
    outcome = {FAILED: "caught", PASSED: "SURVIVED"}.get(status, "BROKEN")
    return Outcome(mutant=mutant.name, outcome=outcome, seconds=round(time.monotonic() - started, 1))


def copied(root: Path, folder: Path) -> Path:
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif (root / name).exists():
            shutil.copy(root / name, folder / name)
    return folder


def study(mutants: Sequence[Mutant], root: Path, *, workers: int = 1, seconds: float = 300) -> Iterator[Outcome]:
    """The mutants' outcomes in their order, each worker with a copy of its own."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies: SimpleQueue[Path] = SimpleQueue()
        for worker in range(workers):
            (Path(place) / str(worker)).mkdir()
            copies.put(copied(root, Path(place) / str(worker)))
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        status, said = run_tests(Path(place) / "0", tests, seconds * len(tests))
        if status != PASSED:
            raise RuntimeError(f"the tests fail before anything is made wrong:\n{said[-2000:]}")

        def tried(mutant: Mutant) -> Outcome:
            own = copies.get()
            try:
                return judged(mutant, own, seconds)
            finally:
                copies.put(own)

        with ThreadPoolExecutor(workers) as pool:
            yield from pool.map(tried, mutants)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="*", help='of "FILE: WORDS", as --list shows them')
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time, each with one thread")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one mutant's tests")
    parser.add_argument("--list", action="store_true", help="say which there are, and try none")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    args = parser.parse_args(arguments)
    chosen = [mutant for mutant in read_table(TABLE.read_text()) if fnmatch(mutant.name, args.only)]
    if not chosen:
        parser.error(f"--only {args.only}: no such mutant")
    if args.list:
        print("\n".join(f"{mutant.name} ({', '.join(mutant.tests)})" for mutant in chosen))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # before the first process starts
    started, found = time.monotonic(), []
    for outcome in study(chosen, ROOT, workers=max(1, args.workers), seconds=args.seconds):
        found.append(outcome)
        if not args.json:
            print(f"{outcome.outcome:<9} {outcome.seconds:6.1f} s  {outcome.mutant}", flush=True)
    caught, spent = sum(outcome.outcome == "caught" for outcome in found), time.monotonic() - started
    if args.json:
        totals = {"tried": len(found), "caught": caught, "seconds": round(spent, 1)}
        print(json.dumps(totals | {"mutants": [asdict(outcome) for outcome in found]}, indent=1))
    else:
        print(f"{len(found)} mutants, {caught} caught, {len(found) - caught} not, {spent / 60:.1f} minutes")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
