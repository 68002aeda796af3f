"""What an agent said, from the rows of a file: a response, or a conversation as chat APIs record it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.forms import content_text, shown

AGENT_ROLES = ("assistant", "agent", "model")
OTHER_ROLES = ("system", "developer", "user", "human", "customer", "tool", "function", "environment")


def said_turns(row: Mapping[str, Any], where: str) -> list[str]:
    """The agent's turns in order. `where` names the row in an error."""
    given = row.get("response")
    if isinstance(given, str):
        return [given]
    if given is None and "messages" not in row:
        null = 'response is null; write "" for a response without text' if "response" in row else None
        raise UserError(f"{where}: {null or 'has neither response (text) nor messages (a list of the turns of the agent)'}")
    messages = row.get("messages") if given is None else given if isinstance(given, list) else [given]
    if not isinstance(messages, list):
        raise UserError(f"{where}: messages = {shown(messages)} is no list of the agent's turns")
    turns = [_turn(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]
    return [text for text in turns if text is not None]


def _turn(message: Any, where: str) -> str | None:
    """The text of a turn. None for other speakers: the task regenerates their text."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: {shown(message)} is neither text nor {{role, content}}")
    role = message.get("role", "assistant")
    if role in OTHER_ROLES:
        return None
    if role not in AGENT_ROLES:
        raise UserError(f"{where}: role = {shown(role)} is unknown; the agent's turns are of the role assistant")
    content, calls = message.get("content"), _calls(message)
    text = content_text(content)
    if text is None and content is not None:
        raise UserError(f"{where}: content = {shown(content)} is neither text nor a list of text parts")
    if calls is None and "content" not in message:
        raise UserError(f"{where}: has neither content nor tool_calls")
    return "\n".join(part for part in (text, calls) if part)


def _calls(message: Mapping[str, Any]) -> str | None:
    """The tool calls of a turn in an API's format, as JSON text; None if it has none."""
    if message.get("tool_calls"):
        return json.dumps({"tool_calls": message["tool_calls"]})
    if message.get("function_call"):  # before there were tool_calls
        return json.dumps({"function": message["function_call"]})
    return json.dumps(dict(message)) if "arguments" in message else None
