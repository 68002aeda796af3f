"""The team: ordered agents, a protocol and a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from teamtr_lora.team.protocol import TeamProtocol, check_prefix_stability
from teamtr_lora.team.router import Router, build_router

if TYPE_CHECKING:
    from teamtr_lora.recipe import TeamSection


@dataclass(frozen=True)
class Agent:
    """A role; its LoRA adapter lives in the AdapterBank under the same name."""

    name: str
    role: str


@dataclass(frozen=True)
class Team:
    agents: tuple[Agent, ...]
    protocol: TeamProtocol
    router: Router
    context_tokens: int
    on_overflow: str

    @property
    def names(self) -> list[str]:
        return [agent.name for agent in self.agents]


def most_messages(section: TeamSection) -> int:
    """Of an episode. A custom router's limit does not depend on what it chooses."""
    router, names = section.router, [agent.name for agent in section.agents]
    kind = "round_robin" if router.kind == "custom" else router.kind
    return build_router(kind, names, rounds=router.rounds, sequence=router.sequence, judge=router.judge).max_messages


def build_team(
    section: TeamSection,
    tokenizer: Any,
    *,
    base_context_tokens: int,
    custom_router: Callable[..., str | None] | None = None,
    end_ids: Sequence[int] = (),
) -> Team:
    """Renders nothing yet, but refuses here, before any training, a protocol this tokenizer cannot carry.

    `end_ids`: what ends a message for this base beside its template's own end of turn.
    """
    roles = {agent.name: agent.role for agent in section.agents}
    named = section.router
    router = build_router(
        named.kind,
        list(roles),
        rounds=named.rounds,
        sequence=named.sequence,
        done_marker=named.done_marker,
        judge=named.judge,
        custom=custom_router,
    )
    protocol = TeamProtocol(
        tokenizer,
        roles,
        view=section.protocol.view,
        reasoning_tags=section.protocol.reasoning_tags,
        tool_calls=section.protocol.tool_calls,
        system=section.protocol.system,
        also_ends=end_ids,
        round_messages=router.round_messages,
    )
    check_prefix_stability(protocol)
    return Team(
        agents=tuple(Agent(name, role) for name, role in roles.items()),
        protocol=protocol,
        router=router,
        context_tokens=min(section.protocol.context_tokens or base_context_tokens, base_context_tokens),
        on_overflow=section.protocol.on_overflow,
    )
