"""How episodes are sampled: the rollout section of a recipe, and the rules between it and the other sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from teamtr_lora.common.settings import SERVER_URL, ApiKeyVariable, Mistake, Section, Text, refuse
from teamtr_lora.recipe.choices import OneOf
from teamtr_lora.recipe.engine_facts import DEFAULT_ENGINE, ENGINES, PATCH_NEEDS, PatchName

if TYPE_CHECKING:
    from teamtr_lora.recipe.recipe import Recipe
    from teamtr_lora.recipe.team_sections import BaseSection, TeamSection

ServerUrl = Annotated[str, Field(pattern=SERVER_URL)]

_TRUNCATION = "truncation changes the policy under the ratio: training uses the full softmax(z/T)"


class VllmSection(Section):
    """rollout.engine: vllm only. How the engine shares the machine with the trainer."""

    memory_share: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="On a GPU: share of its memory for vLLM (its copy of the base, the adapters and the KV cache).",
    )
    kv_cache_gib: int | None = Field(
        default=None,
        ge=1,
        description="Memory for the KV cache, in GiB; null: 1 on a CPU, on a GPU what memory_share leaves. A number takes the "
        "place of memory_share. Engines that start at the same time on one GPU need one: measuring what is free, each would "
        "count what the others take.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="GPUs (on a CPU: processes) over which vLLM splits its copy of the base, on vLLM's public interface alone. A "
        "training process then has as many GPUs: it trains on the first and samples on all.",
    )
    offload: Literal["auto", "never", "always"] = Field(
        default="auto",
        description="On a GPU: whether vLLM sleeps, its memory lent to the trainer, during updates; auto where memory is short.",
    )
    cuda_graphs: bool = Field(
        default=True, description="On a GPU: capture CUDA graphs, for a slower start and much faster small batches."
    )
    patches: Literal["auto", "none"] | list[PatchName] = Field(
        default="auto",
        description="What of vLLM's internals is replaced to make rollouts faster. auto: every patch that knows the installed "
        "vLLM; none: vLLM's public interface alone; or a list of patches by name.",
    )

    @field_validator("patches")
    @classmethod
    def _patches_have_what_they_build_on(cls, value: str | list[PatchName]) -> str | list[PatchName]:
        for name in value if isinstance(value, list) else ():
            if missing := [need for need in PATCH_NEEDS.get(name, ()) if need not in value]:
                words = {"wrong": f"{name} builds on {missing[0]}", "fix": "add that one, or leave both out"}
                raise PydanticCustomError("rule", "{wrong}; {fix}", words)
        return value

    @model_validator(mode="after")
    def _patches_reach_one_process(self) -> Self:
        if self.tensor_parallel > 1 and isinstance(self.patches, list) and self.patches:
            wrong = f"patches change vLLM in this process, and tensor_parallel = {self.tensor_parallel} has its workers in others"
            refuse("vllm", [(("patches",), self.patches, wrong, "use auto or none, which then apply none")])
        return self


class ServerSection(Section):
    """rollout.engine: vllm_server only. OpenAI-compatible vLLM servers, possibly on other hosts."""

    urls: list[ServerUrl] = Field(default=[], description="Addresses such as http://host:8000; requests are shared among them.")
    adapter_root: Text | None = Field(
        default=None,
        description="Folder under which the servers find adapter versions (a shared mount); null uploads them, which servers "
        "started by `teamtr-lora serve` accept.",
    )
    timeout_seconds: float = Field(default=600.0, gt=0, description="Longest wait for one answer before a server counts as dead.")
    api_key_variable: ApiKeyVariable = Field(
        default="VLLM_API_KEY",
        description="Environment variable that holds the servers' API key, if they ask for one; its name ends in API_KEY.",
    )


_ENGINE = OneOf(ENGINES, words="description")


class RolloutSection(Section):
    """How episodes are sampled."""

    engine: Annotated[str, _ENGINE] = Field(
        default=DEFAULT_ENGINE, description="What generates the messages", json_schema_extra=_ENGINE.in_words
    )
    items_per_stage: int = Field(default=16, ge=1, description="Task items per stage; each is one group of episodes.")
    episodes_per_item: int = Field(
        default=8, ge=2, description="Episodes per item: the group over which advantages are normalised."
    )
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature T; the policy is softmax(z/T).")
    top_p: float = Field(default=1.0, description="Nucleus sampling mass; only 1.0 (off) is sound in training.")
    top_k: int = Field(default=0, description="Tokens kept when sampling; only 0 (off) is sound in training.")
    max_message_tokens: int = Field(default=32, ge=1, description="Longest message in tokens.")
    truncated_messages: Literal["mask", "score"] = Field(
        default="score",
        description="Messages cut at max_message_tokens: score them like any other, or mask them out of the "
        "gradient. The gate and certificates count them either way.",
    )
    requests_per_batch: int = Field(default=256, ge=1, description="Largest batch of an engine in this process, in requests.")
    importance_cap: float | None = Field(
        default=None, ge=1, description="Cap on the sampler-to-trainer importance weight of a message; null uses no such weights."
    )
    vllm: VllmSection = Field(default_factory=VllmSection, description="engine: vllm only.")
    server: ServerSection = Field(default_factory=ServerSection, description="engine: vllm_server only.")

    @model_validator(mode="after")
    def _servers_are_named(self) -> Self:
        if ENGINES[self.engine].by_url and not self.server.urls:
            fix = 'list them, as in rollout.server.urls=["http://localhost:8000"]; `teamtr-lora serve` starts one'
            refuse("rollout", [(("server", "urls"), [], f"is empty, but rollout.engine is {self.engine}", fix)])
        return self

    @field_validator("top_p", "top_k")
    @classmethod
    def _whole_softmax(cls, value: float, info: ValidationInfo) -> float:
        off = {"top_p": 1.0, "top_k": 0}[str(info.field_name)]
        if value != off:
            fix = f"set rollout.{info.field_name} to {off} (the default)"
            raise PydanticCustomError("rule", "{wrong}; {fix}", {"wrong": _TRUNCATION, "fix": fix})
        return value

    @property
    def gpus_each(self) -> int:
        """GPUs of one process."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    def engine_bytes(self, total: int | None, base: int) -> int:
        """What an engine with its own copy of a base of `base` bytes takes of a GPU that has `total`; on a CPU that is None."""
        if total is None or ENGINES[self.engine].memory != "copy":
            return 0
        if self.vllm.kv_cache_gib is None:
            return int(self.vllm.memory_share * total)
        return base // self.vllm.tensor_parallel + self.vllm.kv_cache_gib * 2**30


def split_problem(base: BaseSection, team: TeamSection, rollout: RolloutSection) -> tuple[str, str] | None:
    """What keeps the base from being split over processes (training.shard), and what to do."""
    if ENGINES[rollout.engine].memory == "trainer":
        wrong = (
            f"rollout.engine is {rollout.engine}, and a base that is split cannot sample, as each process plays other episodes"
        )
        return wrong, "use rollout.engine=vllm_server, or vllm with rollout.vllm.tensor_parallel"
    if rollout.engine == "vllm" and rollout.vllm.tensor_parallel == 1:
        wrong = "vLLM has a whole base on one GPU, where there is no room for it"
        return wrong, "set rollout.vllm.tensor_parallel to 2 or more, or use rollout.engine=vllm_server"
    if base.quantization != "none":
        return f"base.quantization is {base.quantization}, and a quantised base cannot be split", "use base.quantization=none"
    if any(agent.lora.dora for agent in team.agents):
        return "an agent has a DoRA adapter, which reads weights of the base that would be split", "use lora.dora=false"
    return None


def engine_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """What the rest of a recipe asks for and its engine cannot do."""
    facts, base = ENGINES[recipe.rollout.engine], recipe.base
    other = "or rollout.engine=transformers"
    if not facts.takes_quantization(base.quantization, base.device):
        allowed = " or ".join(sorted({name for kind in facts.device_kinds(base.device) for name in facts.quantization[kind]}))
        where = " on a CPU" if base.device == "cpu" else ""
        wrong = f"{facts.name} cannot serve LoRA on a base quantised to {base.quantization}{where}"
        yield ("base", "quantization"), base.quantization, wrong, f"use {allowed}, {other}"
    low, high = facts.temperatures
    for key, temperature in (("rollout", recipe.rollout.temperature), ("evaluation", recipe.evaluation.temperature)):
        if temperature and not low <= temperature <= high:
            wrong = f"{facts.name} samples at temperatures from {low:g} to {high:g}, and another one is another policy"
            yield (key, "temperature"), temperature, wrong, f"use {low:g} to {high:g}, {other}"
    if recipe.training.shard == "always" and (found := split_problem(base, recipe.team, recipe.rollout)):
        yield ("training", "shard"), "always", found[0], f"{found[1]}, or training.shard=never"
    for i, agent in enumerate(recipe.team.agents):
        where_lora = ("team", "agents", i, "lora")
        if not facts.takes_rank(agent.lora.rank):
            wrong = f"{facts.name} serves ranks up to {facts.max_rank}"
            yield (*where_lora, "rank"), agent.lora.rank, wrong, f"use at most {facts.max_rank}, {other}"
        if agent.lora.dora and not facts.dora:
            yield (*where_lora, "dora"), True, f"{facts.name} cannot serve DoRA", "use rollout.engine=transformers"
