"""THE loop (alg:teamtr). Variants are settings that the run's steps read; the loop is always this one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from teamtr_lora.training.run import TrainingRun


def train(run: TrainingRun) -> None:
    """From wherever the checkpoint left off to the last stage."""
    run.begin()  # stage 0: numerical floors and the evaluation before training
    while run.state.stage < run.config.training.stages and not run.stopping:
        train_stage(run)
    run.end()


def train_stage(run: TrainingRun) -> None:
    stage = run.state.stage + 1
    items = run.items()
    order = update_order(run.config.training.order, run.agents, f"{run.config.seed}/{stage}")
    run.begin_stage(stage, order)
    for place in range(run.state.update, len(order)):
        agent = order[place]
        rollout = run.roll_out(items, stage, place)  # by default the team as it is now, agents updated in this stage included
        outcome = run.update(agent, rollout, stage, place)  # maximise the surrogate inside the trust region
        run.publish(outcome)  # live in the sampler before anything else is sampled; a joint update's when the stage ends
        run.record_update(stage, place, agent, rollout, outcome)
        run.checkpoint()
        if run.stopping:
            return
    run.end_stage(stage, order)


def update_order(kind: str | Sequence[str], agents: Sequence[str], seed: str) -> list[str]:
    """The order of one stage's updates: drawn anew each stage by default."""
    if not isinstance(kind, str):
        return list(kind)
    order = list(agents)
    if kind == "random":
        random.Random(seed).shuffle(order)
    elif kind == "reverse":
        order.reverse()
    return order
