"""Passes over micro-batches that several ranks share, against one rank: bit for bit, also where a rank has nothing to do."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.common.ranks import Ranks, _Group
from teamtr_lora.team import agent_sequences
from teamtr_lora.training.batches import MessageBatch, message_batch
from teamtr_lora.training.gate import gate_pass, read_candidate
from teamtr_lora.training.optimize import Learner, Minibatch, _step, accumulate
from teamtr_lora.training.scoring import Scorer, keep_current, message_log_ratios, sampler_gap
from teamtr_lora.training.update import AgentUpdater


def passes(playable: Any, config: Any, ranks: Ranks, batch: MessageBatch) -> list[Any]:
    """What a gradient, a reading of the gate and the other passes come to, as one rank sees it."""
    bank, settings = playable.bank, config()
    scorer = Scorer(playable.base, bank, temperature=1.0, head_chunk_tokens=16, ranks=ranks)
    before, minibatch = bank.snapshot("left"), Minibatch(batch)
    found: list[Any] = []
    with scorer.training("left") as parameters:
        learner = Learner(
            scorer=scorer,
            optimizer=None,
            parameters=parameters,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            config=settings,
            region=Variants.of(settings).region,
            start_again=lambda: None,
        )
        for beta in (0.0, 0.5):
            seen = accumulate(learner, minibatch, beta)
            found += [seen.kl, seen.gain, seen.clip_rate, seen.log_ratio_M]
            with torch.no_grad():
                for parameter in parameters:
                    found.append(parameter.grad)
                    parameter -= 0.1 * parameter.grad
        with torch.no_grad():
            every, some = accumulate(learner, minibatch, 0.5), range(0, len(batch.microbatches), 2)
            seen = accumulate(learner, minibatch, 0.5, some)
    messages = sorted({number for place in some for number in batch.microbatches[place].message_N.tolist()})
    assert torch.equal(seen.log_ratio_M, every.log_ratio_M[messages]) and seen.kl > 0
    found += [seen.kl, seen.kl_bound, seen.gain, seen.clip_rate]
    after = bank.snapshot("left")
    with gate_pass(scorer):
        bank.restore("left", before)
        current = keep_current(scorer, batch)
        bank.restore("left", after)
        reading = read_candidate(scorer, batch, current, settings, 0.5)
        ratios = torch.from_numpy(message_log_ratios(scorer, bank, "left", batch, before))
    found += [reading.kl["exact"].bound, reading.gain.mean, reading.kl_M, *reading.terms_N.values(), ratios]
    return [*found, *sampler_gap(ranks, batch, current, "message_sum").values()]


@pytest.mark.parametrize(("ranks", "parts"), [(2, 6), (3, 6), (3, 1)])
def test_ranks_that_share_the_micro_batches_find_what_one_finds(
    make_team: Any, config: Any, episodes: Any, ranks: int, parts: int
) -> None:
    """With a single micro-batch two of three ranks have no message at all."""
    teams = [make_team() for _ in range(ranks + 1)]  # here, since their first weights come from this process's generator
    chosen, advantages = episodes[:8], [(-1.0) ** place * (1 + place) for place in range(8)]
    budget = 10**6 if parts == 1 else 60
    batch = message_batch(agent_sequences(chosen, "left"), advantages, tokens_per_microbatch=budget, device=torch.device("cpu"))
    assert (len(batch.microbatches) == 1) == (parts == 1)
    alone = passes(teams[-1], config, Ranks(), batch)
    store, found = distributed.HashStore(), [[]] * ranks

    def work(rank: int) -> None:
        found[rank] = passes(teams[rank], config, _Group(store, rank, ranks), batch)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert any(isinstance(value, torch.Tensor) and value.abs().sum() > 0 for value in alone)
    for other in found:
        for one, two in zip(alone, other, strict=True):
            assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_a_process_without_a_micro_batch_can_take_the_others_step(make_team, config) -> None:
    """In half precision gradients are scaled: it has scaled none itself, and divides the others' sum by the same factor."""
    playable = make_team(precision="fp16")
    updater, agent = AgentUpdater(playable, config()), playable.team.names[0]
    with updater._learning(agent, lambda: None) as learner:
        for parameter in learner.parameters:
            parameter.grad = torch.full_like(parameter, 2.0**12)
        unused: Any = None  # what a step is made again from
        norm, _ = _step(learner, unused, SimpleNamespace(signal=None), 0.0, 0.1)  # type: ignore[arg-type]
        assert norm == pytest.approx(sum(p.numel() for p in learner.parameters) ** 0.5)
