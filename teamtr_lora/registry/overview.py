"""What `adapters list`, `show` and `rm` say and do, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import meant
from teamtr_lora.registry.reader import RegistryReader
from teamtr_lora.registry.registry_store import Registry


def overview(root: Path) -> list[dict[str, Any]]:
    """A row for each team; one that cannot be read says why."""
    registry, rows = RegistryReader(root), []
    for name in registry.names(root):
        stored = {agent: registry.versions(name, agent) for agent in registry.agents(name)}
        numbers = registry.numbers(name)
        row: dict[str, Any] = {"team": name, "versions": len(numbers), "adapters": sum(map(len, stored.values()))}
        if not numbers and not row["adapters"]:
            continue
        try:
            if numbers:
                team = registry.team(name)
                row |= {
                    "number": team.number,
                    "made_by": team.made_by,
                    "created": team.created,
                    "base": team.base.source,
                    "task": team.load_recipe().task.name,
                    "agents": team.agents,
                    "metrics": team.metrics,
                }
        except UserError as error:
            row["problem"] = str(error)
        rows.append(row)
    return rows


def describe(
    root: Path, team: str, *, number: int | None = None, agent: str | None = None, version: str | None = None
) -> dict[str, Any]:
    """A team version with its lineage, an agent's versions, or one adapter version's manifest."""
    registry = RegistryReader(root)
    if version is not None and agent is None:
        raise UserError(f"--version {version}: say whose with --agent")
    if agent is None:
        manifest = registry.team(team, number)
        return {**manifest.model_dump(mode="json"), "versions": registry.numbers(team)}
    if number is not None:
        raise UserError("--number is for a team version; leave out --agent")
    if version is not None:
        described = registry.manifest(team, agent, version).model_dump(mode="json")
        return {
            **described,
            "folder": str(registry.folder(team, agent, version)),
            "used_by": registry.users(team, agent, version),
        }
    names = registry.versions(team, agent)
    if not names:
        raise UserError(f"{root / team}: no agent {agent!r} here; {meant(agent, registry.agents(team))}")
    rows = []
    for name in names:
        described = registry.manifest(team, agent, name).model_dump(mode="json")
        rows.append({key: described[key] for key in ("version", "made_by", "parent", "created", "metrics")})
        rows[-1]["used_by"] = registry.users(team, agent, name)
    return {"team": team, "agent": agent, "adapters": rows}


def remove(
    root: Path, team: str, *, agent: str | None, version: str | None, number: int | None, with_teams: bool, whole: bool
) -> list[str]:
    """Exactly one thing is named; nothing is removed by leaving options out."""
    named = [agent is not None or version is not None, number is not None, whole]
    if sum(named) != 1 or (agent is None) != (version is None):
        raise UserError("rm: give --agent NAME --version VERSION, or --number N, or --all")
    return Registry(root).remove(team, agent=agent, version=version, number=number, with_teams=with_teams)
