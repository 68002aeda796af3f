"""Forward passes over one agent's messages: hidden states once, the head in chunks, one forward for an episode's messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from teamtr_lora.algorithm.token_kl import TokenScores, score_tokens
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.load import FrozenBase
from teamtr_lora.base.precision import head_weight, strict_fp32
from teamtr_lora.team import Message, TokenSequence


@dataclass(frozen=True)
class Microbatch:
    """Right-padded sequences and where their messages' tokens are predicted. N counts message tokens only."""

    ids_B_T: Tensor
    position_N: Tensor  # flat index into B*T of the position whose logits predict the token
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
) -> MessageBatch:
    """`advantage` and `index` are keyed by id(episode). Sequences of similar length share a micro-batch."""
    messages: list[Message] = []
    owners: list[TokenSequence] = []
    numbered: list[tuple[TokenSequence, list[tuple[int, int, int]]]] = []  # sequence, (message, start, end)
    for sequence in sequences:
        spans = []
        for span in sequence.spans:
            if mask_truncated and span.message.truncated:
                continue
            spans.append((len(messages), span.start, span.end))
            messages.append(span.message)
            owners.append(sequence)
        if spans:
            numbered.append((sequence, spans))
    numbered.sort(key=lambda pair: len(pair[0].ids))
    return MessageBatch(
        messages=messages,
        group_M=torch.tensor([s.episode.group for s in owners], dtype=torch.long),
        advantage_M=torch.tensor([advantage[id(s.episode)] for s in owners], dtype=torch.float32),
        episode_M=torch.tensor([index[id(s.episode)] for s in owners], dtype=torch.long),
        microbatches=[_microbatch(part, messages, device) for part in _packs(numbered, tokens_per_microbatch)],
    )


Numbered = tuple[TokenSequence, list[tuple[int, int, int]]]


def _packs(numbered: list[Numbered], budget: int) -> Iterator[list[Numbered]]:
    """Consecutive (length-sorted) sequences whose padded size stays within the token budget; one at least."""
    pack: list[Numbered] = []
    for pair in numbered:
        if pack and (len(pack) + 1) * len(pair[0].ids) > budget:
            yield pack
            pack = []
        pack.append(pair)
    if pack:
        yield pack


def _microbatch(pack: list[Numbered], messages: list[Message], device: torch.device) -> Microbatch:
    width = max(len(sequence.ids) for sequence, _ in pack)
    ids_B_T = torch.zeros(len(pack), width, dtype=torch.long)
    position: list[int] = []
    target: list[int] = []
    message: list[int] = []
    sampler_logp: list[float] = []
    for row, (sequence, spans) in enumerate(pack):
        ids_B_T[row, : len(sequence.ids)] = torch.tensor(sequence.ids)
        for number, start, end in spans:
            position += range(row * width + start - 1, row * width + end - 1)
            target += sequence.ids[start:end]
            message += [number] * (end - start)
            sampler_logp += messages[number].sampler_logprobs
    return Microbatch(
        ids_B_T.to(device),
        torch.tensor(position, device=device),
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
        self._bank, self._temperature, self._chunk, self._tf32 = bank, temperature, head_chunk_tokens, tf32
        self.device = base.device
        self._head = head_weight(base.model).detach()
        # on a CPU a float32 base already computes strictly; on a GPU the matmul mode has to be set for it
        self.exact_already = base.device.type == "cpu" and base.dtype == torch.float32 and base.quantization == "none"

    @contextmanager
    def strict(self) -> Iterator[None]:
        stored = self._head
        with strict_fp32(self._bank.model, tf32=self._tf32):
            self._head = stored.float()  # one float32 head for the whole pass
            try:
                yield
            finally:
                self._head = stored

    def hidden(self, batch: Microbatch) -> Tensor:
        """[N, D]: the last hidden state at each position that predicts a message token.

        No attention mask: padding is on the right, and causal attention never looks there.
        """
        hidden_B_T_D = self._bank.decoder(input_ids=batch.ids_B_T, use_cache=False).last_hidden_state
        return hidden_B_T_D.flatten(0, 1)[batch.position_N]

    def score(self, batch: Microbatch, hidden_ND: Tensor, current_ND: Tensor | None = None) -> TokenScores:
        return score_tokens(
            hidden_ND,
            self._head,
            batch.target_N,
            temperature=self._temperature,
            chunk_tokens=self._chunk,
            current_ND=current_ND,
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
