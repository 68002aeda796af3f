"""Stage-0 on a base that is loaded, one adapter of its bank at a time, resumable from a work folder."""

from __future__ import annotations

from typing import Any

import torch

from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.swap.stage0 import Alignment, Half, Stage0
from teamtr_lora.swap.swap_report import Listener
from teamtr_lora.swap.work import Work
from teamtr_lora.training.scoring import Scorer


def align(
    work: Work,
    part: str,
    listener: Listener,
    scorer: Scorer,
    playable: PlayableTeam,
    adapter: str,
    fit: Half,
    held: Half,
    recipe: Recipe,
    radius: float,
) -> Alignment:
    """Stage-0 of one adapter of the bank, from where the work folder has it."""
    told = listener.phase(f"aligning {part}")
    stage0 = Stage0(
        scorer,
        playable.bank,
        adapter,
        fit,
        held,
        recipe.trust_region,
        recipe.swap,
        delta=radius,
        seed=f"{recipe.seed}/{part}",
        half_precision=playable.base.dtype == torch.float16,
    )
    kept = work.get_tensors(part)
    if kept is None:
        state = stage0.start()
    else:
        state = Alignment.from_dict(kept[0]["alignment"])
        stage0.resume(state, kept[1], kept[0]["scalars"])

    def keep(now: Alignment, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        work.put_tensors(part, now.steps, {"alignment": now.as_dict(), "scalars": scalars}, tensors)
        if told:
            told(now.steps, recipe.swap.align_steps, now.trained_tokens)

    return stage0.run(state, keep)


def scorer_for(playable: PlayableTeam, recipe: Recipe) -> Scorer:
    if recipe.training.gradient_checkpointing:
        playable.bank.enable_gradient_checkpointing()
    return Scorer.of(playable, recipe)


def not_reached(agent: str, alignment: Alignment, where: str, align_steps: int) -> str:
    after = alignment.after
    steps = "more swap.align_steps, " if alignment.steps >= align_steps else ""
    bound = "unknown" if after.bound is None else format(after.bound, ".3g")
    return (
        f"{agent}: Stage-0 ended after {alignment.steps} steps with a held-out KL of {after.mean:.3g} (upper bound {bound}), "
        f"outside delta_align = {alignment.delta:g}; {where} is as it was: use more --probe-contexts, a larger --delta-align, a "
        f"larger rank, {steps}or --direct"
    )
