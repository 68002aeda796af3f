"""How an agent's sequences lie in the rows of a micro-batch: padded, or end to end.

The episodes of a group open alike, so their common prefix is computed once:

    [ prefix | rest of episode 1 | rest of episode 2 | ... ]

Each rest attends to the prefix and to itself, at the positions that it has in its own sequence, so the hidden states are those
of the separate sequences. For short messages after a long prompt this saves most of the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.base.segment_attention import Segments
from teamtr_lora.team import TokenSequence

# Each rest that lies end to end is given a copy of its opening's keys, for as long as a layer's attention takes: so many of them
# have the room that a token's activations take.
KEYS_A_TOKEN = 16

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


def grouped(sequences: Sequence[Numbered]) -> list[list[Numbered]]:
    groups: dict[int, list[Numbered]] = defaultdict(list)
    for sequence in sequences:
        groups[sequence.sequence.episode.group].append(sequence)
    return list(groups.values())


def pack(sequences: Sequence[Numbered], *, longest: int, hidden_size: int, cost: AttentionCost) -> list[Row]:
    """Groups that gain by it share a row of at most `longest` tokens; the others stay one sequence a row."""
    rows: list[Row] = []
    for members in grouped(sequences):
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
    kinds = [[row for row in rows if bool(row.prefix) is masked] for masked in (False, True)] if apart else [rows]
    for kind in filter(None, kinds):
        ordered = sorted(kind, key=lambda row: row.length)
        whole = sum(row.length for row in ordered)
        count = -(-whole // budget)
        if count > 1:
            count += count % 2  # an even number of parts of one size: two processes, or four, have the same work
        parts = _divided(ordered, whole / count)
        while any(len(part) > 1 and len(part) * part[-1].length > budget for part in parts):
            count += 1 if count == 1 else 2
            parts = _divided(ordered, whole / count)
        yield from parts


def _divided(rows: list[Row], size: float) -> list[list[Row]]:
    """Neighbours together, in parts of about `size` tokens: a row belongs to the part in which its middle lies."""
    parts: dict[int, list[Row]] = {}
    before = 0
    for row in rows:
        parts.setdefault(int((before + row.length / 2) / size), []).append(row)
        before += row.length
    return list(parts.values())


def fill_end_to_end(groups: list[list[Numbered]], budget: int) -> Iterator[list[Row]]:
    """Micro-batches with room for at most `budget` tokens and about one size, one sequence at least. A group that is divided has
    its opening in each."""
    opened = [(members, _common_prefix(members)) for members in groups]
    lengths = [prefix + sum(_room(member, prefix) for member in members) for members, prefix in opened]
    longest = max((len(member.ids) for members in groups for member in members), default=0)
    even = -(-sum(lengths) // max(1, -(-sum(lengths) // budget)))  # a short last one would not keep a GPU busy
    most = min(budget, even + longest)
    part: list[Row] = []
    left = most
    for members, prefix in opened:
        row = None
        for member in members:
            rest = _room(member, prefix)
            if part and left < rest + (prefix if row is None else 0):
                yield _without_needless_openings(part)
                part, left, row = [], most, None
            if row is None or not prefix:
                row = Row([], prefix)
                part.append(row)
                left -= prefix
            row.members.append(member)
            left -= rest
    if part:
        yield _without_needless_openings(part)


def _room(member: Numbered, prefix: int) -> int:
    """What a rest takes, in tokens."""
    return len(member.ids) - prefix + prefix // KEYS_A_TOKEN


def _without_needless_openings(rows: list[Row]) -> list[Row]:
    """Only what several share is computed as an opening. Where nothing is, one sequence still opens so: layers that are compiled
    for rows with openings would be compiled again for rows without."""
    opened = [place for place, row in enumerate(rows) if row.prefix]
    openings = {place for place in opened if len(rows[place].members) > 1} or set(opened[:1])
    return [row if place in openings else Row(row.members) for place, row in enumerate(rows)]


Starts = list[list[tuple[int, int]]]
"""By row and member: where its opening and its rest begin, as flat indices into B*T."""


@dataclass(frozen=True)
class RowTensors:
    ids_B_T: Tensor
    position_B_T: Tensor
    segment_B_T: Tensor | None = None  # of rows that share a prefix; None: plain causal attention is right
    segments: Segments | None = None  # of one row that holds everything end to end

    def mask(self) -> Tensor | None:
        """[B, 1, T, T], made when it is used: one micro-batch's at a time."""
        if self.segment_B_T is None:
            return None
        key, query = self.segment_B_T[:, None, :], self.segment_B_T[:, :, None]
        causal = torch.ones(key.shape[-1], key.shape[-1], dtype=torch.bool, device=key.device).tril()
        return (((key == query) | (key == 0)) & causal)[:, None]

    def to(self, device: torch.device) -> RowTensors:
        segment = None if self.segment_B_T is None else self.segment_B_T.to(device)
        segments = None if self.segments is None else self.segments.to(device)
        return RowTensors(self.ids_B_T.to(device), self.position_B_T.to(device), segment, segments)


def padded(rows: list[Row]) -> tuple[RowTensors, Starts]:
    """Right-padded. Without a packed row no mask is needed: causal attention never looks at padding on the right."""
    width = max(row.length for row in rows)
    ids_B_T = torch.zeros(len(rows), width, dtype=torch.long)
    position_B_T = torch.arange(width).repeat(len(rows), 1)
    segment_B_T = torch.full((len(rows), width), -1)
    starts: Starts = []
    for index, row in enumerate(rows):
        ids, positions, segments = row.tokens()
        ids_B_T[index, : len(ids)] = integers(ids)
        position_B_T[index, : len(ids)] = integers(positions)
        segment_B_T[index, : len(ids)] = integers(segments)
        first = index * width
        rests = accumulate((len(member.ids) - row.prefix for member in row.members), initial=first + row.prefix)
        starts.append([(first, rest) for _, rest in zip(row.members, rests, strict=False)])
    packed = any(row.prefix for row in rows)
    return RowTensors(ids_B_T, position_B_T, segment_B_T if packed else None), starts


def end_to_end(rows: list[Row]) -> tuple[RowTensors, Starts]:
    """All in one row: openings, lone sequences, rests."""
    shared, lone = ([place for place, row in enumerate(rows) if bool(row.prefix) is opens] for opens in (True, False))
    ids: list[int] = []
    positions: list[int] = []
    opening_S: list[tuple[int, int]] = []  # of every part
    length_S: list[int] = []

    def put(member: Numbered, start: int, end: int, opening: int = 0) -> int:
        ids.extend(member.ids[start:end])
        positions.extend(range(start, end))
        opening_S.append((opening, opening + start))
        length_S.append(end - start)
        return len(ids) - (end - start)

    starts: Starts = [[] for _ in rows]
    openings = [put(rows[place].members[0], 0, rows[place].prefix) for place in shared]
    for place in lone:
        at = put(rows[place].members[0], 0, len(rows[place].members[0].ids))
        starts[place] = [(at, at)]
    for place, at in zip(shared, openings, strict=True):
        starts[place] = [(at, put(member, rows[place].prefix, len(member.ids), at)) for member in rows[place].members]
    segments = Segments.of(opening_S, length_S)
    return RowTensors(integers(ids)[None], integers(positions)[None], segments=segments), starts


def integers(values: list[int]) -> Tensor:
    """Several times as fast as torch makes it of a list, while a GPU waits for it."""
    return torch.from_numpy(np.array(values, dtype=np.int64))
