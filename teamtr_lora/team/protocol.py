"""How the shared context becomes tokens (app:pnp-protocol): append-only views, sampled tokens never re-tokenised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.chat import ChatPieces
from teamtr_lora.team.tool_calls import canonical_text

REASONING_OPEN, REASONING_CLOSE = "<think>", "</think>"


def without_reasoning(text: str) -> str:
    """A text from outside the protocol (another model's reply, a recorded message) without its reasoning blocks."""
    blocks = _reasoning_blocks(text, text.find(REASONING_OPEN))
    begins, ends = [0, *(stop for _, stop in blocks)], [*(start for start, _ in blocks), len(text)]
    return "".join(text[begin:end] for begin, end in zip(begins, ends, strict=True))


def _reasoning_blocks(text: str, start: int) -> list[tuple[int, int]]:
    """Where each <think>...</think> begins and ends, the first at `start` (-1: there is none); an unclosed one has no end."""
    blocks = []
    while start >= 0:
        close = text.find(REASONING_CLOSE, start)
        stop = len(text) if close < 0 else close + len(REASONING_CLOSE)
        blocks.append((start, stop))
        start = text.find(REASONING_OPEN, stop)
    return blocks


class TeamProtocol:
    """Renders transcripts for a team on one tokenizer.

    `shared`: all agents see one token-identical transcript; the turn header names the speaker. `per_agent`: each agent has its
    own system prompt, its own messages are assistant turns, and what the others said since arrives as one user turn.

    With `round_messages` above 1 (blind rounds; per_agent only) a message is heard by the others when that many have been said:
    in one round nobody sees the others' words of that round.
    """

    def __init__(
        self,
        tokenizer: Any,
        roles: dict[str, str],
        *,
        view: Literal["shared", "per_agent"] = "shared",
        reasoning_tags: Literal["strip", "keep"] = "strip",
        tool_calls: Literal["canonical", "as_written"] = "canonical",
        system: str | None = "",
        also_ends: Sequence[int] = (),
        round_messages: int = 1,
    ) -> None:
        self.roles, self.view, self.system, self.round_messages = roles, view, system or "", round_messages
        self.keep_reasoning = reasoning_tags == "keep"
        self.canonical_calls = tool_calls == "canonical"
        self.chat = ChatPieces(tokenizer, reasoning=self.keep_reasoning, system_turn=system is not None, also_ends=also_ends)
        self.end_ids = self.chat.end_ids
        self.close_ids = self.chat.encode(self.chat.agent_close)
        opened = self.chat.agent_open
        # Some templates open the reasoning block themselves, so that a message begins inside it.
        self._opens_thinking = opened.rfind(REASONING_OPEN) > opened.rfind(REASONING_CLOSE)

    def begin(self, prompt: str) -> Transcript:
        return _SharedTranscript(self, prompt) if self.view == "shared" else _PerAgentTranscript(self, prompt)

    def system_for(self, agent: str) -> str:
        if self.view == "per_agent":
            lines = [self.system, f"You are {agent}: {self.roles[agent]}" if self.roles[agent] else f"You are {agent}."]
        else:
            lines = [self.system, *(f"{name}: {role}" for name, role in self.roles.items() if role)]
        return "\n".join(line for line in lines if line)

    def turn(self, token_ids: list[int], visible: list[int]) -> list[int]:
        """A finished turn after its opening: the visible tokens, then those of the closing that were not sampled themselves."""
        end = token_ids[-1:] if token_ids and token_ids[-1] in self.end_ids else []
        rest = self.close_ids[self.close_ids.index(end[0]) + 1 :] if end and end[0] in self.close_ids else self.close_ids
        return visible + end + rest

    def visible(self, token_ids: list[int]) -> list[int]:
        """The tokens of a message that are read from then on: all but the end token; with `strip`, without reasoning blocks; with
        `canonical`, encoded anew where a tool call is written in another form than the canonical one."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self.end_ids else token_ids
        if not self.keep_reasoning and (self._opens_thinking or REASONING_OPEN in self.raw_text(ids)):
            ids = _cut_reasoning(ids, self.raw_text, inside=self._opens_thinking)
        return self._with_canonical_calls(ids) if self.canonical_calls else ids

    def _with_canonical_calls(self, ids: list[int]) -> list[int]:
        said = self.chat.decode(ids)
        written = canonical_text(said)
        return ids if written == said else self.chat.encode(self.chat.as_text(written))

    def raw_text(self, ids: list[int]) -> str:
        """The text of these tokens, special ones included: several tokenizers make <think> one of those."""
        return self.chat.decode(ids, skip_special=False)


def _cut_reasoning(ids: list[int], decode: Callable[[list[int]], str], *, inside: bool) -> list[int]:
    """Drops every token that touches a <think>...</think> block; an unclosed block runs to the end of the message.

    Tokens are decoded one by one: the tags are ASCII, so they read the same, and a long message costs linear time.
    """
    pieces = [decode([token]) for token in ids]
    ends = list(accumulate(map(len, pieces)))
    text = "".join(pieces)
    cut = _reasoning_blocks(text, 0 if inside else text.find(REASONING_OPEN))
    starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    return [
        token
        for token, begin, end in zip(ids, starts, ends, strict=True)
        if not any(begin < stop and end > start for start, stop in cut)
    ]


class _SharedTranscript:
    """All agents read one transcript. `add_message` appends what an agent sampled after `prompt_for(agent)` and returns the text
    that everybody else reads."""

    def __init__(self, protocol: TeamProtocol, prompt: str) -> None:
        self._protocol = protocol
        self._ids = protocol.chat.encode(protocol.chat.prologue(protocol.system_for(""), prompt))

    def prompt_for(self, agent: str) -> list[int]:
        chat = self._protocol.chat
        return self._ids + chat.encode(chat.agent_open + f"{agent}:\n")

    def add_message(self, agent: str, token_ids: list[int]) -> str:
        visible = self._protocol.visible(token_ids)
        self._ids = self.prompt_for(agent) + self._protocol.turn(token_ids, visible)
        return self._protocol.chat.decode(visible)

    def add_feedback(self, text: str) -> None:
        chat = self._protocol.chat
        self._ids = self._ids + chat.encode(chat.user_open + chat.as_text(text) + chat.user_close)


class _PerAgentTranscript:
    """Each agent has a view of its own, which grows only when it speaks. What the others say until then waits, and becomes one
    user turn."""

    def __init__(self, protocol: TeamProtocol, prompt: str) -> None:
        self._protocol, chat = protocol, protocol.chat
        self._views: dict[str, list[int]] = {}
        self._heard: dict[str, list[list[int]]] = {agent: [] for agent in protocol.roles}
        # What was said in the round in progress, each with its speaker ("" for feedback).
        self._unheard: list[tuple[str, list[int]]] = []
        self._said = 0
        self._spoken: set[str] = set()
        for agent in protocol.roles:
            opening = chat.prologue(protocol.system_for(agent), prompt)
            if not opening.endswith(chat.user_close):
                raise UserError("team.protocol.view = 'per_agent': the chat template closes the first user turn differently")
            self._views[agent] = chat.encode(opening[: len(opening) - len(chat.user_close)])

    def prompt_for(self, agent: str) -> list[int]:
        chat = self._protocol.chat
        pieces, separator = self._heard[agent], chat.encode("\n\n")
        ids = list(self._views[agent])
        if agent in self._spoken and pieces:
            ids += chat.encode(chat.user_open) + pieces[0]
            pieces = pieces[1:]
        for piece in pieces:
            ids += separator + piece
        if agent not in self._spoken or self._heard[agent]:
            ids += chat.encode(chat.user_close)
        return ids + chat.encode(chat.agent_open)

    def add_message(self, agent: str, token_ids: list[int]) -> str:
        protocol, chat = self._protocol, self._protocol.chat
        visible = protocol.visible(token_ids)
        self._views[agent] = self.prompt_for(agent) + protocol.turn(token_ids, visible)
        self._heard[agent] = []
        self._spoken.add(agent)
        self._said += 1
        self._tell(agent, chat.encode(f"{agent}:\n") + visible)
        return chat.decode(visible)

    def add_feedback(self, text: str) -> None:
        chat = self._protocol.chat
        self._tell("", chat.encode(chat.as_text(text)))

    def _tell(self, speaker: str, piece: list[int]) -> None:
        """Everybody but the speaker hears it, once the round is over."""
        self._unheard.append((speaker, piece))
        if self._said % self._protocol.round_messages:
            return
        for said_by, words in self._unheard:
            for agent, heard in self._heard.items():
                if agent != said_by:
                    heard.append(words)
        self._unheard = []


Transcript = _SharedTranscript | _PerAgentTranscript
"""One episode's context while it is played."""


def check_prefix_stability(protocol: TeamProtocol, *, rounds: int = 2) -> None:
    """Refuses a protocol under which a longer transcript does not keep the shorter one as its prefix.

    Checked twice with the real tokenizer: on the token views that are sampled from, and on the rendered text, whose encoding
    must not move either (a turn that ends without a special token may merge with what follows it).
    """
    chat = protocol.chat
    transcript = protocol.begin("What is 12 plus 30?")
    seen: dict[str, list[int]] = {}
    rendered: dict[str, list[int]] = {}
    for turn in range(rounds * len(protocol.roles)):
        agent = list(protocol.roles)[turn % len(protocol.roles)]
        prompt = transcript.prompt_for(agent)
        text_ids = chat.encode(protocol.raw_text(prompt))
        view = agent if protocol.view == "per_agent" else ""
        if prompt[: len(seen.get(view, []))] != seen.get(view, []):
            _unstable(agent, "a later view rewrites an earlier one")
        if text_ids[: len(rendered.get(view, []))] != rendered.get(view, []):
            _unstable(agent, "encoding a longer transcript changes the tokens of the shorter one")
        message = chat.encode(f"I say {turn} and pass on") + protocol.end_ids[:1]
        seen[view] = prompt + message
        rendered[view] = text_ids
        transcript.add_message(agent, message)


def _unstable(agent: str, why: str) -> None:
    raise UserError(
        f"team.protocol: the transcript is not prefix-stable for {agent!r}: {why}; use a base whose chat template ends turns "
        "with a special token"
    )
