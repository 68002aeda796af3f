"""Places that hold a team: a run directory or a team of a registry. Each takes a replacement in one step, and gives it back."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from teamtr_lora.algorithm.radii import gain_weighted_radii
from teamtr_lora.base.versions import AdapterVersion, content_hash, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import LoraSection, Recipe
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.locks import locked
from teamtr_lora.registry.manifest import VERSION_NAME, Replaced, one_line
from teamtr_lora.registry.reader import DEFAULT_ROOT, TEAM_FILE, entries
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import find_team
from teamtr_lora.runs.checkpoint import RunState
from teamtr_lora.runs.metrics import MetricsRow, StageRow, SwapRow, read_rows
from teamtr_lora.runs.run_dir import BASELINE, RunDir
from teamtr_lora.swap.newcomer import Incoming

WORK = ".swap"  # unfinished work of a run directory


@dataclass(frozen=True)
class HeldTeam:
    recipe: Recipe
    versions: dict[str, AdapterVersion]
    adapters: Path  # AGENT/VERSION lies in here


@dataclass(frozen=True)
class Replacement:
    """One agent's new adapter, and what is to be remembered of how it came."""

    agent: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    lora: LoraSection
    how: str  # stage0 or direct
    source: str
    measured: dict[str, Any] = field(default_factory=dict)  # the remaining fields of a SwapRow


@dataclass(frozen=True)
class Undone:
    changed: dict[str, tuple[str, str]]  # by agent, the version that went and the one that is back
    trained: list[str] = field(default_factory=list)  # the agents that were updated after the swap; that is undone with it


class Place(Protocol):
    where: str
    work: Path

    def changing(self) -> AbstractContextManager[None]:
        """While it lasts nobody else changes the team."""
        ...

    def read(self) -> HeldTeam: ...

    def beside(self, suffix: str) -> Path:
        """Where a run directory made from this team goes by default."""
        ...

    def known(self, incoming: Incoming, agent: str) -> Incoming:
        """A version of `agent`'s own (`incoming.spec`), with what is known here of where it came from."""
        ...

    def new_version(self, replacement: Replacement) -> str:
        """The name that `replacement` has, or would have, here."""
        ...

    def commit(self, replacement: Replacement) -> dict[str, str]:
        """The team's versions afterwards. Killed before it returns, the old team or the new one is there, whole."""
        ...

    def undo(self) -> Undone:
        """Puts the team from before the last replacement back."""
        ...


def find_place(source: Path, registry: Path = DEFAULT_ROOT) -> Place:
    # os.path's, unlike Path's, have no quarrel with a name that no file system takes
    if os.path.exists(source / BASELINE):
        raise UserError(f"{source}: holds a run of `teamtr-lora baseline`, which is no team to train on; give a run of train")
    if os.path.isfile(source / "recipe.yaml"):
        return RunPlace(RunDir(source))
    place = Path(os.path.realpath(source)) if os.path.isdir(source) else source
    if os.path.isdir(place) and any(TEAM_FILE.fullmatch(path.name) for path in entries(place)):
        return RegistryPlace(Registry(place.parent), place.name)
    if source == Path(source.name) and source.name in Registry(registry).teams():
        return RegistryPlace(Registry(registry), source.name)
    raise UserError(f"{source}: no run or team here; give the folder that train printed, or a team of {registry}")


class RunPlace:
    """The checkpoint is what counts: its folder appears in one step. team.json and recipe.yaml follow it."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.where, self.work = run, str(run.path), run.path / WORK
        self._completed: dict[str, Any] | None = None  # what a killed process had decided and not yet told

    @contextmanager
    def changing(self) -> Iterator[None]:
        lock = self.run.lock()
        try:
            self._settle()
            yield
        finally:
            lock.release()

    def read(self) -> HeldTeam:
        stored = find_team(self.run.path)
        if not self.run.checkpoints.exists():
            return HeldTeam(stored.recipe, stored.versions, stored.adapters)
        versions = self.run.checkpoints.state().adapter_versions() or stored.versions
        return HeldTeam(self.run.with_swaps(stored.recipe), versions, stored.adapters)

    def beside(self, suffix: str) -> Path:
        place = self.run.path.resolve()
        return place.with_name(f"{place.name}-{suffix}")

    def known(self, incoming: Incoming, agent: str) -> Incoming:
        swaps = self.run.checkpoints.state().swaps if self.run.checkpoints.exists() else []
        sources = [
            record["source"] for record in swaps
            if record["how"] == "direct" and record["agent"] == agent
            and record["after"][agent]["content_hash"].startswith(incoming.spec.rpartition("-")[2])
        ]  # fmt: skip
        return replace(incoming, from_outside=any(map(_from_outside, sources)))

    def new_version(self, replacement: Replacement) -> str:
        return self._version(replacement, self.read().versions[replacement.agent]).name

    def commit(self, replacement: Replacement) -> dict[str, str]:
        agent, held = replacement.agent, self.read()
        version = self._version(replacement, held.versions[agent])
        write_version(held.adapters, version, replacement.tensors, replacement.config)
        after = {**held.versions, agent: version}
        lora_before = next(a.lora for a in held.recipe.team.agents if a.name == agent).model_dump(mode="json")
        record = {
            "how": replacement.how, "source": replacement.source, "agent": agent, "lora_before": lora_before,
            "lora": replacement.lora.model_dump(mode="json"), "before": _plain(held.versions), "after": _plain(after),
        }  # fmt: skip
        self._save(held, after, record, replacement.measured)
        return _names(after)

    def undo(self) -> Undone:
        held = self.read()
        done = self.run.checkpoints.state().swaps if self.run.checkpoints.exists() else []
        completed = self._completed if self._completed is not None and self._completed["how"] == "undo" else None
        if completed:
            done = done[:-1]
        standing: list[dict[str, Any]] = []
        for record in done:
            standing = standing[:-1] if record["how"] == "undo" else [*standing, record]
        if not standing:
            raise UserError(f"{self.where}: there is no swap to undo")
        last = standing[-1]
        gone, after = _versions(completed["before"]) if completed else held.versions, _versions(last["before"])
        undone = Undone(_changed(gone, after), list(_changed(_versions(last["after"]), gone)))
        if completed:
            return undone
        record = {
            "how": "undo", "source": f"before the swap of {last['agent']}", "agent": last["agent"], "lora_before": last["lora"],
            "lora": last["lora_before"], "before": _plain(held.versions), "after": _plain(after),
        }  # fmt: skip
        self._save(held, after, record, {})
        return undone

    def _version(self, replacement: Replacement, old: AdapterVersion) -> AdapterVersion:
        return AdapterVersion(replacement.agent, old.number + 1, content_hash(replacement.tensors, replacement.config))

    def _save(self, held: HeldTeam, after: dict[str, AdapterVersion], record: dict[str, Any], measured: dict[str, Any]) -> None:
        """The commit. Agents that change start with fresh optimizers, penalties and radii; a stage in progress begins anew."""
        run, agent = self.run, record["agent"]
        changed = [name for name, version in after.items() if version != held.versions[name]]
        state, optimizers = run.checkpoints.load() if run.checkpoints.exists() else (RunState(versions=_plain(held.versions)), {})
        run.metrics.truncate(state.metrics_bytes)
        for name in changed:
            optimizers.pop(name, None)
            state.betas.pop(name, None)
            state.radii.pop(name, None)
            state.slopes[name] = None
        if held.recipe.trust_region.radii == "gain_weighted" and state.radii:
            state.radii = gain_weighted_radii(held.recipe.trust_region.delta, state.slopes)
        original = next(r["lora_before"] for r in [*state.swaps, record] if r["agent"] == agent)
        state.loras.pop(agent, None)
        if record["lora"] != original:
            state.loras[agent] = record["lora"]
        state.swaps.append(record)
        state.versions, state.rollout_versions, state.update = _plain(after), {}, 0
        row = _row(state, record, held.versions, after, measured)
        state.sampled_tokens += row.sampled_tokens
        state.seconds += row.seconds
        known = row.evaluation
        if record["how"] == "undo":  # what was measured last is not the team that is back
            known = _evaluation_of(row.versions, read_rows(run.path / "metrics.jsonl")) if state.started else None
            state.accuracy_after, state.episodes_evaluated = None, 0
        if known:
            state.accuracy_after, state.episodes_evaluated = known["avg_at_k"], known["episodes"]
        if state.started:
            run.metrics.append(row)
        state.metrics_bytes = run.metrics.size
        state.step += 1
        run.checkpoints.save(state, optimizers)
        self._settle()
        self._completed = None  # this process tells it itself

    def _settle(self) -> None:
        """What follows the checkpoint. A process killed in between left it to the next one."""
        if not self.run.checkpoints.exists():
            return
        state = self.run.checkpoints.state()
        if state.swaps and state.versions:
            stored = find_team(self.run.path)
            if stored.versions != state.adapter_versions() and stored.versions == _versions(state.swaps[-1]["before"]):
                self._completed = state.swaps[-1]
            self.run.write_team(state.adapter_versions(), state.loras)
            recipe = self.run.with_swaps(stored.recipe)
            if recipe != stored.recipe or not (self.run.path / "recipe.yaml").exists():
                self.run.write_recipe(recipe)


class RegistryPlace:
    """Every team version is a file of its own: the new one appears in one step."""

    def __init__(self, registry: Registry, team: str) -> None:
        self.registry, self.team, self.where = registry, team, str(registry.root / team)
        self.work = registry.root / f".{team}{WORK}"
        self._seen: dict[str, str] | None = None  # the versions that were read, which are those a swap measures

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Swaps of one team take turns; whoever publishes meanwhile makes the swap fail and loses nothing."""
        busy = "another process is swapping an agent here; wait for it"
        with locked(self.registry.root / f".{self.team}{WORK}.lock", Path(self.where), busy):
            yield

    def read(self) -> HeldTeam:
        stored = find_team(self.registry.root / self.team)
        self._seen = {agent: version.name for agent, version in stored.versions.items()}
        return HeldTeam(stored.recipe, stored.versions, stored.adapters)

    def beside(self, suffix: str) -> Path:
        return Path("runs") / f"{self.team}-{suffix}"

    def known(self, incoming: Incoming, agent: str) -> Incoming:
        self.registry.contents(self.team, agent, incoming.spec)  # every hash fits
        manifest = self.registry.manifest(self.team, agent, incoming.spec)
        teams = [self.registry.team(self.team, number) for number in self.registry.numbers(self.team)]
        steps = [step.how for team in teams for step in team.lineage if (step.agent, step.new) == (agent, incoming.spec)]
        swapped_in = [how.partition(" from ")[2] for how in steps if how.startswith("direct from ")]
        outside = any(map(_from_outside, swapped_in)) or (manifest.made_by == "swap" and not swapped_in)
        return replace(incoming, manifest=manifest, from_outside=manifest.made_by == "import" or outside)

    def new_version(self, replacement: Replacement) -> str:
        """The one that holds these weights already, if a killed swap published it and no more."""
        digest = content_hash(replacement.tensors, replacement.config)
        names = self.registry.versions(self.team, replacement.agent)
        return next((name for name in reversed(names) if name.endswith(digest[:12])), "")

    def commit(self, replacement: Replacement) -> dict[str, str]:
        current = self.registry.team(self.team)
        if self._seen is not None and self._seen != dict(current.agents):
            raise UserError(f"{self.where}: somebody published another team meanwhile; nothing was changed, swap again")
        agent, recipe = replacement.agent, current.load_recipe()
        recipe = recipe.with_loras({agent: replacement.lora.model_dump()})
        identity = identify(current.base.source, current.base.revision)
        how = one_line(f"{replacement.how} from {replacement.source}")
        metrics = _metrics(replacement.measured)
        version = self.new_version(replacement)
        if not version:
            manifest = self.registry.publish_adapter(
                self.team,
                agent,
                replacement.tensors,
                replacement.config,
                identity=identity,
                protocol_hash=current.protocol_hash,
                made_by="stage0" if replacement.how == "stage0" else "swap",
                parent=current.agents[agent],
                metrics=metrics,
                task=recipe.task.name,
            )
            version = manifest.version
        agents = {**current.agents, agent: version}
        lineage = [Replaced(agent=agent, old=current.agents[agent], new=version, how=how)]
        self.registry.publish_team(
            self.team, recipe, agents, identity=identity, made_by="swap", parent=current.number, lineage=lineage, metrics=metrics
        )
        return agents

    def undo(self) -> Undone:
        team = self.registry.undo(self.team)
        return Undone({step.agent: (step.old or "-", step.new) for step in team.lineage})


def _from_outside(source: str) -> bool:
    """Whether a direct replacement from `source` brought what nobody here has taught; a version of the agent's own did not."""
    return source != "fresh" and not source.startswith("fresh:") and not re.fullmatch(VERSION_NAME, source)


def _row(
    state: RunState,
    record: dict[str, Any],
    before: dict[str, AdapterVersion],
    after: dict[str, AdapterVersion],
    measured: dict[str, Any],
) -> SwapRow:
    agent = record["agent"]
    fields: dict[str, Any] = {
        "delta_align": None, "kl_before": None, "kl_after": None, "steps": 0, "evaluation": None, "evaluation_before": None,
        "sampled_tokens": 0, "trained_tokens": 0, "seconds": 0.0,
    }  # fmt: skip
    return SwapRow(
        stage=state.stage,
        agent=agent,
        how=record["how"],
        source=record["source"],
        old=before[agent].name,
        new=after[agent].name,
        versions=_names(after),
        time=time.time(),
        **(fields | measured),
    )


def _evaluation_of(versions: dict[str, str], rows: Sequence[MetricsRow]) -> dict[str, Any] | None:
    """The last one of the team of these versions; one that a swap made of it, on items of its own, where there is no other."""
    stages = [row.evaluation for row in rows if isinstance(row, StageRow) and row.evaluation and row.versions == versions]
    swaps = [row for row in rows if isinstance(row, SwapRow)]
    left = [row.evaluation for row in swaps if row.evaluation and row.versions == versions]
    met = [row.evaluation_before for row in swaps if row.evaluation_before and row.versions | {row.agent: row.old} == versions]
    return next(reversed([*met, *left, *stages]), None)


def _metrics(measured: dict[str, Any]) -> dict[str, float]:
    found = {}
    for key in ("kl_before", "kl_after"):
        if measured.get(key):
            found[key] = float(measured[key]["mean"])
    for key in ("avg_at_k", "mean_reward"):
        if measured.get("evaluation"):
            found[key] = float(measured["evaluation"][key])
    return found


def _plain(versions: dict[str, AdapterVersion]) -> dict[str, dict[str, Any]]:
    return {agent: {"number": v.number, "content_hash": v.content_hash} for agent, v in versions.items()}


def _versions(plain: dict[str, dict[str, Any]]) -> dict[str, AdapterVersion]:
    return {agent: AdapterVersion(agent, **version) for agent, version in plain.items()}


def _changed(before: dict[str, AdapterVersion], after: dict[str, AdapterVersion]) -> dict[str, tuple[str, str]]:
    return {agent: (before[agent].name, version.name) for agent, version in after.items() if version != before[agent]}


def _names(versions: dict[str, AdapterVersion]) -> dict[str, str]:
    return {agent: version.name for agent, version in versions.items()}
