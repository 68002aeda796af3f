"""Where a team lives: a run directory, or a team of a registry. Each takes a replacement in one step, and gives it back."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from teamtr_lora.base.versions import VERSION_NAME, AdapterVersion, content_hash, version_names, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.locks import locked
from teamtr_lora.recipe import LoraSection
from teamtr_lora.registry.identity import identify
from teamtr_lora.registry.manifest import Replaced, one_line
from teamtr_lora.registry.reader import DEFAULT_ROOT
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import StoredTeam, find_team, locate
from teamtr_lora.runs.layout import is_baseline
from teamtr_lora.runs.metrics import MetricsRow, StageRow, SwapRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import Dials, RunState, SwapRecord
from teamtr_lora.swap.newcomer import Incoming
from teamtr_lora.training.dials import in_the_next_stage


@dataclass(frozen=True)
class Replacement:
    """One agent's new adapter, and what is to be remembered of how it came."""

    agent: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    lora: LoraSection
    how: Literal["stage0", "direct"]
    source: str
    measured: dict[str, Any]  # those fields of a SwapRow that say how the alignment and the team did


@dataclass(frozen=True)
class Undone:
    """What an undo did."""

    changed: dict[str, tuple[str, str]]  # by agent: the version that went, and the one that is back
    trained: list[str] = field(default_factory=list)  # agents that were trained after the swap, which is undone with it


def find_place(source: Path, registry: Path = DEFAULT_ROOT) -> Place:
    """The run directory or registry team that RUN_OR_TEAM means, to change it."""
    found = locate(source, registry)
    if found.number is not None:
        raise UserError(f"{source}: one version of a team, which never changes; give the team's folder, {source.parent}")
    if found.kind == "team":
        return RegistryPlace(Registry(found.path), found.team)
    if is_baseline(found.path):
        raise UserError(f"{source}: holds a run of `teamtr-lora baseline`, which is no team to train on; give a run of train")
    return RunPlace(RunDir(found.path))


class RunPlace:
    """A run directory. Its checkpoint decides which team is current, and appears in one step; team.json and recipe.yaml are
    written after it, by the next process where this one is killed in between."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.where = run, str(run.path)
        self.work = run.swap_work  # the folder for what is finished of a swap in progress
        self._left_over: SwapRecord | None = None  # a replacement of a killed process that this one completed

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A lock: no other process changes the team meanwhile."""
        lock = self.run.lock()
        try:
            self._complete()
            yield
        finally:
            lock.release()

    def read(self) -> StoredTeam:
        """The team as it is now."""
        stored = find_team(self.run.path)
        state = self._state()
        return replace(stored, recipe=self.run.with_swaps(stored.recipe), versions=state.versions or stored.versions)

    def beside(self, suffix: str) -> Path:
        """Where a run directory made from this team goes by default."""
        place = self.run.path.resolve()
        return place.with_name(f"{place.name}-{suffix}")

    def known(self, incoming: Incoming, agent: str) -> Incoming:
        """An earlier version of `agent` itself (`incoming.spec`), with what is known here of where it came from."""
        sources = [
            swap.source
            for swap in self._state().swaps
            if (swap.how, swap.agent, swap.after[agent].name[-12:]) == ("direct", agent, incoming.spec[-12:])
        ]
        return replace(incoming, from_outside=any(map(_from_outside, sources)))

    def commit(self, replacement: Replacement) -> dict[str, str]:
        """Returns the new version names. If it is killed, either the old team or the new one is stored, complete."""
        agent, held = replacement.agent, self.read()
        digest = content_hash(replacement.tensors, replacement.config)
        version = AdapterVersion(agent, held.versions[agent].number + 1, digest)
        write_version(self.run.adapters, version, replacement.tensors, replacement.config)
        record = SwapRecord(
            how=replacement.how,
            source=replacement.source,
            agent=agent,
            lora_before=held.recipe.team.lora_of(agent).model_dump(mode="json"),
            lora=replacement.lora.model_dump(mode="json"),
            before=held.versions,
            after={**held.versions, agent: version},
        )
        self._save(held, record, replacement.measured)
        return version_names(record.after)

    def undo(self) -> Undone:
        """Puts the team from before the last replacement back."""
        state, done = self._state(), self._left_over
        if done is not None and done.how == "undo":  # this very command was killed after its commit: only its answer is missing
            earlier = replace(state, swaps=state.swaps[:-1]).standing_swaps()
            return _undone(earlier[-1], done.before)
        standing = state.standing_swaps()
        if not standing:
            raise UserError(f"{self.where}: there is no swap to undo")
        held, last = self.read(), standing[-1]
        record = SwapRecord(
            how="undo",
            source=f"before the swap of {last.agent}",
            agent=last.agent,
            lora_before=last.lora,
            lora=last.lora_before,
            before=held.versions,
            after=last.before,
        )
        self._save(held, record, {})
        return _undone(last, held.versions)

    def _state(self) -> RunState:
        checkpoints = self.run.checkpoints
        return checkpoints.state() if checkpoints.exists() else RunState()

    def _save(self, held: StoredTeam, record: SwapRecord, measured: Mapping[str, Any]) -> None:
        """Commits a replacement or an undo: the metrics row, then the checkpoint, then what follows from it."""
        run, region = self.run, held.recipe.trust_region
        state, optimizers = run.checkpoints.load() if run.checkpoints.exists() else (RunState(versions=held.versions), {})
        run.metrics.truncate(state.metrics_bytes)
        for agent in state.take_swap(record):
            optimizers.pop(agent, None)
        if state.dials:
            fresh = dict.fromkeys(state.versions, Dials.before_updates(region))
            state.dials = in_the_next_stage(fresh | state.dials, region)
        row = _row(state.stage, record, measured)
        state.sampled_tokens += row.sampled_tokens
        state.seconds += row.seconds
        known = row.evaluation
        if record.how == "undo":  # the last evaluation was of the team that went
            known = _evaluation_of(row.versions, read_rows(run.path)) if state.started else None
            state.accuracy_after, state.reward_after, state.episodes_evaluated = None, None, 0
        if known:
            state.accuracy_after, state.episodes_evaluated = known["avg_at_k"], known["episodes"]
            state.reward_after, state.accepted_since = known["mean_reward"], 0
        if state.started:
            run.metrics.append(row)
        state.metrics_bytes = run.metrics.size
        state.step += 1
        run.checkpoints.save(state, optimizers)
        self._complete()
        self._left_over = None  # this process reports it itself

    def _complete(self) -> None:
        """Writes what follows from the checkpoint, which a process killed in between has left to this one."""
        state = self._state()
        if not state.swaps:
            return
        stored = find_team(self.run.path)
        if stored.versions != state.versions and stored.versions == state.swaps[-1].before:
            self._left_over = state.swaps[-1]
        self.run.write_team(state.versions, state.loras)
        recipe = self.run.with_swaps(stored.recipe)
        if recipe != stored.recipe:
            self.run.write_recipe(recipe)


class RegistryPlace:
    """A team of a registry, with the methods of a run's. Every team version is a file of its own: the new one appears in one
    step."""

    def __init__(self, registry: Registry, team: str) -> None:
        self.registry, self.team, self.where = registry, team, str(registry.root / team)
        self.work = registry.root / f".{team}.swap"
        self._seen: dict[str, str] | None = None  # the versions that were read, which are those that a swap measures

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One swap of a team at a time. If another command publishes meanwhile, the swap fails and that version is kept."""
        busy = "another process is swapping an agent here; wait for it"
        with locked(self.registry.root / f".{self.team}.swap.lock", Path(self.where), busy):
            yield

    def read(self) -> StoredTeam:
        stored = find_team(self.registry.root / self.team)
        self._seen = version_names(stored.versions)
        return stored

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

    def commit(self, replacement: Replacement) -> dict[str, str]:
        current, agent = self.registry.team(self.team), replacement.agent
        if self._seen is not None and self._seen != dict(current.agents):
            raise UserError(f"{self.where}: somebody published another team meanwhile; nothing was changed, swap again")
        recipe = current.load_recipe().with_loras({agent: replacement.lora.model_dump()})
        identity = identify(current.base.source, current.base.revision)
        metrics = _metrics(replacement.measured)
        version = self._published(replacement)
        if version is None:
            version = self.registry.publish_adapter(
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
            ).version
        agents = {**current.agents, agent: version}
        how = one_line(f"{replacement.how} from {replacement.source}")
        lineage = [Replaced(agent=agent, old=current.agents[agent], new=version, how=how)]
        self.registry.publish_team(
            self.team, recipe, agents, identity=identity, made_by="swap", parent=current.number, lineage=lineage, metrics=metrics
        )
        return agents

    def undo(self) -> Undone:
        team = self.registry.undo(self.team)
        return Undone({step.agent: (step.old or "-", step.new) for step in team.lineage})

    def _published(self, replacement: Replacement) -> str | None:
        """The version that holds these weights already, where a swap was killed between publishing it and the team."""
        digest = content_hash(replacement.tensors, replacement.config)
        names = self.registry.versions(self.team, replacement.agent)
        return next((name for name in reversed(names) if name.endswith(digest[:12])), None)


Place = RunPlace | RegistryPlace
"""A team that an agent can be replaced in."""


def _from_outside(source: str) -> bool:
    """Whether a direct replacement from `source` brought an adapter that was trained elsewhere: a fresh one was not, nor was an
    earlier version of the agent itself."""
    return source != "fresh" and not source.startswith("fresh:") and not re.fullmatch(VERSION_NAME, source)


def _undone(swap: SwapRecord, gone: dict[str, AdapterVersion]) -> Undone:
    """What changes when the team goes from the versions `gone` back to those from before `swap`."""

    def changed(before: dict[str, AdapterVersion], after: dict[str, AdapterVersion]) -> dict[str, tuple[str, str]]:
        return {agent: (before[agent].name, new.name) for agent, new in after.items() if new != before[agent]}

    return Undone(changed(gone, swap.before), trained=list(changed(swap.after, gone)))


def _row(stage: int, record: SwapRecord, measured: Mapping[str, Any]) -> SwapRow:
    return SwapRow(
        stage=stage,
        agent=record.agent,
        how=record.how,
        source=record.source,
        old=record.before[record.agent].name,
        new=record.after[record.agent].name,
        versions=version_names(record.after),
        time=time.time(),
        **measured,
    )


def _evaluation_of(versions: dict[str, str], rows: Sequence[MetricsRow]) -> dict[str, Any] | None:
    """The newest evaluation of the team of these versions. Those that swaps made count only where no stage made one: a swap may
    have played other items."""
    stages = [row.evaluation for row in rows if isinstance(row, StageRow) and row.evaluation and row.versions == versions]
    swaps = [row for row in rows if isinstance(row, SwapRow)]
    after = [row.evaluation for row in swaps if row.evaluation and row.versions == versions]
    before = [row.evaluation_before for row in swaps if row.evaluation_before and row.versions | {row.agent: row.old} == versions]
    return next(reversed([*before, *after, *stages]), None)


def _metrics(measured: Mapping[str, Any]) -> dict[str, float]:
    """What a registry keeps of the measurements."""
    found = {key: float(measured[key]["mean"]) for key in ("kl_before", "kl_after") if measured.get(key)}
    if evaluation := measured.get("evaluation"):
        found |= {key: float(evaluation[key]) for key in ("avg_at_k", "mean_reward")}
    return found
