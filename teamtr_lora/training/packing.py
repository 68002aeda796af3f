"""Rows for the forward pass: the episodes of a group open alike, so their common prefix is computed once.

    [ prefix | rest of episode 1 | rest of episode 2 | ... ]

Each rest attends to the prefix and to itself, at the positions it has in its own sequence: hidden states are those of the
separate sequences. For short messages after a long prompt this is most of the work saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from teamtr_lora.team import TokenSequence

# A packed row attends over a long row with a mask, which costs more per token than plain causal attention: packing has to
# save at least this share of the estimated work.
WORTHWHILE_SAVING = 0.15


@dataclass
class Row:
    """One row of a micro-batch: one sequence, or several that share `prefix` tokens."""

    sequences: list[TokenSequence]
    prefix: int = 0

    @property
    def length(self) -> int:
        return self.prefix + sum(len(s.ids) - self.prefix for s in self.sequences)

    def place(self, number: int, index: int) -> int:
        """Where token `index` of sequence `number` lies in the row."""
        if index < self.prefix:
            return index
        before = sum(len(s.ids) - self.prefix for s in self.sequences[:number])
        return before + index

    def tokens(self) -> tuple[list[int], list[int], list[int]]:
        """ids, positions, and segments: 0 is the prefix (or a lone sequence), then one number a rest."""
        ids = list(self.sequences[0].ids[: self.prefix])
        positions, segments = list(range(self.prefix)), [0] * self.prefix
        for number, sequence in enumerate(self.sequences, 1 if self.prefix else 0):
            rest = sequence.ids[self.prefix :]
            ids += rest
            positions += range(self.prefix, len(sequence.ids))
            segments += [number] * len(rest)
        return ids, positions, segments


def pack(sequences: Iterable[TokenSequence], *, longest: int, hidden_size: int) -> list[Row]:
    """Groups that gain by it share a row of at most `longest` tokens; the others stay one sequence a row."""
    groups: dict[int, list[TokenSequence]] = defaultdict(list)
    for sequence in sequences:
        groups[sequence.episode.group].append(sequence)
    rows: list[Row] = []
    for members in groups.values():
        alone = [Row([sequence]) for sequence in members]
        together = Row(members, _common_prefix(members))
        saved = 1 - _work(together.length, hidden_size) / sum(_work(row.length, hidden_size) for row in alone)
        rows += [together] if together.length <= longest and saved >= WORTHWHILE_SAVING else alone
    return rows


def _work(length: int, hidden_size: int) -> float:
    """Relative cost of a row: the linear layers, and attention, which grows with the square of the length."""
    return length * (1 + length / (12 * hidden_size))


def _common_prefix(members: list[TokenSequence]) -> int:
    """Tokens that all members begin with, before the first message of any of them."""
    limit = min(s.spans[0].start for s in members)
    first = members[0].ids[:limit]
    for other in members[1:]:
        limit = next((i for i, (a, b) in enumerate(zip(first, other.ids, strict=False)) if a != b), min(limit, len(first)))
        first = first[:limit]
    return len(first)


def packs(rows: list[Row], budget: int) -> Iterator[list[Row]]:
    """Rows of similar length whose padded size stays within the token budget; one row at least."""
    part: list[Row] = []
    for row in sorted(rows, key=lambda row: row.length):
        if part and (len(part) + 1) * row.length > budget:
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
