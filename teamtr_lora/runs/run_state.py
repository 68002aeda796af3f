"""Where a run is: the part of a checkpoint that is no tensor. Reading it needs no torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import TypeAdapter, ValidationError

from teamtr_lora.base.adapter_files import MAX_WEIGHT_BYTES
from teamtr_lora.base.versions import AdapterVersion, stored_versions, versions_from
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.recipe import TrustRegionSection
from teamtr_lora.runs.layout import CHECKPOINTS, read_own

FORMAT = 6
COUNTS = ("updates", "accepted", "shrunk", "rejected", "skipped", "out_of_region_accepted")
STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"


@dataclass(frozen=True)
class SwapRecord:
    """One replacement of an agent's adapter, or the undoing of one."""

    how: Literal["stage0", "direct", "undo"]
    source: str  # what the new adapter was made from, as the command named it
    agent: str
    lora_before: dict[str, Any]  # the agent's `lora` section of the recipe
    lora: dict[str, Any]  # and what it is afterwards
    before: dict[str, AdapterVersion]  # the whole team's versions
    after: dict[str, AdapterVersion]

    def stored(self) -> dict[str, Any]:
        """The record as JSON data."""
        return {**vars(self), "before": stored_versions(self.before), "after": stored_versions(self.after)}

    @classmethod
    def from_stored(cls, data: dict[str, Any]) -> Self:
        """What `stored` made."""
        return cls(**{**data, "before": versions_from(data["before"]), "after": versions_from(data["after"])})


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """A rollout whose episodes are used again; they are in rollouts/NAME.json."""

    name: str
    content_hash: str
    versions: dict[str, str]  # of the team that played it
    log_ratios: dict[str, list[float]]  # of its episodes, by agent: how much likelier it has become to say what it said there


@dataclass(frozen=True)
class Dials:
    """What an agent's updates have found for its next one."""

    beta: float  # KL penalty
    radius: float  # of the stage in progress
    slope: float | None = None  # gain by distance, which gain_weighted radii go by; None: none yet
    rate: float | None = None  # found by training.learning_rate: auto; None: none yet

    @classmethod
    def before_updates(cls, region: TrustRegionSection) -> Self:
        return cls(beta=region.beta_initial, radius=region.delta)


@dataclass
class RunState:
    """Where a run is. `stage` and `update` count what is complete; a stage in progress has 0 < update < n or waits for its
    evaluation (update == n)."""

    step: int = 0  # checkpoints written
    stage: int = 0  # stages complete
    update: int = 0  # updates complete in the stage in progress
    cursor: int = 0  # training items taken by complete stages
    versions: dict[str, AdapterVersion] = field(default_factory=dict)
    rollouts: list[RolloutRecord] = field(default_factory=list)  # that later updates learn from, the oldest first
    stage_versions: dict[str, AdapterVersion] = field(default_factory=dict)  # that began the stage in progress
    probing: bool = False  # the stage in progress is probed
    probe_seconds: float = 0.0
    dials: dict[str, Dials] = field(default_factory=dict)  # by agent
    loss_scaler: dict[str, float] = field(default_factory=dict)  # empty where no half precision needs one
    gate_tf32: bool = False  # the precision of gate passes, once the floors have been measured
    training_float32_sum: bool = False  # and whether layers add up in float32 in training passes
    tokens_per_microbatch: int = 0  # what `auto` came to; 0 before the first update
    threads: int = 0  # of a process on a CPU, by whose number torch rounds; 0 on a GPU
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    idle_updates: int = 0  # skipped updates in a row, up to the last one made
    sampled_tokens: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    best_accuracy: float | None = None  # of all evaluations, which callbacks go by
    reward_before: float | None = None  # mean rewards of the same evaluations
    reward_after: float | None = None
    episodes_evaluated: int = 0
    accepted_since: int = 0  # updates accepted since that evaluation: it was of an earlier team
    started: bool = False  # stage 0 (floors and the evaluation before training) is done
    loras: dict[str, dict[str, Any]] = field(default_factory=dict)  # of swapped agents, whose `lora` in the recipe is older
    swaps: list[SwapRecord] = field(default_factory=list)  # every replacement and undo, oldest first

    def standing_swaps(self) -> list[SwapRecord]:
        """The replacements in force: each undo takes the last one before it back."""
        standing: list[SwapRecord] = []
        for record in self.swaps:
            standing = standing[:-1] if record.how == "undo" else [*standing, record]
        return standing

    def take_swap(self, record: SwapRecord) -> list[str]:
        """Makes the team of `record.after` the run's own, and returns the agents that changed.

        They start with fresh dials, as theirs belong to the old weights; a stage in progress begins anew, and no earlier rollout
        is learned from again.
        """
        changed = [agent for agent, version in record.after.items() if version != record.before[agent]]
        for agent in changed:
            self.dials.pop(agent, None)
        self.swaps.append(record)
        in_recipe = next(swap.lora_before for swap in self.swaps if swap.agent == record.agent)
        self.loras.pop(record.agent, None)
        if record.lora != in_recipe:
            self.loras[record.agent] = record.lora
        self.versions, self.rollouts, self.update = record.after, [], 0
        return changed

    def stored(self) -> dict[str, Any]:
        """The state as JSON data."""
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data |= {name: stored_versions(data[name]) for name in _VERSIONS}
        data["dials"] = {agent: asdict(dials) for agent, dials in self.dials.items()}
        return data | {"swaps": [r.stored() for r in self.swaps], "rollouts": [asdict(r) for r in self.rollouts]}

    @classmethod
    def from_stored(cls, data: dict[str, Any]) -> Self:
        """What `stored` made. KeyError, TypeError or ValueError where it is something else: it may be somebody else's."""
        versions = {name: versions_from(data[name]) for name in _VERSIONS}
        swaps = [vars(SwapRecord.from_stored(record)) for record in data["swaps"]]
        counts = {name: data["counts"][name] for name in COUNTS}
        try:
            return TypeAdapter(cls).validate_python(vars(cls(**{**data, **versions, "swaps": swaps, "counts": counts})))
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


_VERSIONS = ("versions", "stage_versions")


class CheckpointReader:
    """The checkpoints of a run directory: whether there are any, and where the newest one is."""

    def __init__(self, run: Path) -> None:
        self._folder = run / CHECKPOINTS

    def exists(self) -> bool:
        return bool(self.steps())

    def state(self) -> RunState:
        """Where the newest checkpoint is, without its tensors."""
        return self._read(whole=False)[0]

    def named_rollouts(self) -> set[str]:
        """The rollouts that any checkpoint needs; a damaged one is of no use with or without them."""
        found: set[str] = set()
        for folder in self.steps():
            with suppress(UserError):
                found |= {record.name for record in self._read_step(folder, "", whole=False)[0].rollouts}
        return found

    def _read(self, *, whole: bool) -> tuple[RunState, dict[str, Any], dict[str, bytes]]:
        """State, the whole of state.json, and the files of the newest checkpoint, each checked against its hash."""
        older = [path.name for path in self.steps()[:-1]]
        fix = f"remove that folder to go on from {older[-1]}" if older else "start again with another --run-dir"
        return self._read_step(self.steps()[-1], fix, whole=whole)

    def read_step(self, folder: Path) -> RunState:
        """The state of one checkpoint, all of its files checked."""
        return self._read_step(folder, "remove that folder", whole=True)[0]

    def _read_step(self, folder: Path, fix: str, *, whole: bool) -> tuple[RunState, dict[str, Any], dict[str, bytes]]:
        try:
            hashes = json.loads(_present(folder / MANIFEST))
            contents = {STATE: _checked(folder, STATE, hashes)}
            body = json.loads(contents[STATE])
            if body["format"] != FORMAT:
                raise UserError(
                    f"{folder}: written by another version of teamtr-lora (format {body['format']}, this one reads {FORMAT})"
                )
            if whole:
                contents |= {name: _checked(folder, name, hashes) for name in (TENSORS, *map(moments_file, body["moments"]))}
            return RunState.from_stored(body["state"]), body, contents
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder}: the checkpoint is damaged ({type(error).__name__}: {error}); {fix}") from error

    def steps(self) -> list[Path]:
        """The folders of the checkpoints, oldest first."""
        return sorted(self._folder.glob("step-*")) if self._folder.is_dir() else []


def moments_file(agent: str) -> str:
    """Of an agent's optimizer. ValueError for a name that leads elsewhere: the checkpoint may be somebody else's."""
    name = f"moments-{agent}.safetensors"
    if Path(name).name != name:
        raise ValueError(f"{name} is no name of a file")
    return name


def _checked(folder: Path, name: str, hashes: dict[str, str]) -> bytes:
    data = _present(folder / name)
    if sha256(data) != hashes[name]:
        raise ValueError(f"{name} does not match its hash")
    return data


def _present(path: Path) -> bytes:
    data = read_own(path, MAX_WEIGHT_BYTES)
    if data is None:
        raise FileNotFoundError(f"{path.name} is missing")
    return data
