"""What a pull takes from a repository: files of known names and bounded sizes, believed only after every hash fits.

Nothing that is fetched runs. A recipe may name Python that its user has to supply; what it says about files and servers of
another machine is refused, as a stranger's recipe could otherwise choose what this machine reads, writes and whom it calls.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from teamtr_lora.base.adapter_files import MAX_JSON_BYTES
from teamtr_lora.base.frozen_base import BaseFacts, base_facts
from teamtr_lora.base.lora_config import read_lora_config
from teamtr_lora.base.source import is_shared_name, present
from teamtr_lora.base.versions import WEIGHTS
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import TEMPORARY, disk_errors
from teamtr_lora.common.foreign_files import parse_json, show
from teamtr_lora.common.locks import locked
from teamtr_lora.recipe.named import named_code
from teamtr_lora.registry.fit import check_lora, check_targets, modules_of, pickles, understand
from teamtr_lora.registry.hub_client import HubRepo, Remote
from teamtr_lora.registry.local_keys import leaves_its_folder, local_choices, local_files, local_paths
from teamtr_lora.registry.manifest import TeamManifest
from teamtr_lora.registry.programs import programs_of
from teamtr_lora.registry.pushed_files import HISTORY_FILE, TEAM_FILE
from teamtr_lora.registry.reader import VERSION_FILES, check_belongs, checked_recipe, open_version, parse_team, read_file

LIMITS = {**VERSION_FILES, TEAM_FILE: MAX_JSON_BYTES, HISTORY_FILE: MAX_JSON_BYTES}
MAX_TOTAL_BYTES = 64 << 30
_STAGING = f"{TEMPORARY}pull"


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A folder in the registry for what is not yet checked. Pulls into one registry take turns; a killed one's is cleared."""
    folder = root / _STAGING
    with locked(root / ".pull", root):
        try:
            with disk_errors(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fetch_team(hub: HubRepo, remote: Remote, folder: Path) -> tuple[TeamManifest, dict[int, str]]:
    """The repository's team, and the fingerprints of its earlier versions."""
    if TEAM_FILE not in remote.files:
        single = WEIGHTS in remote.files
        hint = (
            "it is one agent's adapter: `teamtr-lora swap TEAM --agent NAME --with` takes it"
            if single
            else "no team was pushed there"
        )
        raise UserError(f"{hub.where}: holds no {TEAM_FILE}; {hint}")
    where = f"{hub.where}/{TEAM_FILE}"
    team = parse_team(fetched(hub, remote, TEAM_FILE, folder), where)
    try:
        checked_recipe(team)
    except UserError as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from error
    _check_recipe(team.recipe, where)
    history: dict[int, str] = {}
    if HISTORY_FILE in remote.files:
        said = parse_json(fetched(hub, remote, HISTORY_FILE, folder), f"{hub.where}/{HISTORY_FILE}")
        for number, fingerprint in said.items():
            if not re.fullmatch(r"[1-9][0-9]{0,8}", number) or not re.fullmatch(r"[0-9a-f]{64}", str(fingerprint)):
                raise UserError(f"{hub.where}/{HISTORY_FILE}: {show(number)} is no team version with its hash")
            history[int(number)] = str(fingerprint)
    return team, history


def check_listing(hub: HubRepo, remote: Remote, team: TeamManifest, agents: list[str]) -> None:
    """Every file that is needed is there, under its own name and not too large, before the first is fetched; and nothing that
    no push puts there: a pickle, or a path that leads out."""
    for path in sorted(remote.files):
        if leaves_its_folder(path):
            raise UserError(f"{hub.where}: lists {show(path)}, a path that leads out of it; not pulled")
        if pickles([path.rpartition("/")[2]]):
            raise UserError(f"{hub.where}: {show(path)} is a pickle, which can run code when loaded; not pulled")
    total = 0
    for agent in agents:
        for file, limit in VERSION_FILES.items():
            path = f"{agent}/{file}"
            if path not in remote.files:
                raise UserError(f"{hub.where}: {path} is missing")
            total += _size(hub, remote, path, limit)
    if total > MAX_TOTAL_BYTES:
        raise UserError(f"{hub.where}: team {team.team!r} has {total} bytes; more than {MAX_TOTAL_BYTES} are not pulled")


def fetch_version(hub: HubRepo, remote: Remote, team: TeamManifest, agent: str, folder: Path, facts: BaseFacts | None) -> None:
    """One agent's files in `folder`/AGENT, checked completely: every hash, and every tensor against its own config, the recipe
    and, with `facts`, the base. They are what team.json names and can be used, or nothing is taken."""
    where, expected = f"{hub.where}/{agent}", (team.team, agent, team.agents[agent])
    contents = {file: fetched(hub, remote, f"{agent}/{file}", folder) for file in VERSION_FILES}
    manifest, _, config = open_version(contents, where, expected)
    check_belongs(manifest, team, where)
    wanted = team.load_recipe().team.lora_of(agent)
    check_lora(read_lora_config(config, where), wanted, where)
    targets = understand(contents, where, facts).lora.targets
    check_targets(modules_of(targets, facts) if facts else targets, wanted, facts, where)


def facts_of(team: TeamManifest) -> BaseFacts | None:
    """What is known of the team's base; None where it is not on this machine."""
    folder = present(team.base.source, team.base.revision)
    return base_facts(folder) if folder else None


def advice(team: TeamManifest) -> list[str]:
    """What a pulled team needs that did not come with it."""
    code, responder = named_code(team.recipe), getattr(team.load_recipe().task, "responder", None)
    notes = [f"{key} = {show(path)}: Python code that you must supply; read it before you use it" for key, path in code.items()]
    if not is_shared_name(team.base.source):
        notes.append(f"base.source = {show(team.base.source)}: a base that you must supply, in a folder of that name")
    notes += [f"{key} = {show(value)}: a file that you must supply" for key, value in local_files(team.recipe).items()]
    if dataset := programs_of(team.load_recipe().placed_in(Path.cwd())):
        notes.append(f"task: runs programs that come with the dataset {show(dataset)}; playing it asks for --trust-programs once")
    if responder is not None and responder.script is None:
        notes.append("task.responder.url: a server that you must supply; without one nobody answers the team")
    return notes


def fetched(hub: HubRepo, remote: Remote, path: str, folder: Path) -> bytes:
    limit = LIMITS[path.rpartition("/")[2]]
    _size(hub, remote, path, limit)
    return read_file(hub.fetch(path, remote, folder), limit)


def _size(hub: HubRepo, remote: Remote, path: str, limit: int) -> int:
    size = remote.files[path].size
    if not 0 <= size <= limit:
        raise UserError(f"{hub.where}: {path} has {size} bytes; such a file may have {limit}")
    return size


def _check_recipe(recipe: dict[str, Any], where: str) -> None:
    """Refuses values that choose what this machine reads, writes or calls. `push` removes them, so somebody put them back."""
    found, source = {**local_choices(recipe), **local_paths(recipe)}, recipe.get("base", {}).get("source")
    if isinstance(source, str) and leaves_its_folder(source):
        found["base.source"] = source
    for key, value in found.items():
        raise UserError(f"{where}: its recipe sets {key} to {show(value)}, which is for this machine to choose; not pulled")
