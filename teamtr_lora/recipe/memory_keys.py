"""Which keys make a run smaller, where a GPU is full."""

from __future__ import annotations

from teamtr_lora.recipe.recipe import Recipe

_USUAL_TOKENS = 8192  # of a micro-batch that nothing has chosen, as base.memory_model.DEFAULT_TOKENS


def smaller(recipe: Recipe, phase: str, chosen: int | None = None) -> list[str]:
    """Settings to try, the most helpful first, after `phase` (loading, rollout, update or gate) has run out of memory. `chosen`:
    the size of a micro-batch that `auto` came to."""
    base, rollout, training = recipe.base, recipe.rollout, recipe.training
    used = (chosen or _USUAL_TOKENS) if training.tokens_per_microbatch == "auto" else training.tokens_per_microbatch
    tokens, requests = max(1, used // 2), max(1, rollout.requests_per_batch // 2)
    lent = [f"rollout.vllm.memory_share={rollout.vllm.memory_share / 2:g}"] if rollout.engine == "vllm" else []
    found: list[str] = []
    if phase == "loading":
        found += ["base.quantization=4bit"] if base.quantization == "none" else []
        found += ["base.precision=fp16"] if base.precision == "fp32" else []
        return found + lent or ["base.source to a smaller base"]
    if phase == "rollout":
        found += [f"rollout.requests_per_batch={requests}"] if requests < rollout.requests_per_batch else []
    else:
        found += [f"training.tokens_per_microbatch={tokens}"] if tokens < used else []
        if phase == "update" and not training.gradient_checkpointing:
            found.append("training.gradient_checkpointing=true")
    return found + lent or ["base.quantization=4bit in a new run"]
