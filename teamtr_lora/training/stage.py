"""THE loop (alg:teamtr). Variants are objects that the run's steps ask; the loop is always this one."""

from __future__ import annotations

from teamtr_lora.training.run import TrainingRun


def train(run: TrainingRun) -> None:
    """From wherever the checkpoint left off to the last stage."""
    run.begin()  # stage 0: numerical floors and the evaluation before training
    while run.state.stage < run.config.training.stages and not run.stopping:
        train_stage(run)
    run.end()


def train_stage(run: TrainingRun) -> None:
    stage = run.state.stage + 1
    order = run.variants.order.arrange(run.agents, f"{run.config.seed}/{stage}")
    items = run.begin_stage(stage, order)
    for place in range(run.state.update, len(order)):
        rollout = run.roll_out(items, stage, place)  # by default the team as it is now, agents updated in this stage included
        outcome = run.update(order[place], rollout, stage, place)  # maximise the surrogate inside the trust region
        run.publish(outcome)  # in the sampler before anything else is sampled; a joint update's when the stage ends
        run.record_update(stage, place, rollout, outcome)
        if run.stopping:
            return
    run.end_stage(stage, order)
