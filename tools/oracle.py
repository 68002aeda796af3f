"""Reads every candidate of a run again on fresh episodes: does the gate's KL bound hold, has the measured gain the right sign?

Before every update, or once a stage where agents do not hear each other, the team as it is plays episodes of its own, which
nobody learns from. When the gate has judged, each step length that it measured is measured on them too: same formulas, many more
groups, independent of what the candidate was fitted to and judged on. The run itself is not changed by it. tools/prove.py has it
as the study `oracle`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from teamtr_lora.algorithm.trust_region import StepDecision
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.tasks import DataOrder
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.gate import Judge, gate_pass, read_candidate
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.scoring import keep_current
from teamtr_lora.training.trainer import TeamTRTrainer
from teamtr_lora.training.update import episode_advantages

OTHER_ORDER = 10**6  # added to the seed: items in another order, and of a generator ones that no run comes to
CLEAR = 2.0  # standard errors that make a difference clear


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One step length of one update: what the gate read and what the oracle reads."""

    stage: int
    update: int
    agent: str
    alpha: float
    accepted: bool
    delta: float
    kl: float
    kl_bound: float
    gain: float
    true_kl: float
    true_kl_error: float
    true_gain: float
    true_gain_error: float
    own_team: bool = True  # the oracle's episodes are of the team that this update began with, and not of its stage's start


class Oracle(TrainerCallback):  # type: ignore[misc]
    """Give it to a trainer as a callback, with the trainer; verdicts are appended to `path`, a JSON object a line.

    The KL sits in a few items, whichever of their episodes is read, so that items count more than episodes of one.
    """

    def __init__(self, trainer: TeamTRTrainer, path: Path, *, items: int = 192, episodes_per_item: int = 4) -> None:
        self._trainer, self._path = trainer, path
        self._items, self._episodes_per_item = items, episodes_per_item
        self._episodes: list[Episode] = []
        self._played = ""  # the update that they were played for

    @property
    def _run(self) -> TrainingRun:
        assert self._trainer.run is not None
        return self._trainer.run

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        updater = self._run.updater
        decide = updater._decide

        def decided(judge: Judge, *details: Any) -> Any:
            found = decide(judge, *details)
            self._read(judge, found[0])
            return found

        updater._decide = decided  # type: ignore[method-assign]

    def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Now, as the sampler gives its memory away during an update. Where nobody hears another, once a stage: what an agent
        says until its own update stays as likely, so its KL is as good as on new episodes. What it earns is that beside the team
        that began the stage, so that the gains of a stage's later updates are not compared."""
        run, config, router = self._run, self._run.config, self._run.playable.team.router
        if self._episodes and run.state.update and router.round_messages == router.max_messages:
            return
        run.variants.publishing.catch_up(run.playable)
        items, number = run.task.items("train"), run.state.counts["updates"]
        order = DataOrder(items, config.seed + OTHER_ORDER)
        items = order.take(number * self._items, self._items)
        plan = PlayPlan.of(config.rollout, items, f"{config.seed}/oracle/{number}", self._episodes_per_item)
        self._episodes = run.playable.play(run.task, plan)
        self._played = self._place()

    def _place(self) -> str:
        return f"{self._run.state.stage}/{self._run.state.update}"

    def _read(self, judge: Judge, step: StepDecision) -> None:
        run, updater, agent = self._run, self._run.updater, judge.agent
        config, bank, estimator = run.config, run.playable.bank, run.config.trust_region.estimator
        left = bank.snapshot(agent)
        advantages = episode_advantages(self._episodes, agent, config.training, updater.discount)
        sequences, masked = agent_sequences(self._episodes, agent), config.rollout.truncated_messages == "mask"
        batch = updater.scorer.batch(sequences, advantages.clipped_E.tolist(), mask_truncated=masked)
        with gate_pass(updater.scorer):
            bank.restore(agent, judge.before)
            current = keep_current(updater.scorer, batch)
            for own in step.readings:
                bank.interpolate(agent, judge.before, judge.candidate, own.alpha)
                true = read_candidate(updater.scorer, batch, current, config, updater.discount)
                verdict = Verdict(
                    stage=run.state.stage + 1,
                    update=run.state.update + 1,
                    agent=agent,
                    alpha=own.alpha,
                    accepted=step.accepted is not None and step.accepted.alpha == own.alpha,
                    delta=updater.dials[agent].radius,
                    kl=own.kl.mean,
                    kl_bound=own.bound,
                    gain=own.gain.mean,
                    true_kl=true.kl[estimator].mean,
                    true_kl_error=true.kl[estimator].standard_error,
                    true_gain=true.gain.mean,
                    true_gain_error=true.gain.standard_error,
                    own_team=self._played == self._place(),
                )
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(verdict)) + "\n")
        bank.restore(agent, left)


def read_verdicts(path: Path) -> list[Verdict]:
    """All of a run's; of an update that was made again after an interruption, those of the last time."""
    rows = [Verdict(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    last: dict[tuple[int, int, float], Verdict] = {(row.stage, row.update, row.alpha): row for row in rows}
    return list(last.values())


def verdict_shares(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """How often the gate was right. A share of nothing is None. The true gain is of another team's where `own_team` is false."""
    accepted, own = [v for v in verdicts if v.accepted], [v for v in verdicts if v.own_team]
    clear = [v for v in own if abs(v.true_gain) > CLEAR * v.true_gain_error]
    made = {(v.stage, v.update) for v in accepted}  # there another length was taken, which refuses none
    refused = [v for v in own if (v.stage, v.update) not in made and v.kl_bound <= v.delta]
    return {
        "readings": float(len(verdicts)),
        "bound_holds": _share([v.true_kl <= v.kl_bound for v in verdicts]),
        "accepted_bound_holds": _share([v.true_kl <= v.kl_bound for v in accepted]),
        "bound_clearly_fails": _share([v.true_kl - CLEAR * v.true_kl_error > v.kl_bound for v in verdicts]),
        "accepted_out_of_region": _share([v.true_kl > v.delta for v in accepted]),
        "furthest_accepted": max((v.true_kl / v.delta for v in accepted), default=None),
        "sign_right": _share([(v.gain > 0) == (v.true_gain > 0) for v in own]),
        "clear_sign_right": _share([(v.gain > 0) == (v.true_gain > 0) for v in clear]),
        "accepted_that_harm": _share([v.true_gain < -CLEAR * v.true_gain_error for v in own if v.accepted]),
        "refused_in_region": float(len(refused)),
        "refused_that_gain": _share([v.true_gain > CLEAR * v.true_gain_error for v in refused]),
    }


def _share(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) if right else None
