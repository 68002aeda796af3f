"""certify, diagnose: what a run's directory says about its training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import coefficient, positive, print_json


def add_commands(command: Any) -> None:
    certify = command("certify", _certify, "What the trust region certifies about each stage of a run, beside what was measured.")
    certify.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")
    certify.add_argument("--updates", action="store_true", help="single updates instead of stages; --json always has both")
    certify.add_argument(
        "--block",
        type=positive,
        default=1,
        metavar="N",
        help="consecutive items depend on each other: thm:stage-hp from every other block of N groups (lem:beta-block)",
    )
    certify.add_argument(
        "--beta", type=coefficient, default=0.0, metavar="B", help="their mixing coefficient at that distance (default: 0)"
    )
    certify.add_argument("--json", action="store_true", help="print every term as JSON")

    diagnose = command("diagnose", _diagnose, "Staleness, drift, KL monitors, stability, coordination and cost of a run.")
    diagnose.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")
    diagnose.add_argument("--json", action="store_true", help="print every table as JSON")


def _certify(args: argparse.Namespace) -> None:
    from teamtr_lora.study.certify import certify_run

    certificates = certify_run(args.team, args.block, args.beta)
    if args.json:
        print_json(certificates.as_dict())
        return
    from teamtr_lora.cli.text.certificates import print_certificates

    print_certificates(certificates, updates=args.updates)


def _diagnose(args: argparse.Namespace) -> None:
    from teamtr_lora.study.diagnose import diagnose_run

    diagnosis = diagnose_run(args.team)
    if args.json:
        print_json(diagnosis.as_dict())
        return
    from teamtr_lora.cli.text.diagnostics import print_diagnosis

    print_diagnosis(diagnosis)
