"""What a swap and a rebase have in common: a team, its task, the parts that are finished, and whoever is told about it.

Every finished part is kept in a work folder, so that the same command goes on from there after a kill.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from pydantic import TypeAdapter

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, ScriptSettings
from teamtr_lora.registry.stored import StoredTeam
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.runs.work import Work
from teamtr_lora.swap.probe_contexts import Probe, play_probe, probe_from, probe_record
from teamtr_lora.swap.shock import TeamScore, score_team
from teamtr_lora.swap.stage0 import Alignment, Half, Stage0, Teacher, in_chunks, probe_batch
from teamtr_lora.swap.swap_report import Listener
from teamtr_lora.tasks import Task
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.scoring import Scorer


class Session:
    """One swap or rebase at work. `recipe` is the team's, with the settings of the command applied."""

    def __init__(
        self, where: str, held: StoredTeam, recipe: Recipe, *, work: Work, items: int | None, listener: Listener | None
    ) -> None:
        self.where, self.held, self.recipe, self.work = where, held, recipe, work
        self.items = items or recipe.evaluation.items
        self.radius = recipe.swap.delta_align or recipe.trust_region.delta
        self.listener, self.started = listener or Listener(), time.monotonic()

    @cached_property
    def task(self) -> Task:
        """What the team plays. UserError where its items or rewards are not here: whoever will play it asks for it before a base
        is loaded, and whoever only looks at an adapter never does."""
        if isinstance(self.recipe.task, ScriptSettings):
            raise UserError(
                f"{self.where}: this team's items and rewards live in a Python script; write a recipe whose task section names "
                f"them, begin a run with these adapters by `train RECIPE --from {self.where}`, and swap in that"
            )
        return self.recipe.task.build(self.recipe.folder)

    def probe(self, playable: PlayableTeam, agents: Sequence[str], *, ids: int | None = None, keep: bool = True) -> Probe:
        """Contexts in which each of `agents` speaks, played by the team as it was; `ids` is `play_probe`'s."""
        if keep and (record := self.work.get("probe")) is not None:
            return probe_from(record)
        told = self.listener.phase("playing the probe")
        probe = play_probe(playable, self.task, self.recipe, agents, self.recipe.swap.probe_contexts, told, ids=ids)
        if keep:
            self.work.put("probe", probe_record(probe))
        return probe

    def batches(self, scorer: Scorer, probe: Probe, agent: str, *, with_context: bool = True) -> list[MessageBatch]:
        """The minibatches that `agent`'s successor learns from, and last the held-out half. `with_context`: what is learned from
        has tokens of the contexts themselves too."""
        swap = self.recipe.swap
        fit, held = probe.halves(agent, swap.probe_contexts, self.recipe.seed)
        chunks = in_chunks(fit, swap.contexts_per_step)
        return [*(probe_batch(scorer, chunk, with_context=with_context) for chunk in chunks), probe_batch(scorer, held)]

    def score(self, name: str, playable: PlayableTeam, recipe: Recipe, *, stand_in: tuple[str, str] | None = None) -> TeamScore:
        """The team on the held-out items, under the name of this measurement; `stand_in` is `score_team`'s."""
        if (known := self.work.get(name)) is not None:
            return TeamScore(known["evaluation"])
        progress = self.listener.phase(f"measuring the team: {name}")
        score = score_team(playable, self.task, recipe, self.items, stand_in=stand_in, progress=progress)
        self.work.put(name, asdict(score))
        return score

    def align(
        self,
        part: str,
        agent: str,
        playable: PlayableTeam,
        scorer: Scorer,
        *,
        adapter: str,
        batches: list[MessageBatch],
        teachers: list[Teacher],
    ) -> Alignment:
        """Stage-0 of one adapter of the bank for `agent`, from where the work folder has it, on the batches of `batches` and the
        old agent's states for each. UserError where the held-out half does not come within the radius. Call it inside
        `playable.training_memory()`."""
        recipe = self.recipe
        told = self.listener.phase(f"aligning {part}")
        stage0 = Stage0(
            scorer,
            playable.bank,
            adapter,
            fit=Half(batches[:-1], teachers[:-1]),
            held=Half(batches[-1:], teachers[-1:]),
            region=recipe.trust_region,
            settings=recipe.swap,
            delta=self.radius,
            seed=f"{recipe.seed}/{part}",
            half_precision=playable.base.dtype == torch.float16,
        )

        def keep(now: Alignment, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
            self.work.put_tensors(part, now.steps, {"alignment": asdict(now), "scalars": scalars}, tensors)
            if told:
                told(now.steps, recipe.swap.align_steps, now.trained_tokens)

        kept = self.work.get_tensors(part)
        if kept is None:
            alignment = stage0.start()
        else:
            alignment = TypeAdapter(Alignment).validate_python(kept[0]["alignment"])
            stage0.resume(alignment, kept[1], kept[0]["scalars"])
        alignment = stage0.run(alignment, keep)
        if not alignment.reached:
            self.work.clear()
            raise UserError(self._not_reached(agent, alignment))
        return alignment

    def _not_reached(self, agent: str, alignment: Alignment) -> str:
        after = alignment.after
        steps = "more swap.align_steps, " if alignment.steps >= self.recipe.swap.align_steps else ""
        bound = "unknown" if after.bound is None else format(after.bound, ".3g")
        return (
            f"{agent}: Stage-0 ended after {alignment.steps} steps with a held-out KL of {after.mean:.3g} (upper bound {bound}), "
            f"outside delta_align = {alignment.delta:g}; {self.where} is as it was: use more --probe-contexts, a larger "
            f"--delta-align, a larger rank, {steps}or --direct"
        )


def scorer_for(playable: PlayableTeam, recipe: Recipe) -> Scorer:
    """Scores messages under the adapters of a team that is loaded."""
    if recipe.training.gradient_checkpointing:
        playable.bank.enable_gradient_checkpointing()
    return Scorer.of(playable, recipe)
