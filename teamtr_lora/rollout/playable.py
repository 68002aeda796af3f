"""A team that can be played: base, adapters, protocol and sampler put together from a recipe's sections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, base_facts, load_base, resolve_device, resolve_dtype
from teamtr_lora.base.memory import memory_phase, phase_of, total_bytes
from teamtr_lora.base.memory_model import stored_bytes
from teamtr_lora.base.sharding import splits
from teamtr_lora.base.source import beside, is_small, resolve
from teamtr_lora.base.versions import AdapterVersion, read_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.ranks import Ranks, process_ranks
from teamtr_lora.recipe import BaseSection, LoraSection, Recipe, RolloutSection, TeamSection
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.recipe.memory_keys import smaller
from teamtr_lora.recipe.rollout_section import split_problem
from teamtr_lora.rollout.collector import PlayPlan, Progress, play
from teamtr_lora.rollout.dealing import Dealer
from teamtr_lora.rollout.engines import begin_engine, open_sampler
from teamtr_lora.rollout.sampler import Sampler, StandIn
from teamtr_lora.tasks import Task
from teamtr_lora.team import Episode, Team, build_team


@dataclass(frozen=True)
class Opening:
    """What the first process tells its helpers: to open this team."""

    recipe: Recipe
    extra: Mapping[str, LoraSection] | None


@dataclass(frozen=True)
class Playing:
    """The same: to play their share of this plan, with these adapters in place first."""

    plan: PlayPlan
    stand_in: Mapping[str, str]
    adapters: list[tuple[AdapterVersion, dict[str, Tensor]]]


@dataclass
class PlayableTeam:
    base: FrozenBase
    bank: AdapterBank
    team: Team
    sampler: Sampler
    dealer: Dealer = field(default_factory=lambda: Dealer(Ranks(), fixed_lots=False))
    opening_seconds: dict[str, float] = field(default_factory=dict)  # what opening it took, by phase
    ranks: Ranks = field(default_factory=Ranks)  # the processes that train it together; the dealer's play it together
    _told: dict[str, AdapterVersion] = field(default_factory=dict)  # what helpers have of each adapter

    def versions(self) -> dict[str, str]:
        """The version names that are current, which is what every message must come from."""
        return {agent: self.bank.version(agent).name for agent in self.team.names}

    def adapter_versions(self) -> dict[str, AdapterVersion]:
        """The same, in full."""
        return {agent: self.bank.version(agent) for agent in self.team.names}

    def publish(self, version: AdapterVersion) -> None:
        if self.dealer.ranks.first or not self.dealer.alone:
            self.sampler.publish(version)

    def publish_all(self) -> None:
        for agent in self.team.names:
            self.publish(self.bank.version(agent))

    @contextmanager
    def training_memory(self, *, measured: bool = True, least: int = 0) -> Iterator[None]:
        """Around an update: an engine that shares the trainer's GPU may lend its memory. See `Sampler.training_memory`."""
        with memory_phase("update"), self.sampler.training_memory(measured=measured, least=least):
            yield

    def renew_sampler(self, rollout: RolloutSection) -> None:
        """Opens another engine if an error or an interrupt has cut this one off in the middle of a step."""
        if self.sampler.failed is not None:
            self.sampler.close()
            self.sampler = open_sampler(self.base, self.bank, rollout, context_tokens=self.team.context_tokens)
            self.publish_all()

    def close(self) -> None:
        self.sampler.close()

    def play(
        self, task: Task, plan: PlayPlan, progress: Progress | None = None, *, stand_in: Mapping[str, str] | None = None
    ) -> list[Episode]:
        """Finished episodes in the order of the plan, which all processes play together. `stand_in`: by agent, another adapter of
        the bank that answers for it."""
        stand_in = stand_in or {}
        sampler = StandIn(self.sampler, stand_in) if stand_in else self.sampler
        expected = self.versions() | {agent: self.bank.version(adapter).name for agent, adapter in stand_in.items()}
        if self.dealer.ranks.helped:
            self.dealer.ranks.broadcast(Playing(plan, stand_in, self._news([*self.team.names, *stand_in.values()])))
        with memory_phase("rollout"):
            return self.dealer.play(plan, lambda part, told: play(self.team, task, sampler, part, expected, told), progress)

    def _news(self, adapters: list[str]) -> list[tuple[AdapterVersion, dict[str, Tensor]]]:
        """Those of the adapters that helpers do not have as they are now."""
        now = {adapter: self.bank.version(adapter) for adapter in adapters}
        new = [version for adapter, version in now.items() if self._told.get(adapter) != version]
        self._told |= now
        return [(v, {name: tensor.cpu().clone() for name, tensor in self.bank.tensors(v.agent).items()}) for v in new]


@contextmanager
def fits(recipe: Recipe, tokens: Callable[[], int | None] = lambda: None) -> Iterator[None]:
    """A GPU that is full, inside of it, as one line: what was going on, and which keys make that smaller. `tokens`: the size of a
    micro-batch, where one was chosen."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        phase = phase_of(error) or "update"
        keys = " or ".join(smaller(recipe, phase, tokens()))
        raise UserError(
            f"the GPU is out of memory during {phase}; try {keys}; every update before is saved: train goes on with --resume and "
            "such a setting"
        ) from error


def open_recipe(recipe: Recipe, extra: Mapping[str, LoraSection] | None = None) -> PlayableTeam:
    """The team of a recipe, untrained; see `open_team`."""
    ranks = process_ranks()
    if ranks.helped:
        ranks.broadcast(Opening(recipe, extra))
    shard = "never" if ranks.helping else recipe.training.shard  # whoever has a part of a base only cannot compute alone
    return open_team(recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder, extra=extra, shard=shard)


@memory_phase("loading")
def open_team(
    base_section: BaseSection,
    team_section: TeamSection,
    rollout: RolloutSection,
    *,
    seed: int,
    folder: Path,
    extra: Mapping[str, LoraSection] | None = None,
    shard: str = "auto",
) -> PlayableTeam:
    """Loads the base and puts a fresh adapter on it for every agent. `folder` is where the recipe was found. `extra` adapters are
    put on the same base beside the team's, such as one that is to replace an agent's. `shard`: the recipe's training.shard."""
    started, ranks = time.monotonic(), process_ranks()
    device = resolve_device(base_section.device)
    begin_engine(rollout, device, resolve_dtype(base_section.precision, device))
    base = _open_base(base_section, team_section, rollout, folder, shard)
    loaded = time.monotonic()
    team = build_team(team_section, base.tokenizer, base_context_tokens=base.context_tokens, code=folder, end_ids=base.eos_ids)
    specs = {agent.name: agent.lora for agent in team_section.agents} | dict(extra or {})
    bank = AdapterBank(base.model, specs, base_name=base_section.source, seed=seed)
    adapted = time.monotonic()
    sampler: Sampler | None = None
    for mine in ranks.take_turns() if ranks.shared_gpu else (True,):  # an engine measures the memory that others leave it
        if mine:
            sampler = open_sampler(base, bank, rollout, context_tokens=team.context_tokens)
    assert sampler is not None
    seconds = {"base": loaded - started, "adapters": adapted - loaded, "engine": time.monotonic() - adapted}
    engine = ENGINES[rollout.engine]
    dealer = Dealer(ranks, fixed_lots=engine.exact_resume and base.device.type == "cpu", alone=engine.by_url)
    training = Ranks() if ranks.helping else ranks
    playable = PlayableTeam(
        base, bank, team, sampler, dealer=dealer, opening_seconds=seconds | sampler.start_seconds(), ranks=training
    )
    try:
        playable.publish_all()
    except BaseException:
        playable.close()
        raise
    return playable


def _open_base(base: BaseSection, team: TeamSection, rollout: RolloutSection, folder: Path, shard: str) -> FrozenBase:
    ranks, source = process_ranks(), beside(base.source, folder)
    if ranks.size > 1 and ":" in base.device:
        raise UserError(f"base.device = {base.device}: names one GPU for {ranks.size} processes; use auto or cuda")
    split = ranks.size > 1 and shard != "never" and _is_split(base, rollout, shard, source, ranks.size)
    if split:
        if found := split_problem(base, team, rollout):
            raise UserError(f"training.shard = {shard}: the base has to be split over processes, but {found[0]}; {found[1]}")
        ranks.make_global()
    loaded = load_base(
        source, precision=base.precision, device=base.device, quantization=base.quantization, revision=base.revision, split=split
    )
    threads = 1 if ranks.threads == 0 and is_small(loaded.folder) else ranks.threads
    if threads and loaded.device.type == "cpu":
        torch.set_num_threads(threads)
    return loaded


def _is_split(base: BaseSection, rollout: RolloutSection, shard: str, source: str, over: int) -> bool:
    device = resolve_device(base.device)
    total, value = total_bytes(device), resolve_dtype(base.precision, device).itemsize
    facts = base_facts(resolve(source, base.revision))
    taken = rollout.engine_bytes(total, stored_bytes(facts, base.quantization, value))
    return splits(shard, facts, over=over, value=value, device_bytes=total, engine_bytes=taken)


def load_versions(playable: PlayableTeam, versions: Mapping[str, AdapterVersion], root: Path) -> None:
    """Puts stored adapter versions in place and makes them the ones that are sampled."""
    for version in versions.values():
        playable.bank.load(version, read_version(root, version))
    playable.publish_all()


@contextmanager
def versions_in_place(playable: PlayableTeam, versions: Mapping[str, AdapterVersion], root: Path) -> Iterator[None]:
    """Within it, an earlier team is in place, so that its episodes can be played again; afterwards the current one is."""
    current = {agent: playable.bank.version(agent) for agent in versions}
    load_versions(playable, versions, root)
    try:
        yield
    finally:
        load_versions(playable, current, root)
