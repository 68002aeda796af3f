"""How much memory an update takes, from shapes alone.

`plan` tells it before a run, and `training.tokens_per_microbatch: auto` chooses by it. What a layer keeps of a token for the
backward pass was counted by hooks on the saved tensors of Llama and Qwen3 layers, and a test counts again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # torch takes seconds to import, and commands that only read settings come by here
    from teamtr_lora.base.bank import LoraSpec
    from teamtr_lora.base.frozen_base import BaseFacts

TrainingPath = Literal["peft", "fused", "compiled"]
"""Whose layers a training pass goes through: PEFT's, those of `fused_lora`, or the latter compiled."""

DEFAULT_TOKENS = 8192  # of a micro-batch that nothing has chosen, and as many as an engine lends its memory for
CPU_TOKENS = 1024  # on a CPU: what fits its caches is faster, and enough micro-batches are left to deal out to processes
SIZES = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)  # coarse: free memory varies a little
ENOUGH_WORK = 2**25  # tokens times hidden size of a micro-batch: with half of it Python is slower than an H200, by a fifth
MARGIN = 1.2  # what the allocator takes, at most, for what the model counts; so do float32 sums of a noisy base
UPDATE_PARTS = ("policy kept", "activations", "KL head chunk", "gate")
HEAD_COPIES = 8  # chunk-sized float32 arrays alive at once where the head's KL is computed from logits
STORED_BYTES = {"4bit": 0.56, "8bit": 1.06}  # of a base's value, with its block scales
ADAPTED = 7  # linear modules of a decoder layer, each with an inner activation as wide as the rank, or three times where fused


@dataclass(frozen=True, kw_only=True)
class UpdateShape:
    """What an update's memory depends on, beside the base."""

    tokens: int  # of the largest micro-batch
    learned_tokens: int  # of all messages that the update learns from
    judged_tokens: int  # of all messages that judge it
    rank: int
    value: int  # bytes of one activation
    path: TrainingPath
    checkpointing: bool
    head_chunk: int


def update_shape(
    config: Any,
    loras: Collection[LoraSpec],
    *,
    agents: int,
    messages: int,
    learned_items: int,
    processes: int,
    value: int,
    device: str,
    quantized: bool,
) -> UpdateShape:
    """The largest update of a team of `agents`, who speak equally often and all as long as they may, with any of `loras`. Each of
    `processes` has its share of the items. `config` has the sections rollout, training and trust_region of a recipe."""
    rollout, training = config.rollout, config.training
    per_episode = rollout.max_message_tokens * -(-messages // agents)
    return UpdateShape(
        tokens=DEFAULT_TOKENS,
        learned_tokens=-(-learned_items // processes) * rollout.episodes_per_item * per_episode,
        judged_tokens=config.trust_region.judging_episodes * per_episode,
        rank=max(lora.rank for lora in loras),
        value=value,
        path=training_path(device, value, quantized=quantized, dora=any(lora.dora for lora in loras), compiled=training.compile),
        checkpointing=training.gradient_checkpointing,
        head_chunk=training.head_chunk_tokens,
    )


def training_path(device: str, value: int, *, quantized: bool, dora: bool, compiled: bool) -> TrainingPath:
    """The layers that `AdapterBank.training` chooses; `device` is cpu or cuda."""
    if device == "cpu" or value > 2 or quantized or dora:
        return "peft"
    return "compiled" if compiled else "fused"


def stored_bytes(facts: BaseFacts, quantization: str, value: int) -> int:
    """Of a base's weights as they stand in memory."""
    return int(facts.parameters * STORED_BYTES.get(quantization, value))


def kept_per_token(facts: BaseFacts, path: TrainingPath, value: int, rank: int) -> int:
    """Bytes that one decoder layer keeps of one token for the backward pass.

    Counted in widths: D hidden, I of the MLP, Q and K of the queries and of the keys. Norms compute in float32 and keep such an
    input; PEFT keeps a float32 input of every adapted module of a half-precision base; a compiled layer keeps its own input and
    the outputs of products and of attention, and computes all else again.
    """
    wide, mlp = facts.hidden_size, facts.intermediate_size
    query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    attention = 2 * query + 2 * key  # what the attention kernel keeps: queries, keys, values, output
    head_norms = query + key if facts.head_norms else 0
    inner = ADAPTED * rank * (1 if path == "peft" else 3)
    if path == "compiled":
        return value * (2 * mlp + 2 * wide + attention + inner)
    norms = 4 * (2 * wide + head_norms)
    if path == "peft" and value < 4:
        return value * (3 * mlp + attention) + 4 * (6 * wide + mlp + inner) + norms
    return value * (4 * mlp + 2 * wide + attention + inner) + norms


def update_memory(facts: BaseFacts, shape: UpdateShape) -> dict[str, int]:
    """Bytes by part. `policy kept` lasts through the update, in which `activations` and `head chunk` alternate with `gate`."""
    wide, mlp, value = facts.hidden_size, facts.intermediate_size, shape.value
    layer = kept_per_token(facts, shape.path, value, shape.rank)
    layers = layer + value * wide * facts.layers if shape.checkpointing else layer * facts.layers
    in_flight = value * (4 * mlp + 6 * wide)  # gradients of one layer
    half = value < 4
    # of a message token: mean head rows, and what is left of them for the backward
    scores = 4 * 5 * wide if half else 4 * 2 * wide
    chunk = min(shape.head_chunk, shape.learned_tokens) * facts.vocab_size
    layer_weights = sum(linear.in_features * linear.out_features for linear in facts.linears) // facts.layers
    upcast = 4 * (layer_weights + facts.vocab_size * wide) if half else 0
    read = HEAD_COPIES if shape.path == "peft" else 2  # the other paths are a GPU's, whose kernel takes both policies' logits
    return {
        "policy kept": shape.learned_tokens * wide * (value + 4 if half else value),
        "activations": shape.tokens * (layers + in_flight + scores),
        "KL head chunk": chunk * (4 + value if half else 4 * HEAD_COPIES),
        "gate": upcast + shape.tokens * 4 * (3 * mlp + 6 * wide) + shape.judged_tokens * wide * 4 + chunk * 4 * read,
    }


def update_peak(parts: dict[str, int]) -> int:
    return parts["policy kept"] + max(parts["activations"] + parts["KL head chunk"], parts["gate"])


def choose_tokens(facts: BaseFacts, shape: UpdateShape, free: int, lendable: int) -> int:
    """Tokens of a micro-batch: as many as keep a GPU busy, or as fit into `free` bytes where those are fewer, and no less than
    the smallest size. Where that is little, an engine that sleeps during updates, for a second or two each, lends its memory."""
    alone = _fitting(facts, shape, free)
    return max(alone, min(DEFAULT_TOKENS, _fitting(facts, shape, free + lendable)))


def _fitting(facts: BaseFacts, shape: UpdateShape, free: int) -> int:
    enough = next((size for size in SIZES if size * facts.hidden_size >= ENOUGH_WORK), SIZES[-1])
    fits = [size for size in SIZES if MARGIN * update_peak(update_memory(facts, replace(shape, tokens=size))) <= free]
    return min(enough, max(fits, default=SIZES[0]))
