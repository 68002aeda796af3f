"""The team: ordered agents, a protocol and a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from teamtr_lora.common.code_paths import load_callable
from teamtr_lora.team.episode import Episode
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
    recombine: bool = False  # what a message is worth is its mean reward beside the others' messages of its whole group

    def answer_turn(self, episode: Episode, vote: Callable[[Episode], str | None]) -> int | None:
        """The message that is the team's answer; `vote` is the task's, and reads the answer of an episode."""
        alone = replace(episode, answer_turn=None)
        return self.router.answer_turn(episode.messages, lambda message: vote(replace(alone, messages=[message])))


def most_messages(settings: Any) -> int:
    """The most messages that an episode of this team can have."""
    return _router(settings, None).max_messages


def build_team(
    settings: Any, tokenizer: Any, *, base_context_tokens: int, code: Path | None = None, end_ids: Sequence[int] = ()
) -> Team:
    """Builds the team of a recipe's team section, and refuses before any training a protocol that this tokenizer cannot carry.

    `code`: the folder in which a router of the user's own is looked for; None where nobody will play, so that its file need not
    run. `end_ids`: tokens that end a message for this base, beside the one that its chat template ends a turn with.
    """
    router, protocol = _router(settings, code), settings.protocol
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
        recombine=settings.recombine,
    )


def _router(settings: Any, code: Path | None) -> Router:
    router = settings.router
    custom = None
    if router.callable:  # how many messages it allows does not depend on whom it chooses: any function tells that
        custom = load_callable(router.callable, key="team.router.callable", folder=code) if code else lambda **_: None
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
