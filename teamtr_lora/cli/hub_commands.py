"""push, pull: stored teams and agents to the model hub and back."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from teamtr_lora.cli.arguments import add_registry, show

_TOKEN = "The token is that of `hf auth login` or of HF_TOKEN; HF_ENDPOINT names another hub."
_JSON = "print the result as JSON, without progress bars"


def add_commands(command: Any) -> None:
    text = "Upload a stored team, or one of its agents, to the model hub as one commit."
    push = command("push", _push, text, _TOKEN, json=_JSON)
    push.add_argument("team", metavar="TEAM", help="a team of the registry (`teamtr-lora adapters list`)")
    what = push.add_mutually_exclusive_group()
    what.add_argument("--agent", metavar="NAME", help="only this agent, as a repository that PEFT loads by its name")
    what.add_argument("--all", action="store_true", help="the whole team, as a repository for `pull` (the default)")
    push.add_argument("--repo", required=True, metavar="USER/NAME", help="where to; made if it does not exist")
    push.add_argument("--private", action="store_true", help="make a new repository private; refuse a public one")
    push.add_argument("--revision", metavar="R", help="branch to push to; made if it does not exist (default: main)")
    push.add_argument("--dry-run", action="store_true", help="check, and print what would go up; the hub is not asked")
    add_registry(push)

    text = "Restore a team from the model hub into the registry; every hash is checked first."
    pull = command("pull", _pull, text, _TOKEN, json=_JSON)
    pull.add_argument("repo", metavar="USER/NAME", help="a repository that `push` made of a team")
    pull.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")
    pull.add_argument("--name", metavar="NAME", help="the team's name here (default: the one it has there)")
    add_registry(pull)


def _push(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.hub_transfers import print_pushed
    from teamtr_lora.registry.hub import push
    from teamtr_lora.registry.hub_client import progress_bars

    with progress_bars(shown=not args.json and sys.stderr.isatty()):
        pushed = push(
            args.team,
            args.repo,
            agent=args.agent,
            private=args.private,
            revision=args.revision,
            dry_run=args.dry_run,
            root=args.registry,
        )
    show(args, pushed, print_pushed)


def _pull(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.hub_transfers import print_pulled
    from teamtr_lora.registry.hub import pull
    from teamtr_lora.registry.hub_client import progress_bars

    with progress_bars(shown=not args.json and sys.stderr.isatty()):
        pulled = pull(args.repo, revision=args.revision, name=args.name, root=args.registry)
    show(args, pulled, print_pulled)
