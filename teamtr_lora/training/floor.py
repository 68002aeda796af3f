"""The smallest KL a pass can measure: the current policy against itself with a vanishing adapter perturbation.

A delta near the floor would gate on rounding noise, so a run measures its own floors before it trains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from teamtr_lora.algorithm.token_kl import message_kl
from teamtr_lora.algorithm.variants.radii import RADII
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TrustRegionSection
from teamtr_lora.team import Episode, agent_sequences
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.scoring import Scorer, by_token, keep_current, tokens_of, unknown

logger = logging.getLogger(__name__)

# Perturbations relative to the adapter's typical weight. The true KL of the smallest is far below any usable delta. A pass of
# fewer digits rounds such a change away and then shows no noise at all, so it is also tried with larger ones.
PERTURBATIONS = (1e-6, 1e-5, 1e-4, 1e-3)
MARGIN = 5.0
MESSAGES = 32
TRAINING_FLOOR = 2e-3 / 256  # nats a token: training passes that are noisier than this add up in float32, which takes longer


def measure_floors(
    scorer: Scorer, bank: AdapterBank, agent: str, episodes: list[Episode], *, region: TrustRegionSection
) -> dict[str, float]:
    """Exact-KL floors on a few real messages. A strict pass has as its floor what it reads for the smallest perturbation; the
    training pass, and a gate in TF32, the most that they read above a strict pass over all perturbations.

    With `gate_precision: auto` the scorer's gate passes are made TF32 if that resolves the radius; without messages to try it on,
    they stay strict. Its training passes are made to add up in float32 if they are too noisy."""
    chosen = [e for e in episodes if any(m.agent == agent and m.token_ids for m in e.messages)][:MESSAGES]
    if not chosen:
        return {}
    sequences, reduction = agent_sequences(chosen, agent), region.reduction
    batch, as_trained = scorer.batch(sequences), scorer.batch(sequences, segments=scorer.takes_segments)
    bank.activate(agent)
    with gate_pass(scorer, tf32=False):
        strict = perturbed_kl(scorer, bank, agent, batch, reduction)
    if scorer.exact_already:
        return {"training": strict[0], "gate": strict[0]}

    def floor_here(batch: MessageBatch) -> float:
        readings = perturbed_kl(scorer, bank, agent, batch, reduction)
        return max(readings[0], *(reading - true for reading, true in zip(readings, strict, strict=True)))

    gate = strict[0]
    if region.gate_precision != "fp32" and scorer.has_tf32:
        with gate_pass(scorer, tf32=True):
            coarse = floor_here(as_trained if scorer.quick else batch)
        scorer.tf32 = region.gate_precision == "tf32" or MARGIN * coarse <= least_radius(region)
        gate = coarse if scorer.tf32 else gate

    def training_floor() -> float:
        with scorer.training(agent), torch.no_grad():
            return floor_here(as_trained)

    training, tokens = training_floor(), batch.tokens / len(batch.messages)
    if training > REDUCTIONS[reduction].of_message(TRAINING_FLOOR * tokens, tokens) and scorer.takes_float32_sum(agent):
        scorer.float32_sum, rounded = True, training
        training = training_floor()
        logger.info(
            "the training pass cannot resolve KL below %.2g nats, %.2g with float32 sums between layers", rounded, training
        )
    return {"training": training, "gate": gate}


def perturbed_kl(
    scorer: Scorer, bank: AdapterBank, agent: str, batch: MessageBatch, reduction: str, sizes: Sequence[float] = PERTURBATIONS
) -> list[float]:
    """The mean message KL from the current policy to itself, moved by each of `sizes` along one random direction."""
    current = keep_current(scorer, batch)
    before = bank.snapshot(agent)
    scale = max(float(t.abs().mean()) for t in before.values())
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(t.shape, generator=generator).to(t) * scale for n, t in before.items()}
    means: list[float] = []
    try:
        for size in sizes:
            bank.restore(agent, {name: tensor + size * noise[name] for name, tensor in before.items()})
            found = unknown(batch)
            for place in scorer.passes(batch):
                kl_N = scorer.read(batch.microbatches[place], current.states[place]).kl_N
                assert kl_N is not None
                found[place] = kl_N
            kl_N = by_token(scorer.ranks, batch, found).double()
            means.append(float(message_kl(kl_N, tokens_of(batch, "message_N"), len(batch.messages), reduction).mean()))
    finally:
        bank.restore(agent, before)
    return means


def least_radius(region: TrustRegionSection) -> float:
    """The smallest radius that an agent may get."""
    return region.delta * RADII[region.radii].smallest_share


def check_floors(floors: dict[str, float], delta: float, *, tf32: bool = False) -> None:
    """Refuses a delta the gate cannot resolve; warns where only the optimizer's own KL is noisy."""
    gate = floors.get("gate", 0.0)
    if delta < MARGIN * gate:
        raise UserError(
            f"trust_region.delta = {delta:g}: below {MARGIN:g} times the gate's numerical floor, measured as {gate:.2g} nats; "
            f"use delta >= {MARGIN * gate:.2g}" + (", or trust_region.gate_precision=fp32" if tf32 else "")
        )
    if floors.get("training", 0.0) > delta:
        logger.warning(
            "the training pass cannot resolve KL below %.2g nats, more than delta = %g: early stopping is noise and only the "
            "gate decides; a higher base.precision helps", floors["training"], delta,
        )  # fmt: skip
