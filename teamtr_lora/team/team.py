"""The team: ordered agents, a protocol and a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from teamtr_lora.team.protocol import TeamProtocol, check_prefix_stability
from teamtr_lora.team.router import Router, build_router


@dataclass(frozen=True)
class Team:
    names: list[str]  # of the agents, in speaking order; their LoRA adapters live in the AdapterBank under the same names
    protocol: TeamProtocol
    router: Router
    context_tokens: int
    on_overflow: str
    own_answer_share: float = 0.0  # of an agent's reward: what its own last message would have got as the team's answer


def most_messages(settings: Any) -> int:
    """The most messages that an episode of this team can have."""
    # How many messages a custom router allows does not depend on whom it chooses, so that any function will do here.
    return _router(settings, custom=lambda **_: None).max_messages


def build_team(
    settings: Any,
    tokenizer: Any,
    *,
    base_context_tokens: int,
    custom_router: Callable[..., str | None] | None = None,
    end_ids: Sequence[int] = (),
) -> Team:
    """Builds the team of a recipe's team section, and refuses before any training a protocol that this tokenizer cannot carry.

    `end_ids`: tokens that end a message for this base, beside the one that its chat template ends a turn with.
    """
    router, protocol = _router(settings, custom_router), settings.protocol
    carried = TeamProtocol(
        tokenizer,
        {agent.name: agent.role for agent in settings.agents},
        view=protocol.view,
        reasoning_tags=protocol.reasoning_tags,
        tool_calls=protocol.tool_calls,
        system=protocol.system,
        also_ends=end_ids,
        round_messages=router.round_messages,
    )
    check_prefix_stability(carried)
    return Team(
        names=[agent.name for agent in settings.agents],
        protocol=carried,
        router=router,
        context_tokens=min(protocol.context_tokens or base_context_tokens, base_context_tokens),
        on_overflow=protocol.on_overflow,
        own_answer_share=settings.own_answer_share,
    )


def _router(settings: Any, custom: Callable[..., str | None] | None) -> Router:
    router = settings.router
    return build_router(
        router.kind,
        [agent.name for agent in settings.agents],
        rounds=router.rounds,
        sequence=router.sequence,
        done_marker=router.done_marker,
        judge=router.judge,
        answer=router.answer,
        custom=custom,
    )
