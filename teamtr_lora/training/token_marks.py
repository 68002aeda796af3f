"""What transcripts show of single tokens: their probability when they were written, and what the accepted update made of it.

Nothing is computed for it. The sampler has reported the first with every token, and the gate has measured the second for the
messages that judged the update: what is left is to cut them into messages and to write them down, for a sample of the episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedTokenizerBase

from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.runs.transcripts import EpisodeMarks, TokenMarks
from teamtr_lora.team import Episode
from teamtr_lora.training.update import UpdateOutcome

TOKENS = 4096  # of an update at most; whole episodes, those that judged the update first


def episode_marks(
    episodes: Sequence[Episode], outcome: UpdateOutcome, tokenizer: PreTrainedTokenizerBase, *, reduction: str
) -> list[EpisodeMarks]:
    """One for each episode; `reduction` is the recipe's."""
    changes = _changes(outcome, reduction)
    judging = outcome.judging.groups if outcome.judging else set()
    cached = lru_cache(maxsize=None)(lambda ids: str(tokenizer.decode(list(ids))))
    left, sample = TOKENS, {}
    for place in sorted(range(len(episodes)), key=lambda place: episodes[place].group not in judging):
        left -= episodes[place].tokens
        if left < 0:
            break
        sample[place] = {
            turn: TokenMarks(
                pieces=_pieces(cached, message.token_ids),
                logprobs=_rounded(message.sampler_logprobs),
                change=changes.get((place, turn)),
            )
            for turn, message in enumerate(episodes[place].messages)
        }
    advantages = outcome.advantages.clipped_E.tolist()
    return [EpisodeMarks(round(advantages[place], 4), sample.get(place, {})) for place in range(len(episodes))]


def _changes(outcome: UpdateOutcome, reduction: str) -> dict[tuple[int, int], list[float]]:
    """By a message's episode and turn: log new - log old of each token, where the gate has scored it."""
    if outcome.accepted_reading is None or outcome.judging is None:
        return {}
    batch = outcome.judging.batch
    message_N = torch.cat([part.message_N.cpu() for part in batch.microbatches])
    lengths_M = message_N.bincount(minlength=len(batch.messages))
    unit_N = REDUCTIONS[reduction].of_message(1.0, lengths_M[message_N])  # what the gate has made of a token's term
    change_N = (-outcome.accepted_reading.terms_N["k1"] / unit_N)[message_N.argsort(stable=True)]
    places = zip(batch.episode_M.tolist(), (message.turn for message in batch.messages), strict=True)
    by_message = change_N.split(lengths_M.tolist())
    return {place: _rounded(part.tolist()) for place, part in zip(places, by_message, strict=True)}


def _rounded(values: Sequence[float]) -> list[float]:
    """Shades of colour need no more; adding zero makes a negative zero an ordinary one."""
    return [round(value, 3) + 0.0 for value in values]


def _pieces(decode: Callable[[tuple[int, ...]], str], ids: list[int]) -> list[str]:
    """The text that each token adds. A character made of several tokens stands with the last of them."""
    found, before, shown = [], 0, 0  # ids[before:shown] is what the next token is decoded with: spaces depend on it
    for end in range(1, len(ids) + 1):
        context, text = decode(tuple(ids[before:shown])), decode(tuple(ids[before:end]))
        complete = len(text) > len(context) and not text.endswith("\N{REPLACEMENT CHARACTER}")
        found.append(text[len(context) :] if complete or end == len(ids) else "")
        if complete:
            before, shown = shown, end
    return found
