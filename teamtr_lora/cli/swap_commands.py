"""swap, rebase: what replaces agents of a team, or the base under it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import (
    RUNS_CODE,
    add_overrides,
    add_registry,
    add_trust,
    options,
    positive,
    print_json,
    radius,
    show,
)
from teamtr_lora.cli.launch import add_gpus, on_every_gpu
from teamtr_lora.common.errors import UserError

_GO_ON = "Training goes on with the new team: teamtr-lora train RUN --resume training.stages=N"
_NOTES = f"{_GO_ON}\n\n{RUNS_CODE}"
_JSON = "print the report as JSON"


def add_commands(command: Any) -> None:
    swap = command("swap", _swap, "Replace one agent's adapter, aligned with the old one first (Stage-0).", _NOTES, json=_JSON)
    swap.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="a run directory, or a team of a registry")
    swap.add_argument("--agent", metavar="NAME", help="whose adapter is replaced")
    swap.add_argument(
        "--with",
        dest="spec",
        metavar="SPEC",
        help="fresh:rank=32,targets=all-linear (also rslora=, dora=, targets=q_proj+v_proj, and alpha=, by default the old one's "
        "times sqrt(rank / old rank), so that a step has the same effect; of rslora the old one's), a version of the agent, "
        "TEAM/AGENT[/VERSION] of the registry, a folder in PEFT's format, or a hub id user/name[@revision]",
    )
    how = swap.add_mutually_exclusive_group()
    how.add_argument("--stage0", dest="stage0", action="store_true", default=None, help="align it first (default: the recipe's)")
    how.add_argument("--direct", dest="stage0", action="store_false", help="put it in as it is")
    _add_alignment(swap)
    swap.add_argument("--dry-run", action="store_true", help="print the compatibility report and the plan; change nothing")
    swap.add_argument("--undo", action="store_true", help="restore the team before the last swap")
    add_registry(swap)
    add_gpus(swap)
    add_trust(swap)

    text = "Move a whole team to another base with the same tokenizer; every agent is distilled."
    rebase = command("rebase", _rebase, text, RUNS_CODE, json=_JSON)
    rebase.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="a run directory, or a team of a registry; left as it is")
    rebase.add_argument("--to", dest="base", required=True, metavar="BASE", help="the new base: what base.source takes")
    rebase.add_argument("--out", type=Path, metavar="DIR", help="the new run directory (default: RUN-BASE, or runs/TEAM-BASE)")
    rebase.add_argument(
        "--with", dest="spec", default="fresh", metavar="fresh:...", help="as of swap (default: each agent's own)"
    )
    _add_alignment(rebase)
    text = "the new tokenizer may have tokens that the old one lacks (Qwen2.5 to Qwen3); all else must be the same"
    rebase.add_argument("--extra-tokens", action="store_true", help=text)
    add_registry(rebase)
    add_gpus(rebase)
    add_trust(rebase)


def _add_alignment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe-contexts", type=_contexts, metavar="N", help="contexts an agent (default: the recipe's, 500)")
    parser.add_argument("--delta-align", type=radius, metavar="D", help="radius to reach (default: trust_region.delta)")
    parser.add_argument("--items", type=positive, metavar="N", help="held-out items to measure on (default: evaluation.items)")
    add_overrides(parser, "swap.KEY=VALUE", "other settings of the recipe's swap section")


def _contexts(text: str) -> int:
    count = positive(text)
    if count < 4:
        raise argparse.ArgumentTypeError(f"{text} contexts leave too few to hold half of them out; use at least 4")
    return count


def _on_every_gpu(args: argparse.Namespace, place: Any) -> int | None:
    recipe = place.read().recipe
    return on_every_gpu(args, recipe.base.device, recipe.rollout.gpus_each, helping=True)


def _swap(args: argparse.Namespace) -> int | None:
    from teamtr_lora.swap.places import find_place

    place = find_place(args.team, args.registry)
    if args.undo and (args.agent or args.spec or args.dry_run or args.overrides):
        raise UserError("--undo restores the whole team: leave --agent, --with, --dry-run and settings out")
    if not args.undo and not (args.agent and args.spec):
        raise UserError("swap needs --agent NAME and --with SPEC (or --undo)")
    if (ended := on_every_gpu(args, "cpu", helping=True) if args.undo else _on_every_gpu(args, place)) is not None:
        return ended
    if args.undo:
        _undo(place, args.json)
        return None
    from teamtr_lora.cli.text.swap import print_swap, swap_view
    from teamtr_lora.registry.registry_store import Registry
    from teamtr_lora.swap.replace import plan_swap, swapped
    from teamtr_lora.swap.swap_report import SwapOptions

    asked = options(SwapOptions, args, settings=list(args.overrides))
    registry = Registry(args.registry)
    with swap_view(json=args.json) as view:
        if args.dry_run:
            report = plan_swap(place, asked, registry=registry, listener=view)
        else:
            with swapped(place, asked, registry=registry, listener=view) as report:
                view.close()
                show(args, report, print_swap)
            return None
    show(args, report, print_swap)
    return None


def _undo(place: Any, as_json: bool) -> None:
    with place.changing():
        undone = place.undo()
    if as_json:
        print_json({agent: {"from": gone, "to": back} for agent, (gone, back) in undone.changed.items()})
        return
    from teamtr_lora.cli.text.swap import print_undo

    print_undo(place.where, undone)


def _rebase(args: argparse.Namespace) -> int | None:
    from teamtr_lora.cli.text.swap import print_rebase, swap_view
    from teamtr_lora.swap.places import find_place
    from teamtr_lora.swap.rebase import rebased
    from teamtr_lora.swap.swap_report import RebaseOptions

    place = find_place(args.team, args.registry)
    if (ended := _on_every_gpu(args, place)) is not None:
        return ended
    asked = options(RebaseOptions, args, settings=list(args.overrides))
    with swap_view(json=args.json) as view, rebased(place, asked, listener=view) as report:
        view.close()
        show(args, report, print_rebase)
    return None
