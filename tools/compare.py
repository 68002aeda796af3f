"""Runs variants of a recipe over seeds and prints one table.

    .venv/bin/python tools/compare.py RECIPE [RECIPE ...] --out DIR [--seeds 0,1,2] [section.key=value ...] [--json]
        [--vary "fill: trust_region.step=fill" --vary "shrink: trust_region.step=shrink training.stages=4" ...]
        [--workers 8] [--minutes 30]

A variant is a --vary of a recipe, or a recipe as it is (named by its file) where there is none. Its runs are in
DIR/VARIANT/seed-N: finished ones are read, unfinished ones resumed, so the same command goes on after an interruption. A run that
fails stands in the table with its error and the rest goes on; the exit status is then 1. DIR/comparison.json holds everything.
--workers N makes N runs at a time, each in a process of its own with one thread, its words in DIR/VARIANT/seed-N.log. When
--minutes are over, no run begins and those in progress stop after their update; --minutes 0 only reads what is there.

Means are over seeds; +- is half of the 95% Student t interval over seeds. Below the table every variant is compared with the
first one, seed by seed. tools/cells.py says what the columns are.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cells import Variant, add_options, exit_status, numbers, run_cells, summary, table, work_on

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic

SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE | section.key=value")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--vary", action="append", default=[], metavar='"NAME: section.key=value ..."')
    add_options(parser)
    args = parser.parse_intermixed_args(words)
    try:
        chosen = variants(args.words, args.vary)
    except UserError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if args.only:
        return work_on(args.only, chosen, args)
    cells = run_cells([(variant, seed) for variant in chosen for seed in args.seeds], args, [__file__, *words])
    report = summary(chosen, cells)
    write_atomic(args.out / "comparison.json", dump_json(report))
    print(json.dumps(report, indent=2) if args.json else table(report))
    return exit_status(report)


def variants(words: Sequence[str], varied: Sequence[str]) -> list[Variant]:
    common = [word for word in words if "=" in word]
    recipes = [Path(word) for word in words if "=" not in word]
    if not recipes:
        raise UserError("no RECIPE was named")
    changes = [_change(text) for text in varied] or [("", [])]
    found = []
    for recipe in recipes:
        for name, overrides in changes:
            parts = [recipe.stem, name] if len(recipes) > 1 and name else [name or recipe.stem]
            found.append(Variant("-".join(parts), (recipe,), (*common, *overrides)))
    names = [variant.name for variant in found]
    for name in names:
        if names.count(name) > 1 or not SAFE_NAME.fullmatch(name):
            raise UserError(f"variant {name!r}: give every variant a name of its own that can be a folder's")
    return found


def _change(text: str) -> tuple[str, list[str]]:
    name, colon, overrides = text.partition(":")
    if not colon or not all("=" in word for word in shlex.split(overrides)):
        raise UserError(f'--vary {text!r}: write it as "NAME: section.key=value ..."')
    return name.strip(), shlex.split(overrides)


if __name__ == "__main__":
    sys.exit(main())
