"""A chat template taken apart once, so that a growing transcript can be built by appending tokens.

Templates render whole conversations and some rewrite earlier turns when a later one arrives (Qwen3 drops earlier reasoning
blocks). An agent's view must be append-only, so only the pieces between contents are taken from the template:

    prologue(system, user) · agent_open · <sampled tokens> · agent_close · user_open · <text> · user_close · agent_open ...

Contents come from datasets, environments and recipes and may spell a special token ("<|im_end|>"). Only the template may open
and close turns, so `as_text` cuts such a spelling in two and `encode` reads the halves apart, as the characters they are.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Sequence
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.template_limits import MOST_CHARACTERS, RENDER_SECONDS, TooLongError, check_template, limited

logger = logging.getLogger(__name__)

MARK = "\u2063mark\u2063"  # invisible separators: no template or tokenizer treats them specially
SECOND_MARK = "\u2063second\u2063"
RARE = "\U0010fffd"  # in no vocabulary, so that it is encoded as bytes or as the unknown token
CUT = "\udcff"  # half of a surrogate pair, which no text for a tokenizer can contain

CACHED_TEXTS = 4096
FIXED_DAY = datetime.date(2024, 7, 26)


class ChatPieces:
    """The constant text between the contents of a conversation, read off the tokenizer's own chat template."""

    def __init__(self, tokenizer: Any, *, reasoning: bool, system_turn: bool = True, also_ends: Sequence[int] = ()) -> None:
        """`also_ends`: further ids that end a message, such as those of a base's generation config. Without `system_turn` the
        template gets no system turn, and may write one of its own."""
        self._tokenizer, self._reasoning = tokenizer, reasoning
        _check_templates(tokenizer)
        self._encoded: dict[str, list[int]] = {}
        self._special = self._special_ids()
        self._decoded: tuple[tuple[bool, tuple[int, ...]] | None, str] = (None, "")
        self._turn_ids: set[int] = set()  # what contents must not contain; known once the template is taken apart
        self._system_role = system_turn and self._accepts_system()
        if system_turn and not self._system_role:
            logger.warning("this base's chat template takes no system role: the system text opens the first user turn instead")
        user = [{"role": "user", "content": MARK}]
        opened = self._render(user, generation_prompt=True)
        closed = self._render(user, generation_prompt=False)
        if not opened.startswith(closed) or MARK not in closed:
            self._refuse("its generation prompt is not a suffix of the conversation")
        self.agent_open = opened[len(closed) :]
        answered = self._render([*user, {"role": "assistant", "content": SECOND_MARK}], generation_prompt=False)
        _, found, self.agent_close = answered.partition(SECOND_MARK)
        if not found or not answered.startswith(closed):
            self._refuse("an answered question does not begin with the question")
        asked_again = self._render(
            [*user, {"role": "assistant", "content": "ok"}, {"role": "user", "content": SECOND_MARK}], generation_prompt=False
        )
        before, _, self.user_close = asked_again.partition(SECOND_MARK)
        _, found, self.user_open = before.partition("ok" + self.agent_close)
        if not found:
            self._refuse("a user turn after an answer changes the answer")
        self.end_ids = list(dict.fromkeys([*self._end_ids(), *also_ends]))
        self._turn_ids = self._structural_ids(self.prologue("s", "u") + asked_again)

    def prologue(self, system: str, user: str) -> str:
        """The conversation up to and including the closed first user turn, for `encode`."""
        if self._system_role:
            turns = [{"role": "system", "content": self.as_text(system)}, {"role": "user", "content": self.as_text(user)}]
        else:  # the template takes no system role, or is to get none: the system text opens the first user turn instead
            turns = [{"role": "user", "content": self.as_text(f"{system}\n\n{user}" if system else user)}]
        return self._render(turns, generation_prompt=False)

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
            parts = [self._tokenizer.encode(part, add_special_tokens=False) for part in text.split(CUT) if part]
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

    def _special_ids(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return set(self._tokenizer.all_special_ids) | {token for token, added in added.items() if added.special}

    def _structural_ids(self, conversation: str) -> set[int]:
        """Special tokens, and added ones that the template writes around contents (DeepSeek's <｜User｜> is not flagged special).

        Not among them: <think>, where it is an ordinary added token, and an unknown token that ordinary text can come out as.
        """
        written = set(self.encode(conversation)) & set(getattr(self._tokenizer, "added_tokens_decoder", {}))
        unknown = {self._tokenizer.unk_token_id} & set(self.encode(RARE))
        return (self._special | written | set(self.end_ids)) - unknown

    def _accepts_system(self) -> bool:
        turns = [{"role": "system", "content": MARK}, {"role": "user", "content": "q"}]
        try:
            return MARK in self._render(turns, generation_prompt=False)
        except UserError:
            return False

    def _render(self, turns: list[dict[str, str]], *, generation_prompt: bool) -> str:
        try:
            with limited():
                text = self._tokenizer.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    enable_thinking=self._reasoning,
                    # some templates print the date: a run must not depend on the day it is resumed
                    date_string=FIXED_DAY.strftime("%d %b %Y"),
                    strftime_now=FIXED_DAY.strftime,
                )
        except TooLongError as error:
            raise UserError(f"base.source: the tokenizer's chat template was not finished after {RENDER_SECONDS:g} s") from error
        except Exception as error:  # template errors are jinja2's or ValueError: all mean "this template cannot do it"
            raise UserError(f"base.source: the tokenizer's chat template failed: {error}") from error
        if len(text) > MOST_CHARACTERS + sum(len(turn["content"]) for turn in turns):
            raise UserError(f"base.source: the tokenizer's chat template makes {len(text):,} characters of a short conversation")
        return str(text)

    def _refuse(self, why: str) -> None:
        raise UserError(
            f"team.protocol: this base's chat template cannot carry an append-only transcript: {why}; use a base with a "
            "ChatML-like template"
        )


def _check_templates(tokenizer: Any) -> None:
    """A tokenizer has one template, or several by name; whichever is rendered must come to an end."""
    found = getattr(tokenizer, "chat_template", None)
    names = {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items() if isinstance(token, str)}
    for template in found.values() if isinstance(found, dict) else [found]:
        if isinstance(template, str):
            check_template(template, tuple(sorted(names.items())))
