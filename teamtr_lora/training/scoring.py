"""Forward passes over one agent's messages: hidden states once, the head in chunks, one forward for an episode's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from teamtr_lora.algorithm.token_kl import TokenScores, head_logits, score_tokens
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.precision import has_sliding_window, head_weight, strict_fp32
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.team import Episode, Message, TokenSequence
from teamtr_lora.training.packing import Row, RowTensors, pack, packs, row_tensors


@dataclass(frozen=True)
class Microbatch:
    """Padded rows and where their messages' tokens are predicted. N counts message tokens only."""

    rows: RowTensors
    place_N: Tensor  # flat index into B*T of the position whose logits predict the token
    target_N: Tensor
    message_N: Tensor  # index of the token's message in the MessageBatch
    sampler_logp_N: Tensor


@dataclass(frozen=True)
class MessageBatch:
    """One agent's messages of some episodes, ready to score."""

    messages: list[Message]
    group_M: Tensor
    advantage_M: Tensor
    episode_M: Tensor  # index of the message's episode in the update's list
    microbatches: list[Microbatch]

    @property
    def tokens(self) -> int:
        return sum(len(m.token_ids) for m in self.messages)


def message_batch(
    sequences: Sequence[TokenSequence],
    advantage: dict[int, float],
    index: dict[int, int],
    *,
    tokens_per_microbatch: int,
    mask_truncated: bool,
    device: torch.device,
    pack_width: int | None = None,
) -> MessageBatch:
    """`advantage` and `index` are keyed by id(episode). With `pack_width`, the hidden size, the sequences of a group share a row
    where that saves work."""
    chosen: list[TokenSequence] = []
    numbers: dict[int, list[int]] = {}  # by id(sequence): its messages' numbers
    messages: list[Message] = []
    owners: list[TokenSequence] = []
    for sequence in sequences:
        spans = [s for s in sequence.spans if not (mask_truncated and s.message.truncated)]
        if spans:
            kept = TokenSequence(sequence.ids[: spans[-1].end], spans, sequence.episode)
            chosen.append(kept)
            numbers[id(kept)] = list(range(len(messages), len(messages) + len(spans)))
            messages += [s.message for s in spans]
            owners += [kept] * len(spans)
    if pack_width is None:
        rows = [Row([sequence]) for sequence in chosen]
    else:
        rows = pack(chosen, longest=tokens_per_microbatch, hidden_size=pack_width)
    return MessageBatch(
        messages=messages,
        group_M=torch.tensor([s.episode.group for s in owners], dtype=torch.long),
        advantage_M=torch.tensor([advantage[id(s.episode)] for s in owners], dtype=torch.float32),
        episode_M=torch.tensor([index[id(s.episode)] for s in owners], dtype=torch.long),
        microbatches=[_microbatch(part, numbers, device) for part in packs(rows, tokens_per_microbatch)],
    )


def _microbatch(part: list[Row], numbers: dict[int, list[int]], device: torch.device) -> Microbatch:
    tensors = row_tensors(part)
    width = tensors.ids_B_T.shape[1]
    place: list[int] = []
    target: list[int] = []
    message: list[int] = []
    sampler_logp: list[float] = []
    for index, row in enumerate(part):
        for position, sequence in enumerate(row.sequences):
            for number, span in zip(numbers[id(sequence)], sequence.spans, strict=True):
                place += [index * width + row.place(position, i - 1) for i in range(span.start, span.end)]
                target += sequence.ids[span.start : span.end]
                message += [number] * (span.end - span.start)
                sampler_logp += span.message.sampler_logprobs
    return Microbatch(
        tensors.to(device),
        torch.tensor(place, device=device),
        torch.tensor(target, device=device),
        torch.tensor(message, device=device),
        torch.tensor(sampler_logp, dtype=torch.float32, device=device),
    )


class Scorer:
    """Log-probabilities and KL of the active adapter's policy at the sampling temperature.

    Passes run in the base's own precision; inside `strict()` they run in float32 (or TF32) on the stored weights, which is
    how the policy is defined and what the gate measures.
    """

    def __init__(
        self, base: FrozenBase, bank: AdapterBank, *, temperature: float, head_chunk_tokens: int, tf32: bool = False
    ) -> None:
        self._bank, self._temperature, self._chunk, self.tf32 = bank, temperature, head_chunk_tokens, tf32
        self.device = base.device
        self._head = head_weight(base.model).detach()
        # a packed row brings its own mask, which says nothing of a sliding window
        self.pack_width = None if has_sliding_window(base.model) else self._head.shape[1]
        # on a CPU a float32 base already computes strictly; on a GPU the matmul mode has to be set for it
        self.exact_already = base.device.type == "cpu" and base.dtype == torch.float32 and base.quantization == "none"

    @classmethod
    def of(cls, playable: PlayableTeam, config: TeamTRConfig) -> Scorer:
        """As the recipe says."""
        return cls(
            playable.base,
            playable.bank,
            temperature=config.rollout.temperature,
            head_chunk_tokens=config.training.head_chunk_tokens,
            tf32=config.trust_region.gate_precision == "tf32",
        )

    @contextmanager
    def strict(self, *, tf32: bool) -> Iterator[None]:
        stored = self._head
        with strict_fp32(self._bank.model, tf32=tf32):
            self._head = stored.float()  # one float32 head for the whole pass
            try:
                yield
            finally:
                self._head = stored

    def hidden(self, batch: Microbatch) -> Tensor:
        """[N, D]: the last hidden state at each position that predicts a message token."""
        rows = batch.rows
        hidden_B_T_D = self._bank.decoder(
            input_ids=rows.ids_B_T, position_ids=rows.position_B_T, attention_mask=rows.mask(), use_cache=False
        ).last_hidden_state
        # Messages that share a row share the position before their first token. Indexing would add their gradients in whatever
        # order threads come; an embedding adds them in the order of N, so that a run can be repeated bit by bit.
        return embedding(batch.place_N, hidden_B_T_D.flatten(0, 1))

    def score(
        self, batch: Microbatch, hidden_ND: Tensor, current_ND: Tensor | None = None, current_head: Tensor | None = None
    ) -> TokenScores:
        """`current_head`: of a current policy on another base."""
        return score_tokens(
            hidden_ND,
            self._head,
            batch.target_N,
            temperature=self._temperature,
            chunk_tokens=self._chunk,
            current_ND=current_ND,
            current_head_VD=current_head,
        )

    def log_probabilities(self, hidden_ND: Tensor) -> Tensor:
        """[N, V], all at once: for a few tokens only."""
        return torch.log_softmax(head_logits(hidden_ND, self._head) / self._temperature, dim=-1)


def unweighted_batch(
    scorer: Scorer, sequences: Sequence[TokenSequence], episodes: Sequence[Episode], tokens_per_microbatch: int
) -> MessageBatch:
    """Messages to be read, not learned from; each knows its episode's place in `episodes`."""
    index = {id(episode): i for i, episode in enumerate(episodes)}
    return message_batch(
        sequences,
        dict.fromkeys(index, 0.0),
        index,
        tokens_per_microbatch=tokens_per_microbatch,
        mask_truncated=False,
        device=scorer.device,
        pack_width=scorer.pack_width,
    )


@dataclass(frozen=True)
class CurrentPolicy:
    """The policy being replaced, kept once per update: hidden states for the exact KL, log-probabilities for the ratios."""

    hidden: list[Tensor]  # one [N, D] a micro-batch
    logp: list[Tensor]


@torch.no_grad()
def keep_current(scorer: Scorer, batch: MessageBatch) -> CurrentPolicy:
    hidden = [scorer.hidden(part) for part in batch.microbatches]
    return CurrentPolicy(hidden, [scorer.score(p, h).logp_N for p, h in zip(batch.microbatches, hidden, strict=True)])
