"""What a push or a pull did, in words."""

from __future__ import annotations

from rich.filesize import decimal

from teamtr_lora.common.consoles import say
from teamtr_lora.registry.hub import Pulled, Pushed


def print_pushed(pushed: Pushed) -> None:
    what = f"{pushed.team}/{pushed.agent}" if pushed.agent else f"team {pushed.team}"
    total = f"{len(pushed.files)} files, {decimal(sum(pushed.files.values()))}"
    if pushed.commit is None:
        say(f"{what} would go to {pushed.repo} ({pushed.revision}): {total}")
        for path, size in pushed.files.items():
            say(f"  {decimal(size):>10}  {path}")
    elif pushed.unchanged:
        say(f"{what}: {pushed.url} has all of it already (commit {pushed.commit[:12]})")
    else:
        made = "a new repository, " if pushed.created else ""
        say(f"{what} is at {pushed.url} ({made}commit {pushed.commit[:12]}): {total}")
    for path in pushed.removed:
        say(f"  removed there: {path}")
    for note in pushed.notes:
        say(f"  {note}")


def print_pulled(pulled: Pulled) -> None:
    where = f"{pulled.root}/{pulled.team}"
    if pulled.status == "already here":
        later = f"; the current version is {pulled.current}" if pulled.current != pulled.number else ""
        say(f"{where}: version {pulled.number} is here already{later}")
    else:
        say(f"{where}: version {pulled.number} ({pulled.status}), from {pulled.repo} at commit {pulled.commit[:12]}")
    for agent, version in pulled.agents.items():
        say(f"  {agent}: {version}")
    for note in pulled.notes:
        say(f"  {note}")
