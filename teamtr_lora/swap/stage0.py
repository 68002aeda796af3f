"""Stage-0 alignment: the new adapter learns the old agent's policy on the probe (eq:align_obj, exact KL over the vocabulary).

    minimise E KL(old || new) over the probe's training half, until the held-out half is within delta_align

The held-out half decides: its mean must be within the radius. Optimization goes on while that still helps, until the mean's upper
confidence bound is within the radius too: a few contexts carry most of a small KL, so a mean alone may have been lucky.

To learn from, a context has more than its message: the old agent predicts every token of the context itself as well, in the same
forward pass. The last of them are learned too, which pins the policy down where few messages were sampled.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from teamtr_lora.algorithm.clustered import ClusteredMean, clustered_mean
from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.base.bank import AdapterBank, Snapshot
from teamtr_lora.recipe import SwapSection, TrustRegionSection
from teamtr_lora.team import SequenceSpan, TokenSequence
from teamtr_lora.training.batches import MessageBatch, Microbatch
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.optimizers import build_loss_scaler, flatten_state, restore_state
from teamtr_lora.training.scoring import Scorer

MAX_GRAD_NORM = 1.0
# A check that is this much below the best so far counts as progress; after PATIENCE checks without, the rate is halved.
PROGRESS, PATIENCE = 0.98, 3
# A check this far above the best so far, or one that is not finite, means the rate is too high: back to the best at once.
DIVERGED = 4.0
HALVINGS = 6
IN_CONTEXT = -1  # the turn of what is scored inside a context
# The old agent's predictions inside its contexts: most tokens learned of each, and their weight beside the message's.
CONTEXT_TOKENS, CONTEXT_WEIGHT = 64, 1.0
NOT_FINITE = 1e30  # written in place of an infinite or undefined KL, which JSON cannot hold


@dataclass(frozen=True)
class Teacher:
    """The old agent on the probe: its hidden states at every token of every message, and the head that reads them."""

    states: list[Tensor]  # one [T, D] a message
    head: Tensor | None = None  # None: the head is the new agent's own


@dataclass(frozen=True)
class Half:
    """One half of the probe, as the new agent reads it. Messages are numbered as the teacher's states are."""

    batches: list[MessageBatch]
    teachers: list[Teacher]


@dataclass(frozen=True)
class Reading:
    """KL(old || new) on the held-out half, in the recipe's reduction."""

    mean: float
    standard_error: float | None
    bound: float | None  # what is compared with the radius; None where one context gives nothing to judge by

    def surely_within(self, radius: float) -> bool:
        return self.bound is not None and self.bound <= radius


@dataclass
class Alignment:
    """Where Stage-0 is, and once `done` its result."""

    delta: float
    before: Reading
    after: Reading  # of the best adapter so far
    reached: bool
    steps: int = 0
    learning_rate: float = 0.0
    halvings: int = 0
    trained_tokens: int = 0
    stale_checks: int = 0
    seconds: float = 0.0
    done: bool = False
    curve: list[tuple[int, float]] = field(default_factory=list)  # step, held-out mean


@torch.no_grad()
def teacher_states(scorer: Scorer, batch: MessageBatch) -> list[Tensor]:
    """The active adapter's hidden states by message: [tokens, hidden] and never [tokens, vocabulary]."""
    states: list[Tensor] = [torch.empty(0)] * len(batch.messages)
    with gate_pass(scorer):
        for part in batch.microbatches:
            hidden_ND = scorer.hidden(part)
            for number, count in _runs(part):
                states[number], hidden_ND = hidden_ND[:count].clone(), hidden_ND[count:]
    return states


def _runs(part: Microbatch) -> list[tuple[int, int]]:
    """(message, tokens) in the order in which they lie in the micro-batch; a message's tokens lie together."""
    numbers, counts = torch.unique_consecutive(part.message_N, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))


def _kl(scorer: Scorer, part: Microbatch, teacher: Teacher, messages: int, reduction: str) -> Tensor:
    """[M]: KL(old || new) of each message in this micro-batch, 0 for the others."""
    current_ND = torch.cat([teacher.states[number] for number, _ in _runs(part)]).to(scorer.device)
    scores = scorer.score(part, scorer.hidden(part), current_ND, teacher.head)
    assert scores.kl_N is not None
    return message_kl(scores.kl_N, part.message_N, messages, reduction)


@torch.no_grad()
def read_half(scorer: Scorer, half: Half, region: TrustRegionSection) -> Reading:
    """The active adapter against the teacher, in strict float32."""
    values, groups = [], []
    with gate_pass(scorer):
        for batch, teacher in zip(half.batches, half.teachers, strict=True):
            count = len(batch.messages)
            total_M = torch.zeros(count)
            for part in batch.microbatches:
                total_M += _kl(scorer, part, teacher, count, region.reduction).cpu()
            values.append(total_M)
            groups.append(batch.group_M)
    return _reading(clustered_mean(torch.cat(values), torch.cat(groups), region.confidence))


def _reading(mean: ClusteredMean) -> Reading:
    finite = [value if math.isfinite(value) else None for value in (mean.standard_error, mean.bound)]
    return Reading(mean.mean if math.isfinite(mean.mean) else NOT_FINITE, *finite)


Keep = Callable[[Alignment, dict[str, Tensor], dict[str, Any]], None]
"""Called at every check with what a killed alignment goes on from: where it is, its tensors, and the scalars of its optimizer and
its loss scale."""


class Stage0:
    """One alignment of the adapter `name` in the bank. `keep` makes every check a point to resume from."""

    def __init__(
        self,
        scorer: Scorer,
        bank: AdapterBank,
        name: str,
        fit: Half,
        held: Half,
        region: TrustRegionSection,
        settings: SwapSection,
        *,
        delta: float,
        seed: str,
        half_precision: bool = False,
    ) -> None:
        self._scorer, self._bank, self._name = scorer, bank, name
        self._fit, self._held, self._region, self._settings = fit, held, region, settings
        self._delta, self._seed = delta, seed
        self._parameters = list(bank.parameters(name).values())
        self._scaler = build_loss_scaler(scorer.device, half_precision=half_precision)
        self._best: Snapshot = bank.snapshot(name)
        self._optimizer = self._new_optimizer(settings.align_rate)
        self._clock = time.monotonic()

    def start(self) -> Alignment:
        self._bank.activate(self._name)
        before = read_half(self._scorer, self._held, self._region)
        reached, done = before.mean <= self._delta, before.surely_within(self._delta)
        return Alignment(
            self._delta, before, before, reached, learning_rate=self._settings.align_rate, done=done, curve=[(0, before.mean)]
        )

    def resume(self, state: Alignment, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> None:
        """Back to where `keep` was called."""
        parts = {kind: _tensors_under(tensors, f"{kind}/") for kind in ("now", "best", "optimizer")}
        self._bank.restore(self._name, parts["now"])
        self._best = {name: tensor.clone() for name, tensor in parts["best"].items()}
        self._optimizer = self._new_optimizer(state.learning_rate)
        restore_state(self._optimizer, parts["optimizer"], scalars["optimizer"])
        if scalars["scaler"]:  # empty without half precision
            self._scaler.load_state_dict(scalars["scaler"])

    def run(self, state: Alignment, keep: Keep) -> Alignment:
        """Optimizes until the held-out half is in the region, or the budget or all progress ends; the best adapter stays."""
        every = max(1, len(self._fit.batches))
        while not state.done:
            with self._bank.training(self._name) as parameters:
                for _ in range(min(every, self._settings.align_steps - state.steps)):
                    self._step(parameters, state)
            self._check(state)
            now = time.monotonic()
            state.seconds, self._clock = state.seconds + now - self._clock, now
            keep(state, self._tensors(), {"optimizer": flatten_state(self._optimizer)[1], "scaler": self._scaler.state_dict()})
        self._bank.restore(self._name, self._best)
        return state

    def _step(self, parameters: list[torch.nn.Parameter], state: Alignment) -> None:
        epoch, place = divmod(state.steps, len(self._fit.batches))
        order = list(range(len(self._fit.batches)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        batch, teacher = self._fit.batches[order[place]], self._fit.teachers[order[place]]
        weight_M = _weights(batch, self._region.reduction).to(self._scorer.device)
        for part in batch.microbatches:
            loss = (_kl(self._scorer, part, teacher, len(batch.messages), self._region.reduction) * weight_M).sum()
            self._scaler.scale(loss).backward()
        self._scaler.unscale_(self._optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        state.steps += 1
        state.trained_tokens += batch.tokens

    def _check(self, state: Alignment) -> None:
        """Measures the held-out half; keeps the best, and slows down where progress has ended."""
        reading = read_half(self._scorer, self._held, self._region)
        state.curve.append((state.steps, reading.mean))
        improved = reading.mean < PROGRESS * state.after.mean
        diverged = not reading.mean < DIVERGED * state.after.mean
        if reading.mean < state.after.mean:
            state.after, self._best = reading, self._bank.snapshot(self._name)
        state.stale_checks = 0 if improved else state.stale_checks + 1
        state.reached = state.after.mean <= self._delta
        stuck = state.stale_checks >= PATIENCE
        state.done = (
            state.after.surely_within(self._delta) or (state.reached and stuck) or state.steps >= self._settings.align_steps
        )
        if not state.done and (diverged or stuck):
            self._bank.restore(self._name, self._best)
            state.learning_rate /= 2
            state.halvings, state.stale_checks = state.halvings + 1, 0
            self._optimizer = self._new_optimizer(state.learning_rate)
            state.done = state.halvings > HALVINGS

    def _new_optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._parameters, lr=rate)

    def _tensors(self) -> dict[str, Tensor]:
        parts = {"now": self._bank.tensors(self._name), "best": self._best, "optimizer": flatten_state(self._optimizer)[0]}
        return {f"{kind}/{name}": tensor.cpu() for kind, tensors in parts.items() for name, tensor in tensors.items()}


def _weights(batch: MessageBatch, reduction: str) -> Tensor:
    """[M]: a mean over messages, plus CONTEXT_WEIGHT times the same of the contexts' own tokens, token for token."""
    own_M = torch.tensor([message.turn != IN_CONTEXT for message in batch.messages])
    tokens_M = torch.tensor([len(message.token_ids) for message in batch.messages], dtype=torch.float32)
    messages = int(own_M.sum())
    lengths = float(tokens_M[own_M].sum() / tokens_M[~own_M].sum().clamp(min=1))
    context = CONTEXT_WEIGHT * REDUCTIONS[reduction].of_message(lengths, lengths)
    return torch.where(own_M, 1.0, context) / messages


def probe_batch(scorer: Scorer, contexts: Sequence[TokenSequence], *, with_context: bool = False) -> MessageBatch:
    """`with_context`: the last tokens of each context are scored too, as a message with the turn IN_CONTEXT."""
    chosen = [_with_context(context) for context in contexts] if with_context else contexts
    return scorer.batch(chosen)


def _with_context(context: TokenSequence) -> TokenSequence:
    (span,) = context.spans
    start = max(1, span.start - CONTEXT_TOKENS)  # nothing predicts the first token
    ids = context.ids[start : span.start]
    said = span.message
    inside = replace(
        said,
        turn=IN_CONTEXT,
        prompt_ids=context.ids[:start],
        token_ids=ids,
        sampler_logprobs=[0.0] * len(ids),
        finish="stop",
        text="",
    )
    return TokenSequence(context.ids, [SequenceSpan(start, span.start, inside), span], context.episode)


def in_chunks(contexts: Sequence[TokenSequence], size: int) -> list[list[TokenSequence]]:
    """The optimizer's minibatches: as even as they can be."""
    count = max(1, -(-len(contexts) // size))
    return [list(contexts[start::count]) for start in range(count)]


def _tensors_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with `prefix`, by what follows it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
