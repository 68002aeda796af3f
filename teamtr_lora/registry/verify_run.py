"""`adapters verify RUN`: every hash and every checksum of a run directory computed again."""

from __future__ import annotations

import re
from pathlib import Path

from teamtr_lora.base.versions import VERSION_NAME, AdapterVersion, verify_version
from teamtr_lora.registry.reader import RegistryReader, entries
from teamtr_lora.registry.verify import Verified, verify
from teamtr_lora.runs import layout
from teamtr_lora.runs.metrics import damaged_rows
from teamtr_lora.runs.run_state import CheckpointReader
from teamtr_lora.runs.stored_run import StoredRun, read_run


def verify_named(registry: RegistryReader, name: str | None) -> Verified:
    """What `adapters verify` was given: a run directory, a team of the registry, or nothing, which is all teams."""
    return verify_run(Path(name)) if name is not None and layout.is_run(Path(name)) else verify(registry, name)


def verify_run(path: Path) -> Verified:
    """Checks its team and recipe, every adapter, every row of its log and every checkpoint; evaluations are not looked at."""
    found = Verified()
    layout.refuse_links(path, layout.OWN_NAMES)
    run: StoredRun | None = None
    with found.finding(path):
        run = read_run(path)
    versions = _adapters(path / layout.ADAPTERS, found)
    for agent, version in run.versions.items() if run else ():
        if version not in versions:
            found.add(path / layout.TEAM, f"its {agent} {version.name} is missing or damaged")
    with found.finding(path / layout.METRICS):
        found.rows, damaged = damaged_rows(path)
        for line, wrong in damaged:
            found.add(f"{path / layout.METRICS}: line {line}", wrong)
    _checkpoints(path, run, found)
    return found


def _adapters(folder: Path, found: Verified) -> set[AdapterVersion]:
    good: set[AdapterVersion] = set()
    for place in [inner for agent in entries(folder) if agent.is_dir() for inner in entries(agent)]:
        if place.name.startswith("."):
            continue  # what a killed process left; the next one that trains here clears it
        if not re.fullmatch(VERSION_NAME, place.name):
            found.add(place, "does not belong in an agent's folder")
            continue
        found.adapters += 1
        with found.finding(place):
            good.add(verify_version(place))
    return good


def _checkpoints(path: Path, run: StoredRun | None, found: Verified) -> None:
    reader = CheckpointReader(path)
    for step in reader.steps():
        found.checkpoints += 1
        with found.finding(step):
            state = reader.read_step(step)
            if run and step == reader.steps()[-1] and state.versions != run.versions:
                found.add(path / layout.TEAM, f"is not the team of {step.name}; train {path} --resume writes it again")
