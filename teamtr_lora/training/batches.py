"""From episodes to batches: one agent's messages as padded rows of tokens, each knowing which token belongs to which message.

The episodes of a group open alike, so their common prefix is computed once:

    [ prefix | rest of episode 1 | rest of episode 2 | ... ]

Each rest attends to the prefix and to itself, at the positions that it has in its own sequence, so the hidden states are those
of the separate sequences. For short messages after a long prompt this saves most of the work.

Shape suffixes: B row, T token of a row, M message, N message token (flat).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.team import Episode, Message, TokenSequence

# A packed row attends over a long row with a mask, which costs more per token than plain causal attention: packing has to
# save at least this share of the estimated work.
WORTHWHILE_SAVING = 0.15


class AttentionCost(NamedTuple):
    """How many hidden sizes long a row is when its attention costs as much as its linear layers."""

    causal: float
    masked: float


# On a CPU a mask costs nothing extra. On a GPU it leaves the flash kernels: every pair of tokens is computed, hidden by the mask
# or not, at a fraction of the speed. By these numbers 8 messages of 256 tokens after 128 in common take 1.3 times as long in one
# row as apart, which is what an H200 took.
ATTENTION_COSTS = {"cpu": AttentionCost(12, 12), "cuda": AttentionCost(7, 1.2)}


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Padded rows, and where their messages' tokens are predicted."""

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
) -> MessageBatch:
    """`advantage_E`: by the episode's position; None for messages that are read and not learned from. `weight_E`: how much its
    messages count, likewise; None: all the same. With `pack_width`, the hidden size, the sequences of a group share a row where
    that saves work."""
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
    if pack_width is None:
        rows = [Row([sequence]) for sequence in numbered]
    else:
        rows = pack(numbered, longest=tokens_per_microbatch, hidden_size=pack_width, cost=ATTENTION_COSTS[device.type])
    advantages = [0.0 if advantage_E is None else float(advantage_E[s.position]) for s in owners]
    return MessageBatch(
        messages=messages,
        group_M=torch.tensor([s.episode.group for s in owners], dtype=torch.long),
        advantage_M=torch.tensor(advantages, dtype=torch.float32),
        weight_M=torch.tensor([1.0 if weight_E is None else float(weight_E[s.position]) for s in owners]),
        episode_M=torch.tensor([s.position for s in owners], dtype=torch.long),
        microbatches=[_microbatch(part, device) for part in fill(rows, tokens_per_microbatch, apart=device.type == "cuda")],
    )


def _microbatch(part: list[Row], device: torch.device) -> Microbatch:
    tensors = row_tensors(part)
    width = tensors.ids_B_T.shape[1]
    place: list[int] = []
    target: list[int] = []
    message: list[int] = []
    sampler_logp: list[float] = []
    for index, row in enumerate(part):
        for number, member in enumerate(row.members):
            for message_number, span in enumerate(member.sequence.spans, member.first_message):
                place += [index * width + row.place(number, i - 1) for i in range(span.start, span.end)]
                target += member.ids[span.start : span.end]
                message += [message_number] * (span.end - span.start)
                sampler_logp += span.message.sampler_logprobs
    return Microbatch(
        rows=tensors.to(device),
        place_N=torch.tensor(place, device=device),
        target_N=torch.tensor(target, device=device),
        message_N=torch.tensor(message, device=device),
        sampler_logp_N=torch.tensor(sampler_logp, dtype=torch.float32, device=device),
    )


@dataclass(frozen=True)
class Numbered:
    """A sequence whose messages have the numbers `first_message`, `first_message + 1`, ... in their batch."""

    sequence: TokenSequence
    first_message: int

    @property
    def ids(self) -> list[int]:
        return self.sequence.ids


@dataclass
class Row:
    """One row of a micro-batch: one sequence, or several that share `prefix` tokens."""

    members: list[Numbered]
    prefix: int = 0

    @property
    def length(self) -> int:
        return self.prefix + sum(len(s.ids) - self.prefix for s in self.members)

    def place(self, number: int, index: int) -> int:
        """Where token `index` of member `number` lies in the row."""
        if index < self.prefix:
            return index
        before = sum(len(s.ids) - self.prefix for s in self.members[:number])
        return before + index

    def tokens(self) -> tuple[list[int], list[int], list[int]]:
        """ids, positions, and segments: 0 is the prefix (or a lone sequence), then one number a rest."""
        ids = list(self.members[0].ids[: self.prefix])
        positions, segments = list(range(self.prefix)), [0] * self.prefix
        for number, sequence in enumerate(self.members, 1 if self.prefix else 0):
            rest = sequence.ids[self.prefix :]
            ids += rest
            positions += range(self.prefix, len(sequence.ids))
            segments += [number] * len(rest)
        return ids, positions, segments


def pack(sequences: Sequence[Numbered], *, longest: int, hidden_size: int, cost: AttentionCost) -> list[Row]:
    """Groups that gain by it share a row of at most `longest` tokens; the others stay one sequence a row."""
    groups: dict[int, list[Numbered]] = defaultdict(list)
    for sequence in sequences:
        groups[sequence.sequence.episode.group].append(sequence)
    rows: list[Row] = []
    for members in groups.values():
        alone = [Row([sequence]) for sequence in members]
        together = Row(members, _common_prefix(members))
        apart = sum(_work(row.length, cost.causal * hidden_size) for row in alone)
        saved = 1 - _work(together.length, cost.masked * hidden_size) / apart
        rows += [together] if together.length <= longest and saved >= WORTHWHILE_SAVING else alone
    return rows


def _work(length: int, even: float) -> float:
    """Relative cost of a row: the linear layers, and attention, which grows with the square of the length and costs as much at
    the length `even`."""
    return length * (1 + length / even)


def _common_prefix(members: list[Numbered]) -> int:
    """Tokens that all members begin with, before the first message of any of them."""
    limit = min(s.sequence.spans[0].start for s in members)
    first = members[0].ids[:limit]
    for other in members[1:]:
        limit = next((i for i, (a, b) in enumerate(zip(first, other.ids, strict=False)) if a != b), min(limit, len(first)))
        first = first[:limit]
    return len(first)


def fill(rows: list[Row], budget: int, *, apart: bool = False) -> Iterator[list[Row]]:
    """Rows of similar length whose padded size stays within the token budget; one row at least. `apart`: rows that need a mask
    are not put together with rows that do not, which would have to take it too."""
    part: list[Row] = []
    for row in sorted(rows, key=lambda row: (apart and row.prefix > 0, row.length)):
        if part and ((len(part) + 1) * row.length > budget or (apart and bool(row.prefix) != bool(part[0].prefix))):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


@dataclass(frozen=True)
class RowTensors:
    ids_B_T: Tensor
    position_B_T: Tensor
    segment_B_T: Tensor | None = None  # None: plain causal attention is right

    def mask(self) -> Tensor | None:
        """[B, 1, T, T], made when it is used: one micro-batch's at a time."""
        if self.segment_B_T is None:
            return None
        key, query = self.segment_B_T[:, None, :], self.segment_B_T[:, :, None]
        causal = torch.ones(key.shape[-1], key.shape[-1], dtype=torch.bool, device=key.device).tril()
        return (((key == query) | (key == 0)) & causal)[:, None]

    def to(self, device: torch.device) -> RowTensors:
        segment = None if self.segment_B_T is None else self.segment_B_T.to(device)
        return RowTensors(self.ids_B_T.to(device), self.position_B_T.to(device), segment)


def row_tensors(rows: list[Row]) -> RowTensors:
    """Right-padded. Without a packed row no mask is needed: causal attention never looks at padding on the right."""
    width = max(row.length for row in rows)
    ids_B_T = torch.zeros(len(rows), width, dtype=torch.long)
    position_B_T = torch.arange(width).repeat(len(rows), 1)
    segment_B_T = torch.full((len(rows), width), -1)
    for index, row in enumerate(rows):
        ids, positions, segments = row.tokens()
        ids_B_T[index, : len(ids)] = torch.tensor(ids)
        position_B_T[index, : len(ids)] = torch.tensor(positions)
        segment_B_T[index, : len(ids)] = torch.tensor(segments)
    packed = any(row.prefix for row in rows)
    return RowTensors(ids_B_T, position_B_T, segment_B_T if packed else None)
