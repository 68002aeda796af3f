"""From episodes to batches: one agent's messages as rows of tokens, each knowing which token belongs to which message.

Shape suffixes: B row, T token of a row, M message, N message token (flat).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.team import Episode, Message, TokenSequence
from teamtr_lora.training.row_layout import (
    ATTENTION_COSTS,
    Numbered,
    Row,
    RowTensors,
    Starts,
    end_to_end,
    fill,
    fill_end_to_end,
    grouped,
    integers,
    pack,
    padded,
)


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Rows, and where their messages' tokens are predicted."""

    rows: RowTensors
    place_N: Tensor  # flat index into B*T of the position whose logits predict the token
    target_N: Tensor
    message_N: Tensor  # index of the token's message in the MessageBatch
    sampler_logp_N: Tensor


@dataclass(frozen=True, kw_only=True)
class MessageBatch:
    """One agent's messages of some episodes, ready to score."""

    messages: list[Message]
    group_M: Tensor
    advantage_M: Tensor
    weight_M: Tensor  # how much a message counts in means over messages; advantages to learn from have their weights in them
    episode_M: Tensor  # position of the message's episode in the list that the sequences were made from
    microbatches: list[Microbatch]

    @property
    def tokens(self) -> int:
        return sum(len(m.token_ids) for m in self.messages)

    def among(self, places: Collection[int]) -> MessageBatch:
        """Only the micro-batches at these places, with their messages."""
        parts = [self.microbatches[place] for place in places]
        chosen_M = torch.cat([part.message_N for part in parts]).unique()
        at = chosen_M.cpu()
        return MessageBatch(
            messages=[self.messages[number] for number in at.tolist()],
            group_M=self.group_M[at],
            advantage_M=self.advantage_M[at],
            weight_M=self.weight_M[at],
            episode_M=self.episode_M[at],
            microbatches=[replace(part, message_N=torch.searchsorted(chosen_M, part.message_N)) for part in parts],
        )


def first_of_groups(episodes: list[Episode], groups: set[int], most: int) -> set[int]:
    """The positions of the first `most` episodes of each of the groups: those of one group are alike before they are played."""
    members: dict[int, list[int]] = {group: [] for group in groups}
    for position, episode in enumerate(episodes):
        if episode.group in groups:
            members[episode.group].append(position)
    return {position for positions in members.values() for position in positions[:most]}


def judging_weights(episodes: list[Episode], newest: list[Episode], judge: set[int], mixed: set[int]) -> np.ndarray:
    """How much each of the `episodes`, of which the `newest` are first, counts where it judges.

    Groups that do not differ in return are held out more often than the `mixed` ones, because they have no gradient. With these
    weights the judging episodes give means over all items again: an item's kind is known before anything is fitted.
    """
    of_mixed = {episode.item_id for episode in newest if episode.group in mixed}
    mixed_E = np.array([episode.item_id in of_mixed for episode in newest])
    held_E = np.array([episode.group in judge for episode in newest])
    weight_E = np.ones(len(episodes))
    for kind_E in (mixed_E, ~mixed_E):
        if (held_E & kind_E).any():
            weight_E[: len(newest)][held_E & kind_E] = kind_E.mean() / kind_E[held_E].mean()
    return weight_E


def message_batch(
    sequences: Sequence[TokenSequence],
    advantage_E: Sequence[float] | None,
    *,
    weight_E: Sequence[float] | None = None,
    tokens_per_microbatch: int,
    device: torch.device,
    mask_truncated: bool = False,
    pack_width: int | None = None,
    segments: bool = False,
) -> MessageBatch:
    """`advantage_E`: by the episode's position; None for messages that are read and not learned from. `weight_E`: how much its
    messages count, likewise; None: all the same. With `pack_width`, the hidden size, the sequences of a group share a row where
    that saves work. With `segments` everything lies end to end in one row, for `base.segment_attention`."""
    numbered: list[Numbered] = []
    owners: list[TokenSequence] = []  # one a message
    messages: list[Message] = []
    for sequence in sequences:
        spans = [s for s in sequence.spans if not (mask_truncated and s.message.truncated)]
        if spans:
            kept = TokenSequence(sequence.ids[: spans[-1].end], spans, sequence.episode, sequence.position)
            numbered.append(Numbered(kept, len(messages)))
            messages += [s.message for s in spans]
            owners += [kept] * len(spans)
    if segments:
        laid = [(part, end_to_end(part)) for part in fill_end_to_end(grouped(numbered), tokens_per_microbatch)]
    else:
        rows = [Row([sequence]) for sequence in numbered]
        if pack_width is not None:
            rows = pack(numbered, longest=tokens_per_microbatch, hidden_size=pack_width, cost=ATTENTION_COSTS[device.type])
        laid = [(part, padded(part)) for part in fill(rows, tokens_per_microbatch, apart=device.type == "cuda")]
    advantages = [0.0 if advantage_E is None else float(advantage_E[s.position]) for s in owners]
    return MessageBatch(
        messages=messages,
        group_M=torch.tensor([s.episode.group for s in owners], dtype=torch.long),
        advantage_M=torch.tensor(advantages, dtype=torch.float32),
        weight_M=torch.tensor([1.0 if weight_E is None else float(weight_E[s.position]) for s in owners]),
        episode_M=torch.tensor([s.position for s in owners], dtype=torch.long),
        microbatches=[_microbatch(part, *layout, device) for part, layout in laid],
    )


def _microbatch(part: list[Row], tensors: RowTensors, starts: Starts, device: torch.device) -> Microbatch:
    place: list[np.ndarray] = []
    target: list[int] = []
    number: list[int] = []
    length: list[int] = []
    sampler_logp: list[float] = []
    for row, row_starts in zip(part, starts, strict=True):
        for member, (opening, rest) in zip(row.members, row_starts, strict=True):
            for message_number, span in enumerate(member.sequence.spans, member.first_message):
                before = np.arange(span.start - 1, span.end - 1)  # where each token is predicted
                place.append(np.where(before < row.prefix, opening + before, rest + before - row.prefix))
                target += member.ids[span.start : span.end]
                number.append(message_number)
                length.append(span.end - span.start)
                sampler_logp += span.message.sampler_logprobs
    return Microbatch(
        rows=tensors.to(device),
        place_N=torch.from_numpy(np.concatenate(place)).to(device),
        target_N=integers(target).to(device),
        message_N=torch.from_numpy(np.repeat(number, length)).to(device),
        sampler_logp_N=torch.from_numpy(np.array(sampler_logp, dtype=np.float32)).to(device),
    )
