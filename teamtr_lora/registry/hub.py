"""Teams and agents to the model hub and back: verified before they leave and before they arrive, in one commit or none."""

from __future__ import annotations

import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from teamtr_lora.base.versions import WEIGHTS
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import known_agent
from teamtr_lora.registry.fit import check_lora
from teamtr_lora.registry.hub_client import COMMIT, HubRepo, Remote
from teamtr_lora.registry.manifest import TeamManifest, manifest_bytes, sealed
from teamtr_lora.registry.pulled_files import advice, check_listing, facts_of, fetch_team, fetch_version, fetched, staging
from teamtr_lora.registry.pushed_files import TEAM_FILE, Parcel, agent_parcel, fingerprint, team_parcel
from teamtr_lora.registry.reader import DEFAULT_ROOT, VERSION_FILES, parse_team, read_file, safe
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import locate


@dataclass(frozen=True)
class Pushed:
    """What went up; `commit` is None after a dry run."""

    repo: str
    revision: str
    team: str
    agent: str | None
    files: dict[str, int]  # path -> bytes
    removed: list[str]
    notes: list[str]
    url: str
    commit: str | None = None
    created: bool = False
    unchanged: bool = False


@dataclass(frozen=True)
class Pulled:
    repo: str
    commit: str
    root: str
    team: str
    number: int
    agents: dict[str, str]
    status: Literal["new", "updated", "already here"]
    current: int  # the team's newest version here
    notes: list[str]


def push(
    team: str,
    repo: str,
    *,
    agent: str | None = None,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    root: Path = DEFAULT_ROOT,
) -> Pushed:
    """Uploads a stored team, or one of its agents, as one commit."""
    hub = HubRepo(repo, revision)
    if COMMIT.fullmatch(hub.revision):
        raise UserError(f"--revision: '{hub.revision}' is a commit; a push goes to a branch")
    registry, manifest = _stored_team(team, root)
    if agent is not None:
        known_agent(agent, manifest.agents)
    parcel = team_parcel(registry, manifest, hub.name) if agent is None else agent_parcel(registry, manifest, agent, hub.name)
    result: dict[str, Any] = {"repo": hub.name, "revision": hub.revision, "team": manifest.team, "agent": agent}
    result |= {"files": parcel.sizes(), "notes": parcel.notes, "url": hub.url}
    if dry_run:
        return Pushed(**result, removed=[])
    head, created = _prepared(hub, private)
    there = _check_target(hub, head, manifest, agent)
    stale = [] if agent else _stale(head, parcel, there)
    what = f"{manifest.team}/{agent} {manifest.agents[agent]}" if agent else f"team {manifest.team} version {manifest.number}"
    commit = hub.commit(head, parcel.files, stale, f"teamtr-lora: {what}")
    return Pushed(**result, removed=stale, commit=commit, created=created, unchanged=commit == head.commit)


def pull(repo: str, *, revision: str | None = None, name: str | None = None, root: Path = DEFAULT_ROOT) -> Pulled:
    """Restores a team into the registry; without a name, under the one it has there."""
    hub, registry = HubRepo(repo, revision), Registry(root)
    if name is not None:
        safe(name, "--name:")
    remote = hub.look()
    if remote is None:
        raise UserError(
            f"{hub.where}: not on the hub, or private; check the name and the revision, or log in with `hf auth login`"
        )
    with staging(registry.root) as folder:
        sent, history = fetch_team(hub, remote, folder)
        team = sealed(sent.model_copy(update={"team": name or sent.team}))
        status = _status(registry, team, history, hub)
        missing = [agent for agent in team.agents if not _here(registry, team, agent)]
        for agent in missing:  # before anything is stored: a refused pull stores nothing
            registry.check_number_is_free(team.team, agent, team.agents[agent], hub.where)
        check_listing(hub, remote, sent, missing)
        facts = facts_of(sent) if missing else None
        for agent in missing:
            fetch_version(hub, remote, sent, agent, folder, facts)
        new = not registry.team_folder(team.team).exists()
        target = Registry(folder / ".new") if new else registry  # a new team is put together aside and comes in whole
        try:
            for agent in missing:
                contents = {file: read_file(folder / agent / file, limit) for file, limit in VERSION_FILES.items()}
                target.adopt_adapter(contents, f"{hub.where}/{agent}", team.team)
            if status != "already here":
                target.adopt_team(manifest_bytes(team), f"{hub.where}/{TEAM_FILE}")
            if new:
                registry.move_in(target, team.team)
        except BaseException:  # a full disk, an interrupt: adapters without their team would keep their numbers
            registry.withdraw(team.team, {agent: team.agents[agent] for agent in missing})
            raise
    current = registry.numbers(team.team)[-1]
    return Pulled(
        repo=hub.name,
        commit=remote.commit,
        root=str(registry.root),
        team=team.team,
        number=team.number,
        agents=dict(team.agents),
        status=status,
        current=current,
        notes=advice(team),
    )


def _stored_team(word: str, root: Path) -> tuple[Registry, TeamManifest]:
    """The team that a word means, to push its current version."""
    found = locate(word, root)
    if found.kind == "run":
        name = re.sub(r"[^a-z0-9_-]+", "-", found.path.resolve().name.lower()).strip("-_0123456789")[:32] or "my-team"
        command = f"teamtr-lora adapters import {shlex.quote(word)} --team {name}"
        raise UserError(f"{word}: a run directory; store its team with `{command}`, then push it by its name")
    if found.number is not None:
        raise UserError(f"{word}: one version of a team; push takes the current one, by the team's name or folder")
    registry = Registry(found.path)
    return registry, registry.team(found.team)


def _prepared(hub: HubRepo, private: bool) -> tuple[Remote, bool]:
    """The head of the branch that the commit goes on; repository and branch are made where they are missing."""
    main = HubRepo(hub.name)
    whole, created = main.look(), False
    if whole is None:
        main.create(private)
        whole, created = main.look(), True
    elif private and not whole.private:
        raise UserError(
            f"{hub.name}: is public, and --private was asked for; make it private on the hub, or choose another --repo"
        )
    head = whole if hub.revision == "main" else hub.look()
    if head is None and whole is not None:
        hub.make_branch()
        head = hub.look()
    if head is None:
        raise UserError(f"{hub.where}: was made, and the hub does not show it yet; run the command again")
    return head, created


def _check_target(hub: HubRepo, head: Remote, team: TeamManifest, agent: str | None) -> TeamManifest | None:
    """The team that is there already. A repository holds one team or one agent: two in one would make both unreadable."""
    other = "choose another --repo or --revision"
    if agent is not None and TEAM_FILE in head.files:
        raise UserError(f"{hub.where}: holds a team, and --agent asks for a repository of its own; {other}")
    if agent is None and WEIGHTS in head.files:
        raise UserError(f"{hub.where}: holds a single adapter, not a team; {other}")
    if agent is not None or TEAM_FILE not in head.files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        there = parse_team(fetched(hub, head, TEAM_FILE, Path(folder)), f"{hub.where}/{TEAM_FILE}")
    if there.team != team.team:
        raise UserError(f"{hub.where}: holds the team {there.team!r}, not {team.team!r}; {other}")
    return there


def _stale(head: Remote, parcel: Parcel, there: TeamManifest | None) -> list[str]:
    """Files of agents that the team no longer has. Other folders may hold a README.md or a manifest.json of their own."""
    folders = {path.partition("/")[0] for path in head.files if path.count("/") == 1}
    whole = {folder for folder in folders if all(f"{folder}/{file}" in head.files for file in VERSION_FILES)}
    agents = whole | (set(there.agents) if there else set())
    ours = {f"{agent}/{file}" for agent in agents for file in VERSION_FILES}
    return sorted(ours & head.files.keys() - parcel.files.keys())


def _status(
    registry: Registry, team: TeamManifest, history: dict[int, str], hub: HubRepo
) -> Literal["new", "updated", "already here"]:
    """Whether the team may come in under its name: as a new one, or as a later version of the one that is here."""
    numbers = registry.numbers(team.team)
    if not numbers:
        return "new"
    here = registry.team(team.team, team.number if team.number in numbers else numbers[-1])
    if here.number == team.number and fingerprint(here) == fingerprint(team):
        return "already here"
    if here.number < team.number and history.get(here.number) == fingerprint(here):
        return "updated"
    raise UserError(
        f"{hub.where}: its team {team.team!r} (version {team.number}) is not a later version of the {team.team!r} in "
        f"{registry.root} (version {numbers[-1]}); pull it under another name, such as --name {team.team[:29]}-2"
    )


def _here(registry: Registry, team: TeamManifest, agent: str) -> bool:
    """Whether the agent's version is stored already, whole."""
    version = team.agents[agent]
    if version not in registry.versions(team.team, agent):
        return False
    registry.contents(team.team, agent, version)
    check_lora(registry.lora(team.team, agent, version), team.load_recipe().team.lora_of(agent), f"{team.team}/{agent}/{version}")
    return True
