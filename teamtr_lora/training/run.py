"""A run in progress: what the stage loop acts on. Every method is one step of the loop and leaves the run resumable."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from accelerate import Accelerator

from teamtr_lora.algorithm.occupancy import weight_degeneracy
from teamtr_lora.algorithm.radii import KEPT_SHARE
from teamtr_lora.base.memory import peak_memory
from teamtr_lora.base.versions import read_version, write_version
from teamtr_lora.evaluation.evaluate import plan_in_training, summarise
from teamtr_lora.evaluation.returns import with_return
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.collector import PlayPlan, check_prompts
from teamtr_lora.rollout.playable import PlayableTeam, load_versions, versions_in_place
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.runs.metrics import StageRow
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import DataOrder, Item, Task
from teamtr_lora.team import Episode
from teamtr_lora.training.events import Events
from teamtr_lora.training.floor import check_floors, measure_floors
from teamtr_lora.training.importance import episode_log_weights
from teamtr_lora.training.optimizers import flatten_state, restore_state
from teamtr_lora.training.rows import update_row
from teamtr_lora.training.run_diagnostics import RunDiagnostics
from teamtr_lora.training.update import AgentUpdater, UpdateOutcome

LEAST_PROBED = 8  # items of a small split that a stage leaves over: with fewer, the probe takes the stage's own too


@dataclass(frozen=True)
class Rollout:
    episodes: list[Episode]
    versions: dict[str, str]
    seconds: float
    fresh: bool = True  # sampled for this update, not for an earlier one of the stage


class TrainingRun:
    def __init__(
        self,
        playable: PlayableTeam,
        task: Task,
        config: TeamTRConfig,
        run_dir: RunDir,
        accelerator: Accelerator,
        events: Events,
        *,
        started: float | None = None,
    ) -> None:
        """`started` (monotonic) lets the time the user waited for the base to load count."""
        self.playable, self.task, self.config = playable, task, config
        self.run_dir, self.accelerator, self.events = run_dir, accelerator, events
        self.updater = AgentUpdater(playable, config, accelerator)
        self.diagnostics = RunDiagnostics(playable, task, config, run_dir, self.updater)
        self.state = RunState()
        items = task.items("train")
        self._order = DataOrder(items, config.seed)
        self._order.check_stage(config.rollout.items_per_stage)
        if items.size is not None and type(task).open is Task.open:  # rows of somebody's, as they are
            drawn = min(items.size, config.training.stages * config.rollout.items_per_stage)
            check_prompts(playable.team, self._order.take(0, drawn))
        self._rollout: Rollout | None = None
        self._clock = time.monotonic() if started is None else started
        task.check_agents(playable.team.names, playable.team.router.max_messages)
        task.check_router(playable.team.router)

    @property
    def agents(self) -> list[str]:
        return self.playable.team.names

    @property
    def stopping(self) -> bool:
        return bool(self.events.control.should_training_stop)

    def resume(self) -> None:
        """Everything back as the newest checkpoint has it; what was written after it is cut off."""
        self.state, optimizers = self.run_dir.checkpoints.load()
        load_versions(self.playable, self.state.versions, self.run_dir.adapters)
        for agent, (tensors, scalars) in optimizers.items():
            restore_state(self.updater.optimizers[agent], tensors, scalars)
        self.updater.betas.update(self.state.betas)
        self.updater.radii.update(self.state.radii)
        self.updater.slopes.update(self.state.slopes)
        if self.updater.scaler.is_enabled() and self.state.loss_scaler:  # a rebased team has none yet
            self.updater.scaler.load_state_dict(self.state.loss_scaler)
        self.run_dir.metrics.truncate(self.state.metrics_bytes)
        self.events.state.global_step, self.events.state.epoch = self.state.counts["updates"], self.state.stage

    def begin(self) -> None:
        self.events.fire("on_train_begin", run_dir=str(self.run_dir.path))
        if self.state.started:
            return
        for agent in self.agents:
            self._store_version(agent)
        self.run_dir.metrics.truncate(0)
        evaluation, episodes = self._evaluate()
        region = self.config.trust_region
        with self.playable.training_memory():
            floors = measure_floors(
                self.updater.scorer,
                self.playable.bank,
                next((m.agent for e in episodes for m in e.messages), self.agents[0]),
                episodes,
                tokens_per_microbatch=self.config.training.tokens_per_microbatch,
                reduction=region.reduction,
            )
        smallest = region.delta * (KEPT_SHARE if region.radii == "gain_weighted" else 1.0)
        check_floors(floors, smallest, tf32=region.gate_precision == "tf32")
        self.state.accuracy_before = self.state.accuracy_after = evaluation["avg_at_k"]
        self.state.started = True
        self._log_stage(0, [], evaluation, floors)
        self.checkpoint()

    def items(self) -> list[Item]:
        """The stage's items; every rollout of the stage plays the same ones anew, or its share of them."""
        return self._order.take(self.state.cursor, self.config.rollout.items_per_stage)

    def begin_stage(self, stage: int, order: list[str]) -> None:
        self.events.state.epoch = stage - 1
        self.diagnostics.begin_stage(self.state, stage)
        self.events.fire("on_epoch_begin", order=order)

    def roll_out(self, items: list[Item], stage: int, place: int) -> Rollout:
        """Fresh episodes, or the ones sampled earlier in the stage where the recipe says to use them again. `place` counts the
        stage's updates from 0."""
        self.events.fire("on_step_begin")
        sampled_at = self.config.training.sampled_before(place)
        if sampled_at == place:
            self.state.rollout_versions = self.playable.adapter_versions()
            self._rollout = self._play_rollout(self._share(items, place), stage, place)
            return self._rollout
        if self._rollout is None:  # resumed in between: the same seeds and versions give the same episodes again
            with versions_in_place(self.playable, self.state.rollout_versions, self.run_dir.adapters):
                self._rollout = self._play_rollout(self._share(items, sampled_at), stage, sampled_at)
        return replace(self._rollout, seconds=0.0, fresh=False)

    def _share(self, items: list[Item], place: int) -> list[Item]:
        """The items of the rollout before the update at `place`: all of the stage's, or its share with `matched: stage`."""
        training = self.config.training
        if training.matched == "update":
            return items
        count = training.items_per_rollout(len(items), len(self.agents))
        nth = training.rollouts(len(self.agents)).index(place)
        return items[nth * count : (nth + 1) * count]

    def _play_rollout(self, items: list[Item], stage: int, place: int) -> Rollout:
        started = time.monotonic()
        rollout = self.config.rollout
        plan = PlayPlan(
            items,
            rollout.episodes_per_item,
            rollout.temperature,
            rollout.max_message_tokens,
            f"{self.config.seed}/stage {stage}/update {place}",
        )
        versions = self.playable.versions()
        episodes = self.playable.play(self.task, plan, lambda d, n, t: self.events.progress("rollout", d, n, t))
        return Rollout(episodes, versions, time.monotonic() - started)

    def update(self, agent: str, rollout: Rollout, stage: int, place: int) -> UpdateOutcome:
        self.diagnostics.before_update(self.state, agent, stage, place, self._probe_items)
        self.events.progress("update", 0, 1, 0)
        seed = derive_seed(self.config.seed, "holdout", stage, agent)
        with self.playable.training_memory():
            outcome = self.updater.update(agent, rollout.episodes, seed, self._weigh(rollout))
            self.diagnostics.after_update(self.state, agent, stage, outcome)
        return outcome

    def _probe_items(self) -> list[Item]:
        """The next stage's, where the split has enough items: different ones, and none that this stage learns from."""
        count, next_stage = self.config.diagnostics.probe_items, self.state.cursor + self.config.rollout.items_per_stage
        learned = {item.id for item in self.items()}
        ahead: dict[str, Item] = {}
        unseen: dict[str, Item] = {}
        for item in self._order.after(next_stage):
            ahead[item.id] = item
            unseen |= {item.id: item} if item.id not in learned else {}
            if len(unseen) == count:
                break
        return list((unseen if len(unseen) >= min(count, LEAST_PROBED) else ahead).values())[:count]

    def _weigh(self, rollout: Rollout) -> np.ndarray | None:
        """With `importance`: how much likelier today's team is to play each episode than the team that played it."""
        if self.config.training.resampling != "importance" or rollout.fresh:
            return None
        bank = self.playable.bank
        changed = [agent for agent in self.agents if bank.version(agent).name != rollout.versions[agent]]
        tensors = {agent: read_version(self.run_dir.adapters, self.state.rollout_versions[agent]) for agent in changed}
        limit = self.config.training.tokens_per_microbatch
        return episode_log_weights(self.updater.scorer, bank, rollout.episodes, tensors, tokens_per_microbatch=limit)

    def publish(self, outcome: UpdateOutcome) -> None:
        started = time.monotonic()
        if outcome.accepted:
            self._store_version(outcome.version.agent)
            if self.config.training.update == "sequential":
                self.playable.publish(outcome.version)
        outcome.seconds["publish"] = time.monotonic() - started

    def record_update(self, stage: int, place: int, agent: str, rollout: Rollout, outcome: UpdateOutcome) -> None:
        phases = {"rollout": rollout.seconds, **outcome.seconds}
        row = update_row(stage, place + 1, agent, rollout.episodes, rollout.versions, outcome, phases, fresh=rollout.fresh)
        if outcome.log_weight_E is not None:
            row.importance = asdict(weight_degeneracy(outcome.log_weight_E))
        self.diagnostics.fill(row, rollout.episodes, outcome, fresh=rollout.fresh)
        state, counts = self.state, self.state.counts
        counts["updates"] += 1
        counts["accepted"] += outcome.accepted
        counts["out_of_region_accepted"] += row.out_of_region
        for kind in ("shrunk", "rejected", "skipped"):
            counts[kind] += outcome.decision == kind
        state.sampled_tokens += row.sampled_tokens if rollout.fresh else 0
        state.update = place + 1
        name = f"stage-{stage:04d}-update-{place + 1}-{agent}"
        if rollout.fresh:
            self.run_dir.write_episodes(name, rollout.episodes, self.config.diagnostics.save_episodes)
        self.run_dir.metrics.append(row)
        self.events.state.global_step = counts["updates"]
        self.events.log(row.model_dump())
        self.accelerator.log(_numbers(row.model_dump(), f"{agent}/"), step=counts["updates"])
        self.events.fire("on_step_end")

    def end_stage(self, stage: int, order: list[str]) -> None:
        """Closes the stage: evaluation where due, the stage's row, the cursor."""
        self._publish_joint()
        every, last = self.config.evaluation.every_stages, stage >= self.config.training.stages
        evaluation = self._evaluate()[0] if last or (every and stage % every == 0) else None
        if evaluation:
            self.state.accuracy_after = evaluation["avg_at_k"]
        self.updater.share_radii()
        self.state.stage, self.state.update = stage, 0
        self.state.cursor += self.config.rollout.items_per_stage
        self._log_stage(stage, order, evaluation, None)
        self.checkpoint()
        self.events.state.epoch = stage
        self.events.fire("on_epoch_end")

    def _publish_joint(self) -> None:
        """With a joint update nothing is live before all of it is."""
        if self.config.training.update == "joint":
            self.playable.publish_all()

    def end(self) -> None:
        self._publish_joint()
        self.events.fire("on_train_end")
        for tracker in self.accelerator.trackers:
            tracker.finish()  # not end_training: that would also end the process group of a vLLM in this process

    def checkpoint(self) -> None:
        """The commit point: until this returns, the update just made does not exist for a resumed run."""
        state = self.state
        state.step += 1
        state.versions = self.playable.adapter_versions()
        state.betas, state.radii, state.slopes = dict(self.updater.betas), dict(self.updater.radii), dict(self.updater.slopes)
        state.loss_scaler = self.updater.scaler.state_dict()
        state.metrics_bytes = self.run_dir.metrics.size
        state.seconds += self._lap()
        self.run_dir.checkpoints.save(state, {agent: flatten_state(o) for agent, o in self.updater.optimizers.items()})
        self.run_dir.write_team(state.versions, state.loras)
        self.events.fire("on_save")

    def _store_version(self, agent: str) -> None:
        bank = self.playable.bank
        write_version(self.run_dir.adapters, bank.version(agent), bank.tensors(agent), bank.config(agent))

    def _evaluate(self) -> tuple[dict[str, Any], list[Episode]]:
        plan = plan_in_training(self.task, self.config)
        episodes = self.playable.play(self.task, plan, lambda d, n, t: self.events.progress("evaluation", d, n, t))
        evaluation = summarise(episodes, self.task, split="test", k=plan.episodes_per_item, temperature=plan.temperature)
        self.state.episodes_evaluated = evaluation.episodes
        self.state.sampled_tokens += evaluation.sampled_tokens
        record = with_return(evaluation, episodes, self.updater.discount)
        self.events.fire("on_evaluate", metrics=record)
        return record, episodes

    def _log_stage(
        self, stage: int, order: list[str], evaluation: dict[str, Any] | None, floors: dict[str, float] | None
    ) -> None:
        state = self.state
        counts: dict[str, Any] = dict(state.counts)
        row = StageRow(
            stage=stage,
            order=order,
            versions=self.playable.versions(),
            evaluation=evaluation,
            floors=floors,
            items_seen=state.cursor,
            **counts,
            sampled_tokens=state.sampled_tokens,
            seconds=state.seconds + time.monotonic() - self._clock,
            peak_memory_bytes=peak_memory(self.playable.base.device),
            time=time.time(),
        )
        self.run_dir.metrics.append(row)
        self.events.log(row.model_dump())
        self.accelerator.log(_numbers(row.model_dump(), "team/"), step=state.counts["updates"])

    def _lap(self) -> float:
        now = time.monotonic()
        lap, self._clock = now - self._clock, now
        return lap


def _numbers(row: dict[str, Any], prefix: str) -> dict[str, float]:
    """A metrics row as a tracker takes it: flat names, numbers only."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (bool, int, float)):
            flat[prefix + key] = float(value)
    return flat
