"""adapters list|show|verify|rm|import: the registry of teams and their adapters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import add_registry, positive, print_json, show
from teamtr_lora.common.consoles import say


def add_commands(command: Any) -> None:
    adapters = command("adapters", lambda args: args.usage(), "The registry: stored teams and every version of their adapters.")
    adapters.set_defaults(usage=adapters.print_help)
    actions = adapters.add_subparsers(dest="action", metavar="ACTION")

    def action(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = command(f"adapters {name}", run, text, json="print JSON", under=actions)
        add_registry(added)
        return added

    action("list", _list, "Every team, its version, base, agents and metrics.")

    show = action("show", _show, "One team (the current version, or another), or one adapter version.")
    show.add_argument("team", metavar="TEAM", help="or TEAM/AGENT, as --agent")
    show.add_argument("--number", type=positive, metavar="N", help="this team version (default: the current one)")
    show.add_argument("--agent", metavar="NAME", help="one agent's versions")
    show.add_argument("--version", metavar="VERSION", help="with --agent: one version")

    verify = action("verify", _verify, "Compute every hash again and name what does not fit; exit 2 if anything does not.")
    verify.add_argument("team", nargs="?", metavar="TEAM|RUN", help="one team, or a run directory (default: all teams)")

    remove = action("rm", _remove, "Remove an adapter version, an old team version, or a whole team.")
    remove.add_argument("team", metavar="TEAM")
    remove.add_argument("--agent", metavar="NAME", help="with --version: the adapter version to remove")
    remove.add_argument("--version", metavar="VERSION")
    remove.add_argument("--number", type=positive, metavar="N", help="the team version to remove (not the current one)")
    remove.add_argument("--with-teams", action="store_true", help="with --version: also the old team versions that use it")
    remove.add_argument("--all", action="store_true", help="the whole team with all its versions")

    take = action("import", _import, "Store a run's team, or a PEFT LoRA folder trained elsewhere; checked before it is written.")
    take.add_argument("path", type=Path, metavar="PATH", help="a run directory, or a folder that PEFT's save_pretrained wrote")
    take.add_argument("--team", required=True, metavar="NAME", help="the team to store it in")
    take.add_argument("--agent", metavar="NAME", help="PEFT folder: whose adapter it is")
    take.add_argument("--base", metavar="SOURCE", help="PEFT folder, new team: the base it is for, as in a recipe's base.source")


def _list(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.registry import print_teams
    from teamtr_lora.registry.overview import overview

    rows = overview(args.registry)
    print_json(rows) if args.json else print_teams(rows, args.registry)


def _show(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.registry import print_described
    from teamtr_lora.registry.overview import describe

    team, _, agent = args.team.partition("/")
    found = describe(args.registry, team, number=args.number, agent=args.agent or agent or None, version=args.version)
    print_json(found) if args.json else print_described(found)


def _verify(args: argparse.Namespace) -> int:
    from teamtr_lora.cli.text.registry import print_verified
    from teamtr_lora.registry.reader import RegistryReader
    from teamtr_lora.registry.verify import verify_named

    found = verify_named(RegistryReader(args.registry), args.team)
    show(args, found, print_verified)
    return 2 if found.problems else 0


def _remove(args: argparse.Namespace) -> None:
    from teamtr_lora.registry.overview import remove

    which = {name: getattr(args, name) for name in ("agent", "version", "number", "with_teams")}
    gone = remove(args.registry, args.team, whole=args.all, **which)
    print_json({"removed": gone}) if args.json else say("\n".join(f"removed {name}" for name in gone))


def _import(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.registry import print_imported
    from teamtr_lora.registry.imports import import_path
    from teamtr_lora.registry.registry_store import Registry

    def progress(message: str) -> None:
        say(message, stderr=True)

    done = import_path(Registry(args.registry), args.path, team=args.team, agent=args.agent, base=args.base, progress=progress)
    show(args, done, lambda done: print_imported(done, args.registry))
