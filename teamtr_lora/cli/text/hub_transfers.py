"""What a push or a pull did, in words."""

from __future__ import annotations

from rich.filesize import decimal

from teamtr_lora.registry.hub import Pulled, Pushed


def print_pushed(pushed: Pushed) -> None:
    what = f"{pushed.team}/{pushed.agent}" if pushed.agent else f"team {pushed.team}"
    total = f"{len(pushed.files)} files, {decimal(sum(pushed.files.values()))}"
    if pushed.commit is None:
        print(f"{what} would go to {pushed.repo} ({pushed.revision}): {total}")
        for path, size in pushed.files.items():
            print(f"  {decimal(size):>10}  {path}")
    elif pushed.unchanged:
        print(f"{what}: {pushed.url} has all of it already (commit {pushed.commit[:12]})")
    else:
        made = "a new repository, " if pushed.created else ""
        print(f"{what} is at {pushed.url} ({made}commit {pushed.commit[:12]}): {total}")
    for path in pushed.removed:
        print(f"  removed there: {path}")
    for note in pushed.notes:
        print(f"  {note}")


def print_pulled(pulled: Pulled) -> None:
    where = f"{pulled.root}/{pulled.team}"
    if pulled.status == "already here":
        later = f"; the current version is {pulled.current}" if pulled.current != pulled.number else ""
        print(f"{where}: version {pulled.number} is here already{later}")
    else:
        print(f"{where}: version {pulled.number} ({pulled.status}), from {pulled.repo} at commit {pulled.commit[:12]}")
    for agent, version in pulled.agents.items():
        print(f"  {agent}: {version}")
    for note in pulled.notes:
        print(f"  {note}")
