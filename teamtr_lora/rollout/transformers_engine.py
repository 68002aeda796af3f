"""Sampler `transformers`: batched decoding with a KV cache on the trainer's own model. The default on CPU.

Batches what is queued. Requests of several agents share a batch where that pays: a decoding step costs nearly the same for 8
rows as for 64, so a few requests of each agent are cheaper together.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase
from teamtr_lora.recipe import RolloutSection
from teamtr_lora.rollout.sampler import Completion, Request, SamplerBase

# Up to this many queued requests share a batch whatever their agents, by device. Mixing makes PEFT split every layer by agent:
# on a CPU that is cheaper than another batch, on a GPU its many small kernels are not.
MIXED_ROWS = {"cpu": 48, "cuda": 0}
# Rows that finished are dropped from the cache when they are at least this share of it.
COMPACT_SHARE = 0.5


class TransformersSampler(SamplerBase):
    """Implements `Sampler` on the bank's model: the published version must be the one in the bank when it is sampled."""

    def __init__(
        self, base: FrozenBase, bank: AdapterBank, rollout: RolloutSection | None = None, *, context_tokens: int
    ) -> None:
        super().__init__("transformers", bank, vocab_size=base.vocab_size, context_tokens=context_tokens)
        self._pad_id, self._rows = base.pad_id, (rollout or RolloutSection()).requests_per_batch
        self._queue: dict[int, Request] = {}

    def close(self) -> None:
        self._queue.clear()
        self._done.clear()

    def _accept(self, ticket: int, request: Request) -> None:
        self._queue[ticket] = request

    def _work(self) -> None:
        if self._queue:
            tickets = self._next_batch()
            self._done += self._generate(tickets, [self._queue.pop(ticket) for ticket in tickets])

    def _next_batch(self) -> list[int]:
        """All queued agents together while they are few; else the agent with the most queued, in order of submission."""
        if self._bank.can_mix and len(self._queue) <= MIXED_ROWS.get(next(self._bank.model.parameters()).device.type, 0):
            return list(self._queue)[: self._rows]
        agent = Counter(r.agent for r in self._queue.values()).most_common(1)[0][0]
        return [t for t, r in self._queue.items() if r.agent == agent][: self._rows]

    @torch.inference_mode()
    def _generate(self, tickets: list[int], requests: list[Request]) -> list[Completion]:
        for agent in {r.agent for r in requests}:
            if self._bank.version(agent) != self._live[agent].version:
                raise RuntimeError(f"{agent}: the bank's weights changed after {self._live[agent].version.name} was published")
        batch = _Batch(self._bank, requests, self._pad_id)
        for _ in range(max(r.params.max_tokens for r in requests)):
            batch.sample()
            if batch.finished():
                break
            batch.advance()
        return [
            Completion(
                ticket=ticket, token_ids=tokens, logprobs=logps, version=self._live[request.agent].version.name, finish=finish
            )
            for ticket, request, (tokens, logps, finish) in zip(tickets, requests, batch.results(), strict=True)
        ]


class _Batch:
    """Rows decoded together. `rows` maps each live row of the cache to its request."""

    def __init__(self, bank: AdapterBank, requests: list[Request], pad_id: int) -> None:
        self._bank, self._requests, self._pad_id = bank, requests, pad_id
        self._device = next(bank.model.parameters()).device
        count = len(requests)
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._logps: list[list[float]] = [[] for _ in range(count)]
        self._stopped = [False] * count
        self._rows = list(range(count))
        self._uniform = [np.random.Generator(np.random.Philox(key=r.seed)).random(r.params.max_tokens) for r in requests]
        self._temperature = torch.tensor([r.params.temperature for r in requests], device=self._device)
        self._step = 0
        self._agents = [r.agent for r in requests]
        self._mixed = len(set(self._agents)) > 1
        if not self._mixed:
            bank.activate(self._agents[0])
        self._prefill()

    def _prefill(self) -> None:
        """Each distinct prompt once (the G episodes of a group open alike), left-padded; then its cache row is repeated."""
        from transformers import DynamicCache

        keys: dict[tuple[str, ...] | tuple[Any, ...], int] = {}
        index = [keys.setdefault((r.agent, *r.prompt_ids), len(keys)) for r in self._requests]
        prompts = [list(key[1:]) for key in keys]
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(p)) + p for p in prompts], device=self._device)
        pads = torch.tensor([width - len(p) for p in prompts], device=self._device)
        mask = (torch.arange(width, device=self._device)[None] >= pads[:, None]).long()
        positions = (torch.arange(width, device=self._device)[None] - pads[:, None]).clamp(min=0)
        self._cache = DynamicCache()
        logits = self._forward(ids, mask, positions, [str(key[0]) for key in keys])
        rows = torch.tensor(index, device=self._device)
        if len(keys) < len(index):
            self._cache.batch_select_indices(rows)
        self._mask, self._logits = mask[rows], logits[rows]
        self._position = torch.tensor([len(r.prompt_ids) for r in self._requests], device=self._device)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, agents: list[str]) -> Tensor:
        extra = {"adapter_names": self._bank.mixed_names(agents)} if self._mixed else {}
        # Without padding no mask is needed, and attention is faster without one.
        output = self._bank.model(
            input_ids=ids,
            attention_mask=None if bool(mask.all()) else mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        return output.logits[:, -1].float()

    def sample(self) -> None:
        """Inverse-CDF draws in float64 from each row's own stream: token t of a request depends on its seed and logits only."""
        temperature = self._temperature[self._rows]
        greedy = temperature == 0
        logp = torch.log_softmax(self._logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None], dim=-1)
        uniform = torch.tensor([self._uniform[row][min(self._step, len(self._uniform[row]) - 1)] for row in self._rows])
        cdf = logp.double().exp().cumsum(-1)
        # scaled by the total, so that a draw never falls past the last token through rounding
        draw = torch.searchsorted(cdf, (uniform.to(self._device) * cdf[:, -1])[:, None], right=True)[:, 0]
        token = torch.where(greedy, logp.argmax(-1), draw.clamp(max=logp.shape[-1] - 1))
        picked = logp.gather(-1, token[:, None])[:, 0].tolist()
        for position, (row, value) in enumerate(zip(self._rows, token.tolist(), strict=True)):
            params = self._requests[row].params
            if self._stopped[row] or len(self._tokens[row]) >= params.max_tokens:
                continue
            self._tokens[row].append(value)
            self._logps[row].append(picked[position])
            self._stopped[row] = value in params.stop_ids
        self._last = token
        self._step += 1

    def finished(self) -> bool:
        return not any(self._live(row) for row in self._rows)

    def _live(self, row: int) -> bool:
        return not self._stopped[row] and len(self._tokens[row]) < self._requests[row].params.max_tokens

    def advance(self) -> None:
        """One decoding step for the live rows, after dropping finished ones if they are many."""
        live = [position for position, row in enumerate(self._rows) if self._live(row)]
        if len(live) <= len(self._rows) * (1 - COMPACT_SHARE):
            keep = torch.tensor(live, device=self._device)
            self._cache.batch_select_indices(keep)
            self._mask, self._position, self._last = self._mask[keep], self._position[keep], self._last[keep]
            self._rows = [self._rows[position] for position in live]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], dim=1)
        agents = [self._agents[row] for row in self._rows]
        self._logits = self._forward(self._last[:, None], self._mask, self._position[:, None], agents)
        self._position = self._position + 1

    def results(self) -> list[tuple[list[int], list[float], Any]]:
        finish = ["stop" if stopped else "length" for stopped in self._stopped]
        return list(zip(self._tokens, self._logps, finish, strict=True))
