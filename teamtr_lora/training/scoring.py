"""Forward passes over one agent's messages: hidden states of a micro-batch at once, the output head in chunks of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from teamtr_lora.algorithm.head_statistics import HeadStatistics, read_with_statistics, score_with_statistics
from teamtr_lora.algorithm.surrogate import sum_by_message
from teamtr_lora.algorithm.token_kl import TokenScores, head_logits, message_kl, score_tokens
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.base.memory_model import DEFAULT_TOKENS
from teamtr_lora.base.precision import HALF_DTYPES, has_sliding_window, head_weight, strict_fp32
from teamtr_lora.base.segment_attention import attending_over_segments, takes_segments
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.ranks import Ranks, deal
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.team import TokenSequence
from teamtr_lora.training.batches import MessageBatch, Microbatch, message_batch
from teamtr_lora.training.microbatch_size import microbatch_tokens

Kept = Tensor | HeadStatistics  # of one policy at the message tokens: its hidden states, or what a training pass made of them


class Scorer:
    """Log-probabilities and KL of the active adapter's policy at the sampling temperature.

    Passes run in the base's own precision; inside `strict()` they run in float32 (or TF32) on the stored weights, which is
    how the policy is defined and what the gate measures. Inside `training()` they have gradients, and on a GPU in half precision
    they go through fused layers and two head products.
    """

    def __init__(
        self,
        base: FrozenBase,
        bank: AdapterBank,
        *,
        temperature: float,
        head_chunk_tokens: int,
        tf32: bool = False,
        compiled: bool = False,
        tokens_per_microbatch: int = DEFAULT_TOKENS,
        ranks: Ranks | None = None,
    ) -> None:
        self._compiled, self._training, self._wide, self.ranks = compiled, False, False, ranks or Ranks()
        self.float32_sum = False  # whether layers add up in float32 in training passes
        self.tokens_per_microbatch = tokens_per_microbatch
        self._bank, self._temperature, self._chunk, self.tf32 = bank, temperature, head_chunk_tokens, tf32
        self._split = base.split
        self.device, self.has_tf32 = base.device, base.device.type == "cuda"
        self._model, self._head = base.model, head_weight(base.model).detach()
        self.takes_segments = takes_segments(base.model)  # whether rows for training may lie end to end
        # the mask of a packed row knows no sliding window, so such a base gets one sequence a row
        self.pack_width = None if has_sliding_window(base.model) else self._head.shape[1]
        # a float32 base on a CPU needs no special pass to compute strictly; on a GPU the matmul mode has to be set for it
        self.exact_already = base.device.type == "cpu" and base.dtype == torch.float32 and base.quantization == "none"

    @classmethod
    def of(cls, playable: PlayableTeam, config: TeamTRConfig) -> Scorer:
        """As the recipe says; gate passes are strict where it leaves that to the floors, which nobody may have measured yet."""
        return cls(
            playable.base,
            playable.bank,
            temperature=config.rollout.temperature,
            head_chunk_tokens=config.training.head_chunk_tokens,
            tf32=config.trust_region.gate_precision == "tf32" and playable.base.device.type == "cuda",
            compiled=config.training.compile,
            tokens_per_microbatch=min(playable.ranks.gather(microbatch_tokens(playable, config))),
            ranks=playable.ranks,
        )

    def batch(
        self,
        sequences: Sequence[TokenSequence],
        advantage_E: Sequence[float] | None = None,
        weight_E: Sequence[float] | None = None,
        *,
        mask_truncated: bool = False,
        segments: bool = False,
    ) -> MessageBatch:
        """Messages as passes of this scorer take them. `segments`: for those that take rows that lie end to end."""
        return message_batch(
            sequences,
            advantage_E,
            weight_E=weight_E,
            tokens_per_microbatch=self.tokens_per_microbatch,
            device=self.device,
            mask_truncated=mask_truncated,
            pack_width=self.pack_width,
            segments=segments,
        )

    def owners(self, batch: MessageBatch) -> list[int]:
        """The process that computes each micro-batch, the same one in every pass over the batch."""
        return deal([part.rows.ids_B_T.numel() for part in batch.microbatches], self.ranks.size)

    def passes(self, batch: MessageBatch, among: Collection[int] | None = None) -> Iterator[int]:
        """The micro-batches, by number, that this process computes, or those of them that are `among` some. Each pass over a base
        that is split over processes is one of all of them: those with fewer micro-batches than another follow with passes that
        count for nothing, with a backward pass where the others make one."""
        owners = self.owners(batch)
        asked = range(len(owners)) if among is None else among
        counts = Counter(owners[place] for place in asked)
        yield from (place for place in asked if owners[place] == self.ranks.rank)
        most = max(counts.values(), default=0) if self._split else 0
        for _ in range(most - counts[self.ranks.rank]):
            hidden_ND = self.hidden(batch.microbatches[0])
            if hidden_ND.requires_grad:
                (0 * hidden_ND.sum()).backward()

    @contextmanager
    def training(self, agent: str) -> Iterator[list[torch.nn.Parameter]]:
        """Around the passes that an update learns from; yields the parameters of `agent`."""
        attention = attending_over_segments(self._model) if self.takes_segments else nullcontext()
        float32_sum = self.float32_sum and self.takes_float32_sum(agent)
        with attention, self._bank.training(agent, compiled=self._compiled, float32_sum=float32_sum) as parameters:
            self._training = True
            try:
                yield parameters
            finally:
                self._training = False

    def takes_float32_sum(self, agent: str) -> bool:
        return self.takes_segments and self._bank.takes_float32_sum(agent)

    @property
    def quick(self) -> bool:
        """Whether TF32 passes of the active agent go through fused layers, and take rows that lie end to end."""
        return self.takes_segments and self._bank.can_widen

    @contextmanager
    def strict(self, *, tf32: bool) -> Iterator[None]:
        if tf32 and self.quick:
            with attending_over_segments(self._model), self._bank.wide(compiled=self._compiled):
                self._wide = True
                try:
                    yield
                finally:
                    self._wide = False
            return
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
        if rows.segments is not None and not (self._training or self._wide):
            raise RuntimeError("rows that lie end to end are for training passes and quick ones")
        given = {} if rows.segments is None else {"segments": rows.segments}
        hidden_B_T_D = self._bank.decoder(
            input_ids=rows.ids_B_T, position_ids=rows.position_B_T, attention_mask=rows.mask(), use_cache=False, **given
        ).last_hidden_state
        # Messages that share a row share the position before their first token. Indexing would add up their gradients in an
        # order that depends on threads; an embedding adds them in the order of N, so that a run can be repeated bit by bit.
        hidden_ND = embedding(batch.place_N, hidden_B_T_D.flatten(0, 1))
        float32 = self._wide or (self._training and self.float32_sum)  # the head's input is rounded, as other products' are
        return hidden_ND.to(self._head.dtype) if float32 else hidden_ND

    def score_and_keep(self, batch: Microbatch, current: Kept | None = None) -> tuple[TokenScores, Kept]:
        """The scores of the adapter as it is now, and what later passes need to measure from this policy."""
        hidden_ND = self.hidden(batch)
        if self._takes_statistics(hidden_ND):
            return score_with_statistics(hidden_ND, self._head, **self._measured(batch, current))
        assert not isinstance(current, HeadStatistics)
        return self.score(batch, hidden_ND, current), hidden_ND.detach()

    @torch.no_grad()
    def read(self, batch: Microbatch, current: Kept | None = None) -> TokenScores:
        """The same scores, to look at: nothing is learned from them and nothing is kept, which spares a head product."""
        hidden_ND = self.hidden(batch)
        if self._takes_statistics(hidden_ND):
            return read_with_statistics(hidden_ND, self._head, **self._measured(batch, current))
        assert not isinstance(current, HeadStatistics)
        return self.score(batch, hidden_ND, current)

    def _takes_statistics(self, hidden_ND: Tensor) -> bool:
        return self._training and hidden_ND.is_cuda and hidden_ND.dtype in HALF_DTYPES

    def _measured(self, batch: Microbatch, current: Kept | None) -> dict[str, Any]:
        assert not isinstance(current, Tensor)
        return {
            "target_N": batch.target_N, "temperature": self._temperature, "chunk_tokens": self._chunk, "current": current,
        }  # fmt: skip

    def score(
        self, batch: Microbatch, hidden_ND: Tensor, current_ND: Tensor | None = None, current_head: Tensor | None = None
    ) -> TokenScores:
        """`current_head`: the output head of the current policy, where that has another base."""
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


@dataclass(frozen=True)
class CurrentPolicy:
    """The policy being replaced, kept once per update, a value a micro-batch: what the exact KL needs, and log-probabilities for
    the ratios. Empty tensors for the micro-batches that another process computes."""

    states: list[Kept]
    logp: list[Tensor]


def unknown(batch: MessageBatch) -> list[Any]:
    """A value a micro-batch, before any is computed."""
    return [torch.empty(0)] * len(batch.microbatches)


@torch.no_grad()
def keep_current(scorer: Scorer, batch: MessageBatch) -> CurrentPolicy:
    current = CurrentPolicy(unknown(batch), unknown(batch))
    for place in scorer.passes(batch):
        scores, current.states[place] = scorer.score_and_keep(batch.microbatches[place])
        current.logp[place] = scores.logp_N
    return current


@torch.no_grad()
def message_log_ratios(scorer: Scorer, bank: AdapterBank, agent: str, batch: MessageBatch, before: Snapshot) -> np.ndarray:
    """log pi_now(message) / pi_before(message) of the agent's messages, in whatever pass this is called."""
    if not batch.messages:  # it has not spoken
        return np.zeros(0)
    now = bank.snapshot(agent)
    new_M = _message_logp(scorer, batch)
    bank.restore(agent, before)
    try:
        return (new_M - _message_logp(scorer, batch)).numpy()
    finally:
        bank.restore(agent, now)


def _message_logp(scorer: Scorer, batch: MessageBatch) -> Tensor:
    logp = unknown(batch)
    for place in scorer.passes(batch):
        logp[place] = scorer.read(batch.microbatches[place]).logp_N
    logp_N = by_token(scorer.ranks, batch, logp)
    return sum_by_message(logp_N.double(), tokens_of(batch, "message_N"), len(batch.messages))


def tokens_of(batch: MessageBatch, name: str) -> Tensor:
    """[N]: a field of the micro-batches for all tokens, on the CPU."""
    return torch.cat([getattr(part, name) for part in batch.microbatches]).cpu()


def by_token(ranks: Ranks, batch: MessageBatch, values: Sequence[Tensor]) -> Tensor:
    """[N] on the CPU: what a pass has found for each token, in the order of the micro-batches. `values`: by micro-batch, empty
    for those of other ranks."""
    pairs = zip(values, batch.microbatches, strict=True)
    value_N = torch.cat([found.detach().cpu() if len(found) else torch.zeros(len(part.target_N)) for found, part in pairs])
    ranks.add_up(value_N)
    return value_N


@torch.no_grad()
def sampler_gap(ranks: Ranks, batch: MessageBatch, current: CurrentPolicy, reduction: str) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, for the same tokens and weights."""
    gap_N = (by_token(ranks, batch, current.logp) - tokens_of(batch, "sampler_logp_N")).double()
    kl_M = message_kl(torch.expm1(gap_N) - gap_N, tokens_of(batch, "message_N"), max(1, len(batch.messages)), reduction)
    return {"mean_abs": float(gap_N.abs().mean()), "max_abs": float(gap_N.abs().max()), "message_kl": float(kl_M.mean())}


def weight_by_sampler(ranks: Ranks, batch: MessageBatch, current: CurrentPolicy, cap: float, version: AdapterVersion) -> None:
    """Multiplies the advantages, in place, by truncated importance weights trainer / sampler. Messages of another `version` are
    left alone: how much likelier today's team is to play them is in their weights already."""
    gap_N = by_token(ranks, batch, current.logp) - tokens_of(batch, "sampler_logp_N")
    log_weight_M = sum_by_message(gap_N, tokens_of(batch, "message_N"), len(batch.messages))
    now_M = torch.tensor([message.version == version.name for message in batch.messages])
    batch.advantage_M.mul_(torch.where(now_M, log_weight_M.exp().clamp(max=cap), 1.0))
