"""The team as plain data and pure functions: agents, how their shared context becomes tokens, who speaks next.

Modules:
    team             the team: ordered agents, a protocol and a router, built from settings
    router           who speaks next, and whose message is the answer
    protocol         how the shared context becomes tokens
    chat             a chat template taken apart
    template_limits  what a template renders, within bounds of time and memory
    template_trial   the process in which it renders
    tool_calls       tool calls found in a message, written in one form
    episode          what an episode is made of
"""

from teamtr_lora.team.chat import ChatPieces
from teamtr_lora.team.episode import Episode, Message, SequenceSpan, TokenSequence, agent_sequences
from teamtr_lora.team.protocol import TeamProtocol, Transcript, check_prefix_stability
from teamtr_lora.team.router import Router, build_router
from teamtr_lora.team.team import Team, build_team, most_messages
