"""A chat template taken apart once, so that a growing transcript can be built by appending tokens.

Templates render whole conversations and some rewrite earlier turns when a later one arrives (Qwen3 drops earlier reasoning
blocks). An agent's view must be append-only, so only the pieces between contents are taken from the template:

    prologue(system, user) · agent_open · <sampled tokens> · agent_close · user_open · <text> · user_close · agent_open ...

Contents come from datasets, environments and recipes and may spell a special token ("<|im_end|>"). Only the template may open
and close turns, so `as_text` cuts such a spelling in two and `encode` reads the halves apart, as the characters they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from string import Template
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.template_limits import Conversation, rendered

logger = logging.getLogger(__name__)

MARK = "\u2063mark\u2063"  # invisible separators: no template or tokenizer treats them specially
SECOND_MARK = "\u2063second\u2063"
RARE = "\U0010fffd"  # in no vocabulary, so that it is encoded as bytes or as the unknown token
CUT = "\udcff"  # half of a surrogate pair, which no text for a tokenizer can contain

CACHED_TEXTS = 4096
_MARKS = re.compile(f"({MARK}|{SECOND_MARK})")
_USER = ("user", MARK)
_PADDED = f" \n{MARK}\n "
# What a template is asked for: turns, and whether it opens the answer.
_ASKED: dict[str, Conversation] = {
    "opened": ((_USER,), True),
    "closed": ((_USER,), False),
    "answered": ((_USER, ("assistant", SECOND_MARK)), False),
    "asked again": ((_USER, ("assistant", "ok"), ("user", SECOND_MARK)), False),
    "with a system turn": ((("system", MARK), ("user", SECOND_MARK)), False),
    "with an empty one": ((("system", ""), ("user", SECOND_MARK)), False),
    "padded system": ((("system", _PADDED), ("user", SECOND_MARK)), False),
    "padded": ((("user", _PADDED),), False),
}

# A chat template whose pieces are those of another one. Where that one takes no system turn, its text opens the first user turn.
_SYSTEM_TURN = "{{ $open_system + m.content$trim_system }}"
_SYSTEM_LATER = "{%- set system.text = m.content + '\\n\\n' -%}"
_PLAIN = """{%- set system = namespace(text='') -%}
{%- for m in messages -%}
  {%- if m.role == 'system' and loop.first -%}{{ $open_system + m.content$trim_system }}
  {%- elif m.role == 'user' -%}
    {%- if loop.first -%}{{ $open_first + m.content$trim_user + $close_first }}
    {%- elif loop.index0 == 1 and messages[0].role == 'system' -%}
      {{ $after_system + (system.text + m.content)$trim_user + $close_second }}
    {%- else -%}{{ $open_user + m.content$trim_user + $close_user }}
    {%- endif -%}
  {%- elif m.role == 'assistant' -%}{{ $open_agent + m.content + $close_agent }}
  {%- else -%}{{ raise_exception('a system turn may come first, then user and assistant') }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ $open_agent }}{%- endif -%}"""


class ChatPieces:
    """The constant text between the contents of a conversation, read off the tokenizer's own chat template."""

    def __init__(self, tokenizer: Any, *, reasoning: bool, system_turn: bool = True, also_ends: Sequence[int] = ()) -> None:
        """`also_ends`: further ids that end a message, such as those of a base's generation config. Without `system_turn` the
        template gets no system turn, and may write one of its own."""
        self._tokenizer = tokenizer
        self._rendered = _rendered(tokenizer, reasoning)
        self._encoded: dict[str, list[int]] = {}
        self._added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = set(tokenizer.all_special_ids) | {token for token, added in self._added.items() if added.special}
        self._decoded: tuple[tuple[bool, tuple[int, ...]] | None, str] = (None, "")
        self._turn_ids: set[int] = set()  # what contents must not contain; known once the template is taken apart
        self._system_role = system_turn and self._accepts_system()
        if system_turn and not self._system_role:
            logger.warning("this base's chat template takes no system role: the system text opens the first user turn instead")
        opened, closed = self._text("opened"), self._text("closed")
        if not opened.startswith(closed):
            self._refuse("its generation prompt is not a suffix of the conversation")
        self.agent_open = opened[len(closed) :]
        answered, asked_again = self._text("answered"), self._text("asked again")
        _, found, self.agent_close = answered.partition(SECOND_MARK)
        if not found or not answered.startswith(closed):
            self._refuse("an answered question does not begin with the question")
        before, _, self.user_close = asked_again.partition(SECOND_MARK)
        _, found, self.user_open = before.partition("ok" + self.agent_close)
        if not found:
            self._refuse("a user turn after an answer changes the answer")
        if closed.count(MARK) != 1 or _MARKS.search(self.agent_open + self.agent_close + self.user_open + self.user_close):
            self._refuse("it does not write every content as it is, and once")
        self.end_ids = list(dict.fromkeys([*self._end_ids(), *also_ends]))
        self._turn_ids = self._structural_ids(self.prologue("s", "u") + asked_again)

    def prologue(self, system: str, user: str) -> str:
        """The conversation up to and including the closed first user turn, for `encode`."""
        if self._system_role:
            texts = {MARK: self._shaped("padded system", system), SECOND_MARK: self._shaped("padded", user)}
            frame = self._text("with a system turn" if system else "with an empty one")
        else:  # the template takes no system role, or is to get none: the system text opens the first user turn instead
            texts = {MARK: self._shaped("padded", f"{system}\n\n{user}" if system else user)}
            frame = self._text("closed")
        return "".join(texts.get(part, part) for part in _MARKS.split(frame))

    def plain_template(self) -> str:
        """A chat template of ours that writes the same pieces. It loops over the messages and does nothing else, so a server can
        render what strangers ask by it, where the base's own could do whatever a program can."""
        open_first, close_first = self._text("closed").split(MARK)
        pieces = {"open_system": "", "after_system": open_first, "close_second": close_first}
        if self._system_role:
            texts = _MARKS.split(self._text("with a system turn"))
            pieces = dict(zip(("open_system", "after_system", "close_second"), texts[::2], strict=True))
        pieces |= {"open_first": open_first, "close_first": close_first, "open_user": self.user_open}
        pieces |= {"close_user": self.user_close, "open_agent": self.agent_open, "close_agent": self.agent_close}
        kind = _PLAIN if self._system_role else _PLAIN.replace(_SYSTEM_TURN, _SYSTEM_LATER)
        trims = {"trim_user": "".join(self._trims("padded"))}
        trims["trim_system"] = "".join(self._trims("padded system")) if self._system_role else ""
        return Template(kind).substitute({name: _literal(text) for name, text in pieces.items()} | trims)

    def _trims(self, padded: str) -> tuple[str, str]:
        """What the template does to the white space at the two ends of a content, in Jinja's words: many take it off."""
        text, (before, after) = self._text(padded), _PADDED.split(MARK)
        return "" if before + MARK in text else ".lstrip()", "" if MARK + after in text else ".rstrip()"

    def _shaped(self, padded: str, content: str) -> str:
        """The content as the template would write it."""
        left, right = self._trims(padded)
        content = self.as_text(content)
        content = content.lstrip() if left else content
        return content.rstrip() if right else content

    def as_text(self, content: str) -> str:
        """The content as `encode` must get it: unchanged, but what would be read as a token of the template is cut in two.

        First the known spellings of those tokens are cut. Where the tokenizer's normaliser makes such a token out of another
        spelling, the text is cut between all its characters.
        """
        content = content.encode("utf-8", "replace").decode()  # tokenizers refuse half of a surrogate pair
        if not self._forges(content):
            return content
        spellings = "|".join(re.escape(t) for t in self._tokenizer.convert_ids_to_tokens(sorted(self._turn_ids)) if t)
        for cut in (re.sub(f"(?s)(?={spellings})(.)", rf"\1{CUT}", content), CUT.join(content)):
            if not self._forges(cut):
                return cut
        raise UserError(
            f"team.protocol: this base's tokenizer reads a special token into the text {content[:60]!r} however it is cut; "
            "take it out of the prompt, feedback or system text"
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of the text. They are cached, since every episode of a group has the same openings and prompts."""
        if text not in self._encoded:
            if len(self._encoded) >= CACHED_TEXTS:
                self._encoded.clear()
            # verbose: it would warn of a text longer than the base's context, which the protocol tells in words of its own
            parts = [self._tokenizer.encode(part, add_special_tokens=False, verbose=False) for part in text.split(CUT) if part]
            self._encoded[text] = [token for part in parts for token in part]
        return list(self._encoded[text])

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of token ids. The last result is kept, since every message is decoded several times in a row."""
        what = (skip_special and not self._special.isdisjoint(ids), tuple(ids))
        if self._decoded[0] != what:
            self._decoded = (what, str(self._tokenizer.decode(ids, skip_special_tokens=what[0])))
        return self._decoded[1]

    def _end_ids(self) -> list[int]:
        """Tokens that end a message: the one that closes a turn, then the tokenizer's own end of sequence."""
        close = self.encode(self.agent_close)
        if not close:
            self._refuse("a turn ends with nothing, so no token says that a message is over")
        eos = self._tokenizer.eos_token_id
        if close and close[0] in self._special:
            return list(dict.fromkeys([close[0], *([eos] if eos is not None else [])]))
        if eos is None:
            self._refuse("a turn ends without a special token and the tokenizer has no end-of-sequence token")
        return [int(eos)]

    def _forges(self, content: str) -> bool:
        return not self._turn_ids.isdisjoint(self.encode(content))

    def _structural_ids(self, conversation: str) -> set[int]:
        """Special tokens, and added ones that the template writes around contents (DeepSeek's <｜User｜> is not flagged special).

        Not among them: <think>, where it is an ordinary added token, and an unknown token that ordinary text can come out as.
        """
        written = set(self.encode(conversation)) & set(self._added)
        unknown = {self._tokenizer.unk_token_id} & set(self.encode(RARE))
        return (self._special | written | set(self.end_ids)) - unknown

    def _accepts_system(self) -> bool:
        texts = [self._rendered[name][0] or "" for name in ("with a system turn", "padded system")]
        return all(_MARKS.findall(text) == [MARK, SECOND_MARK] for text in texts)

    def _text(self, name: str) -> str:
        text, why = self._rendered[name]
        if text is None:
            raise UserError(f"base.source: the tokenizer's chat template failed: {why}")
        return text

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"team.protocol: this base's chat template cannot carry an append-only transcript: {why}; use a base with a "
            "ChatML-like template"
        )


def _literal(text: str) -> str:
    """The text as a string of a Jinja template."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', "\\x22") + '"'


def _rendered(tokenizer: Any, reasoning: bool) -> dict[str, tuple[str | None, str]]:
    """What the template makes of each conversation of _ASKED."""
    try:
        template = str(tokenizer.get_chat_template())  # of several by name, the default one
    except Exception as error:  # transformers' own, about a tokenizer that has none
        raise UserError(f"base.source: the tokenizer's chat template failed: {error}") from error
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    given = tuple(sorted({**names, "enable_thinking": reasoning}.items()))
    return dict(zip(_ASKED, rendered(template, given, tuple(_ASKED.values())), strict=True))
