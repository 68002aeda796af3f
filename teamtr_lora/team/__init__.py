"""The team as plain data and pure functions: agents, how their shared context becomes tokens, who speaks next."""

from teamtr_lora.team.chat import ChatPieces
from teamtr_lora.team.episode import Episode, Message, SequenceSpan, TokenSequence, agent_sequences
from teamtr_lora.team.protocol import TeamProtocol, Transcript, check_prefix_stability
from teamtr_lora.team.router import Router, build_router
from teamtr_lora.team.team import Agent, Team, build_team, most_messages

__all__ = [
    "Agent",
    "ChatPieces",
    "Episode",
    "Message",
    "Router",
    "SequenceSpan",
    "Team",
    "TeamProtocol",
    "TokenSequence",
    "Transcript",
    "agent_sequences",
    "build_router",
    "build_team",
    "check_prefix_stability",
    "most_messages",
]
