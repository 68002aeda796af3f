"""certify, diagnose: what a run's directory says about its training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import coefficient, positive, show


def add_commands(command: Any) -> None:
    text = "What the trust region certifies about each stage of a run, beside what was measured."
    certify = command("certify", _certify, text, json="print every term as JSON")
    certify.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")
    certify.add_argument("--updates", action="store_true", help="single updates instead of stages; --json always has both")
    text = "consecutive items depend on each other: thm:stage-hp from every other block of N groups (lem:beta-block)"
    certify.add_argument("--block", type=positive, default=1, metavar="N", help=text)
    certify.add_argument("--beta", type=coefficient, default=0.0, metavar="B", help="their mixing coefficient (default: 0)")

    text = "Staleness, drift, KL monitors, stability, coordination and cost of a run."
    diagnose = command("diagnose", _diagnose, text, json="print every table as JSON")
    diagnose.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")


def _certify(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.certificates import print_certificates
    from teamtr_lora.study.certify import certify_run

    show(args, certify_run(args.team, args.block, args.beta), lambda run: print_certificates(run, updates=args.updates))


def _diagnose(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.diagnostics import print_diagnosis
    from teamtr_lora.study.diagnose import diagnose_run

    show(args, diagnose_run(args.team), print_diagnosis)
