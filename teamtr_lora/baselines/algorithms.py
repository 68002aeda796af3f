"""What each baseline is as settings of TRL's GRPOTrainer, with everything that both sides have taken from the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from teamtr_lora.base.memory_model import DEFAULT_TOKENS
from teamtr_lora.common.errors import UserError

if TYPE_CHECKING:
    from teamtr_lora.recipe import Recipe

Algorithm = Literal["grpo", "dapo", "ppo"]
CLIP_HIGHER = 0.08  # DAPO: 0.28 above and 0.2 below

WHAT_THEY_ARE = """what they are, as settings of TRL's GRPOTrainer (see baseline.json in the run directory for all of them):
- grpo: group-normalised advantages, clip range +-clip_ratio, loss averaged by episode, no KL term
- dapo: the same with a wider clip range above (+0.08), loss averaged by token, episodes that were cut off masked out.
  TRL has no dynamic sampling: groups without reward variance are not replaced, they add nothing
- ppo: PPO-style, without a critic (TRL has no PPO trainer any more): PPO's clipped token ratios over at least two passes,
  the group's mean in place of a value function, advantages scaled over the batch; no GAE, no KL term

one agent, with the adapter of the recipe's first (or --agent) and the roles of all, plays as many episodes and messages as the
team would. TRL does the learning (advantages, loss, optimizer); episodes are played, scored and evaluated as in train, token for
token, through TRL's rollout_func. The gate is not used: how far each update went is measured and counted against delta.
"""


def group_settings(algorithm: Algorithm, recipe: Recipe) -> dict[str, Any]:
    """What makes the algorithm, and its hyperparameters."""
    training = recipe.training
    common = {
        "beta": 0.0,
        "epsilon": training.clip_ratio,
        "num_generations": recipe.rollout.episodes_per_item,
        "num_iterations": training.inner_epochs,
        "temperature": recipe.rollout.temperature,
        "learning_rate": training.starting_rate,
        "lr_scheduler_type": training.trl_schedule,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": training.trl_optimizer,
        "seed": recipe.seed,
    }
    own: dict[Algorithm, dict[str, Any]] = {
        "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
        "dapo": {
            "loss_type": "dapo",
            "scale_rewards": "group",
            "epsilon_high": round(training.clip_ratio + CLIP_HIGHER, 6),
            "mask_truncated_completions": True,
        },
        "ppo": {"loss_type": "bnpo", "scale_rewards": "batch", "num_iterations": max(2, training.inner_epochs)},
    }
    return common | own[algorithm]


def batch_settings(recipe: Recipe, *, longest: int, iterations: int) -> dict[str, int]:
    """How one rollout is cut into optimizer steps and forward passes. `longest`: tokens of the longest episode seen.

    A step takes an equal share of the episodes, as TRL asks for; a pass as many of them as tokens_per_microbatch allows.
    """
    training, rollout = recipe.training, recipe.rollout
    episodes, parts = rollout.items_per_stage * rollout.episodes_per_item, training.minibatches_per_epoch
    if episodes % parts:
        raise UserError(
            f"training.minibatches_per_epoch = {parts}: TRL takes equal steps and a rollout has {episodes} episodes; use a "
            f"number that divides {episodes}"
        )
    step = episodes // parts
    wanted = training.tokens_per_microbatch
    most = max(1, (DEFAULT_TOKENS if wanted == "auto" else wanted) // longest)
    a_pass = max(size for size in range(1, min(most, step) + 1) if step % size == 0)
    return {
        "per_device_train_batch_size": a_pass,
        "gradient_accumulation_steps": step // a_pass,
        "steps_per_generation": episodes // a_pass,
        "max_steps": training.stages * iterations * parts,
        "save_steps": iterations * parts,
        "logging_steps": iterations * parts,
    }
