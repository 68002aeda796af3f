"""`plan`: what a recipe costs, from configuration files alone: no weights are read, nor fetched from a hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import accelerate.optimizer  # noqa: F401  (what a run imports, so that this process is as large as a run's own libraries make it)
import peft  # noqa: F401  (likewise)
import torch

from teamtr_lora.algorithm.variants.chosen import Variants, learned_items
from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.base.frozen_base import BaseFacts, base_facts, load_tokenizer, resolve_device, resolve_dtype
from teamtr_lora.base.lora_config import misfit, targeted
from teamtr_lora.base.memory import peak_memory, total_bytes
from teamtr_lora.base.memory_model import (
    CPU_TOKENS,
    MARGIN,
    UPDATE_PARTS,
    UpdateShape,
    choose_tokens,
    stored_bytes,
    update_memory,
    update_peak,
    update_shape,
)
from teamtr_lora.base.sharding import split_bytes, splits
from teamtr_lora.base.source import beside, describe
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import AgentSection, Recipe, ScriptSettings
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.study.expected_time import ExpectedTime, Speeds, expected_time
from teamtr_lora.study.shares import Share, make_share
from teamtr_lora.team import Router, Team, build_team

SAMPLE_ITEMS = 16  # prompts rendered to learn how long a transcript is


@dataclass(frozen=True)
class Plan:
    base: str
    parameters: int
    device: str
    precision: str
    updates_per_stage: int
    rollouts_per_stage: int
    episodes_per_update: int
    episodes_per_stage: int
    messages_per_episode: int
    prompt_tokens: int
    context_tokens: int  # that the team may use
    sampled_tokens_per_update_at_most: int
    sampled_tokens_per_stage_at_most: int
    stages: int
    evaluation_episodes: int
    adapter_parameters: dict[str, int]
    adapter_bytes: dict[str, int]
    memory_bytes: dict[str, int]  # of each process
    memory_total_bytes: int
    with_margin_bytes: int  # what the GPU must have: the allocator takes more for an update than its tensors need
    device_bytes: int | None  # all memory of the GPU; None on a CPU
    tokens_per_microbatch: int
    trust_region: str
    engine: str
    unmeasured: list[str]
    expected_time: ExpectedTime | None = None  # None: no speeds are known
    share: Share | None = None  # of one of several processes; None: there is one

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.with_margin_bytes <= self.device_bytes


def make_plan(recipe: Recipe, speeds: Speeds | None = None, *, processes: int = 1, nodes: int = 1) -> Plan:
    """`processes` on all `nodes` together. `speeds` are those of one process."""
    folder = describe(beside(recipe.base.source, recipe.folder), recipe.base.revision)
    facts = base_facts(folder)
    device = resolve_device(recipe.base.device)
    dtype = resolve_dtype(recipe.base.precision, device)
    team, rollout, agents = _team(recipe, folder, facts), recipe.rollout, len(recipe.team.agents)
    prompt, recipe = _of_the_task(recipe, team)
    adapters = {agent.name: _adapter_parameters(agent, facts) for agent in recipe.team.agents}
    rollouts, played = recipe.stage_budget()
    episodes, messages = played * rollout.episodes_per_item, team.router.max_messages
    longest = min(rollout.max_message_tokens, team.context_tokens)
    sampled = episodes * messages * longest
    transcript = min(team.context_tokens, prompt + _messages_of_a_context(team.router) * (longest + _turn_tokens(team)))
    total = total_bytes(device)
    taken = rollout.engine_bytes(total, stored_bytes(facts, recipe.base.quantization, dtype.itemsize))
    split = splits(recipe.training.shard, facts, over=processes, value=dtype.itemsize, device_bytes=total, engine_bytes=taken)
    memory = _standing_memory(recipe, facts, adapters, transcript, dtype, device, processes, split)
    learned = learned_items(recipe, agents)
    shape = update_shape(
        recipe, [agent.lora for agent in recipe.team.agents], agents=agents, messages=messages, learned_items=learned,
        processes=processes, value=dtype.itemsize, device=device.type, quantized=recipe.base.quantization != "none",
    )  # fmt: skip
    tokens = _tokens_per_microbatch(recipe, facts, shape, memory, device)
    memory |= update_memory(facts, replace(shape, tokens=max(tokens, transcript)))
    share = None if processes == 1 else make_share(
        recipe, facts, processes=processes, nodes=nodes, items=played, learned_items=learned, messages=messages,
        transcript=transcript, tokens=tokens, value=dtype.itemsize, split_base=split, adapter_parameters=max(adapters.values()),
    )  # fmt: skip
    return Plan(
        base=recipe.base.source,
        parameters=facts.parameters,
        device=str(device),
        precision=recipe.base.quantization if recipe.base.quantization != "none" else str(dtype).removeprefix("torch."),
        updates_per_stage=agents,
        rollouts_per_stage=rollouts,
        episodes_per_update=episodes,
        episodes_per_stage=episodes * rollouts,
        messages_per_episode=messages,
        prompt_tokens=prompt,
        context_tokens=team.context_tokens,
        sampled_tokens_per_update_at_most=sampled,
        sampled_tokens_per_stage_at_most=sampled * rollouts,
        stages=recipe.training.stages,
        evaluation_episodes=recipe.evaluation.items * recipe.evaluation.samples_in_training,
        adapter_parameters=adapters,
        adapter_bytes={agent: 4 * count for agent, count in adapters.items()},
        memory_bytes=memory,
        memory_total_bytes=_peak(memory, engine=rollout.engine, offload=rollout.vllm.offload),
        with_margin_bytes=_peak(memory, engine=rollout.engine, offload=rollout.vllm.offload, margin=MARGIN),
        device_bytes=total,
        tokens_per_microbatch=tokens,
        trust_region=_in_words(recipe, longest),
        engine=_engine_in_words(recipe),
        unmeasured=recipe.unmeasured(),
        expected_time=None
        if speeds is None
        else expected_time(speeds, recipe, rollouts=rollouts, episodes=episodes, messages=messages, share=share),
        share=share,
    )


def _team(recipe: Recipe, folder: Path, facts: BaseFacts) -> Team:
    tokenizer = load_tokenizer(folder, recipe.base.source)
    return build_team(recipe.team, tokenizer, base_context_tokens=facts.context_tokens)


def _of_the_task(recipe: Recipe, team: Team) -> tuple[int, Recipe]:
    """Tokens of the longest first prompt among a few items, rendered with the real tokenizer, and the recipe
    whose evaluations have no more items than there are."""
    if isinstance(recipe.task, ScriptSettings):
        return len(team.protocol.begin("").prompt_for(team.names[0])), recipe
    task = recipe.task.for_items(recipe.folder)
    per_stage, stages, held_out = recipe.rollout.items_per_stage, recipe.training.stages, recipe.evaluation.items
    task.check_team(team, seed=recipe.seed, per_stage=per_stage, stages=stages, held_out=held_out)
    items = task.first_items("train", SAMPLE_ITEMS)
    tokens = max(len(team.protocol.begin(item.prompt).prompt_for(team.names[0])) for item in items)
    size = task.items("test").size
    if size is None or size >= recipe.evaluation.items:
        return tokens, recipe
    return tokens, recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"items": size})})


def _turn_tokens(team: Team) -> int:
    """Tokens a turn costs beside its message: its opening, header and closing."""
    chat = team.protocol.chat
    return len(chat.encode(chat.agent_open + f"{team.names[0]}:\n")) + len(team.protocol.close_ids)


def _adapter_parameters(agent: AgentSection, facts: BaseFacts) -> int:
    lora = agent.lora
    if wrong := misfit(lora.rank, lora.targets, facts.linears):
        raise UserError(f"team.agents.{agent.name}.lora.{wrong[0]}: {wrong[1]}")
    chosen = targeted(lora.targets, facts.linears)
    magnitudes = sum(m.out_features for m in chosen) if lora.dora else 0
    return sum(lora.rank * (m.in_features + m.out_features) for m in chosen) + magnitudes


def _messages_of_a_context(router: Router) -> int:
    """At most: those of all rounds that were heard before the last message, and that one."""
    return (router.max_messages - 1) // router.round_messages * router.round_messages + 1


def _standing_memory(
    recipe: Recipe,
    facts: BaseFacts,
    adapters: dict[str, int],
    transcript: int,
    dtype: torch.dtype,
    device: torch.device,
    processes: int,
    split: bool,
) -> dict[str, int]:
    """What is there whether an update is made or not."""
    rollout, training = recipe.rollout, recipe.training
    value = dtype.itemsize
    played = max(rollout.items_per_stage * rollout.episodes_per_item, recipe.evaluation.items)
    rows = min(rollout.requests_per_batch, -(-played // processes))
    moments = OPTIMIZERS[training.optimizer].state_bytes
    stored = stored_bytes(facts, recipe.base.quantization, value)
    return {
        "libraries" if device.type == "cpu" else "CUDA context": _libraries(device),
        "base": split_bytes(facts, value, processes) if split else stored,
        "adapters": 4 * sum(adapters.values()),
        # every agent's moments, and while one updates: its weights before and after, their moments before, gradients
        "optimizer": moments * sum(adapters.values()) + (4 * 3 + moments) * max(adapters.values()),
        **_sampling_memory(recipe, stored, rows * transcript * _cached_values(facts) * value, device),
    }


def _tokens_per_microbatch(
    recipe: Recipe, facts: BaseFacts, shape: UpdateShape, standing: dict[str, int], device: torch.device
) -> int:
    """As a run on this machine would choose, were the GPU its own."""
    wanted = recipe.training.tokens_per_microbatch
    if wanted != "auto":
        return wanted
    if (total := total_bytes(device)) is None:
        return CPU_TOKENS
    lendable = 0 if recipe.rollout.vllm.offload == "never" else standing.get("vLLM's share", 0)
    return choose_tokens(facts, shape, total - sum(standing.values()), lendable)


def _cached_values(facts: BaseFacts) -> int:
    """Keys and values that one token leaves in a KV cache."""
    return facts.layers * facts.kv_heads * facts.head_dim * 2


def _sampling_memory(recipe: Recipe, base: int, cache: int, device: torch.device) -> dict[str, int]:
    """What the engine takes beside the trainer: the cache of the trainer's own model, vLLM's share, or nothing here."""
    vllm, where = recipe.rollout.vllm, ENGINES[recipe.rollout.engine].memory
    if where != "copy":
        return {"KV cache": cache if where == "trainer" else 0}
    if device.type == "cpu":
        return {"KV cache": (vllm.kv_cache_gib or 1) * 2**30, "vLLM's base": base}
    return {"KV cache": 0, "vLLM's share": recipe.rollout.engine_bytes(total_bytes(device), base)}


def _peak(memory: dict[str, int], *, engine: str, offload: str, margin: float = 1.0) -> int:
    """Rollouts and updates take turns: the cache of the trainer's own model is gone when an update begins, and an update's
    activations when a rollout does. vLLM keeps what it has, unless it always sleeps during updates."""
    update = int(margin * update_peak(memory))
    sampling = memory["KV cache"] + memory.get("vLLM's share", 0) + memory.get("vLLM's base", 0)
    rest = sum(memory.values()) - sum(memory[part] for part in UPDATE_PARTS) - sampling
    keeps = ENGINES[engine].memory == "copy" and not ("vLLM's share" in memory and offload == "always")
    return rest + (sampling + update if keeps else max(sampling, update))


def _libraries(device: torch.device) -> int:
    """On a CPU the process itself, measured now that it has imported what a run imports; on a GPU the context's usual size."""
    return peak_memory(device) if device.type == "cpu" else 500 * 2**20


def _engine_in_words(recipe: Recipe) -> str:
    facts = ENGINES[recipe.rollout.engine]
    resumed = "with the same adapters, bit for bit, as" if facts.exact_resume else "with slightly other adapters than"
    return f"Engine: {facts.name}. A draw depends on {facts.seeds}; a resumed run ends {resumed} one that never stopped."


def _per_token(recipe: Recipe, longest: int) -> str:
    """What the radius of a message means for its tokens."""
    region = recipe.trust_region
    if not REDUCTIONS[region.reduction].whole:
        return ""
    return f" In a message of {longest} tokens, the longest allowed, that is {region.delta / longest:.1g} nats a token."


def _in_words(recipe: Recipe, longest: int) -> str:
    region = recipe.trust_region
    variants = Variants.of(recipe)
    _, played = recipe.stage_budget()
    items = variants.reuse.judges(played)
    if not variants.region.gates:
        return (
            f"Trust region: {variants.region.words}. No update is shortened or rejected; how far each one went is "
            f"measured on {items} and counted as out of region beyond {region.delta:g} nats."
        )
    moves = variants.region.next_radius(region.delta, 0.0) != region.delta
    share = " (at first: it moves until the steps' mean KL is that)" if moves else variants.radii.note
    step = "lengthened to the boundary or shortened to fit" if region.step == "fill" else "shortened to fit"
    unit = REDUCTIONS[region.reduction].words
    return (
        f"Trust region: an update is accepted only if the {region.estimator} KL from the agent it replaces, {unit}, is at most "
        f"{region.delta:g} nats{share} with {region.confidence:.0%} confidence, on {items}.{_per_token(recipe, longest)} Its "
        f"surrogate gain: {variants.region.gain_rule.words}. A step is {step}; if nothing fits it is rejected and the agent "
        "stays as it was, bit for bit."
    )
