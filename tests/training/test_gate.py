"""What the gate reads of a candidate, against a loop over messages in float64."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teamtr_lora.algorithm.clustered import clustered_mean
from teamtr_lora.common.ranks import Ranks
from teamtr_lora.team import agent_sequences
from teamtr_lora.training.batches import message_batch
from teamtr_lora.training.gate import _discounted, gate_pass, read_candidate
from teamtr_lora.training.scoring import CurrentPolicy, Scorer, keep_current, sampler_gap


def batch_of(episodes, agent: str):
    return message_batch(
        agent_sequences(episodes, agent),
        [float(i % 4) - 1.0 for i in range(len(episodes))],
        tokens_per_microbatch=200,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("reduction", ["message_sum", "token_mean"])
def test_a_reading_is_what_a_loop_over_messages_gives(make_team, episodes, move, double_logp, config, reduction: str) -> None:
    playable = make_team()
    chosen, discount, clip = copy.deepcopy(episodes[:12]), 0.5, 0.2
    for i, episode in enumerate(chosen):  # messages of several lengths
        last = episode.messages[-1]
        last.token_ids, last.sampler_logprobs = last.token_ids[: 1 + i % 5], last.sampler_logprobs[: 1 + i % 5]
    batch, scorer = batch_of(chosen, "right"), Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=16)
    assert len(batch.microbatches) > 1
    still_M = batch.group_M == batch.group_M[-1]  # a group that does not differ in return
    batch.advantage_M[still_M] = 0.0
    batch.advantage_M[0] = 0.0  # that of a message whose group does differ says something, too
    playable.bank.activate("right")
    _, logp_current = double_logp(playable, "right")
    with gate_pass(scorer):
        current = keep_current(scorer, batch)
        move(playable, "right", 0.05)
        got = read_candidate(scorer, batch, current, config(reduction=reduction, clip_ratio=clip), discount)
    _, logp = double_logp(playable, "right")
    rows = {"exact": [], "k1": [], "k3": []}
    sums, lengths, gains, logs = [], [], [], []
    for m, message in enumerate(batch.messages):
        with torch.no_grad():
            p, q = logp_current(message), logp(message)
        tokens = (torch.arange(len(message.token_ids)), message.token_ids)
        d = q[tokens] - p[tokens]
        sums.append(float((p.exp() * (p - q)).sum()))
        lengths.append(len(message.token_ids))
        divide = 1 if reduction == "message_sum" else lengths[-1]
        rows["exact"].append(sums[-1] / divide)
        rows["k1"].append(float(-d.sum()) / divide)
        rows["k3"].append(float((d.exp() - 1 - d).sum()) / divide)
        w, a = math.exp(float(d.sum())), float(batch.advantage_M[m])
        gains.append((w - 1) * a)  # whatever the clip range
        logs.append(abs(float(d.sum())))
    for name, values in rows.items():
        wanted = clustered_mean(torch.tensor(values, dtype=torch.float64), batch.group_M, 0.95)
        assert got.kl[name].mean == pytest.approx(wanted.mean, rel=2e-3, abs=1e-5), name
        assert got.kl[name].bound == pytest.approx(wanted.bound, rel=2e-3, abs=1e-5), name
    assert got.message_sum_kl == pytest.approx(sum(sums) / len(sums), rel=1e-3)
    assert len(set(lengths)) > 1
    assert got.token_mean_kl == pytest.approx(sum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums), rel=1e-3)
    for name, terms_N in got.terms_N.items():
        assert float(terms_N.sum()) / len(sums) == pytest.approx(got.kl[name].mean, rel=1e-3, abs=1e-6), (
            "a monitor of the gate's KL"
        )
    # every "right" message is turn 1 of its episode: (1 - gamma) gamma^1 KL
    assert got.discounted_kl == pytest.approx((1 - discount) * discount * sum(sums) / len(chosen), rel=1e-3)
    differ_M = ~still_M
    wanted = clustered_mean(torch.tensor(gains, dtype=torch.float64)[differ_M], batch.group_M[differ_M], 0.95)
    share = float(differ_M.double().mean())
    assert (got.gain.mean, got.gain.bound) == pytest.approx((share * wanted.mean, share * wanted.bound), rel=2e-3, abs=1e-6)
    assert got.gain.mean == pytest.approx(sum(gains) / len(gains), rel=2e-3) and 0 < wanted.standard_error < math.inf
    assert got.log_ratio_max == pytest.approx(max(logs), rel=1e-3)
    with gate_pass(scorer):  # the still group is known to differ in episodes that are not read
        every = read_candidate(scorer, batch, current, config(reduction=reduction), discount, set(batch.group_M.tolist()))
    wanted = clustered_mean(torch.tensor(gains, dtype=torch.float64), batch.group_M, 0.95)
    assert every.gain.bound == pytest.approx(wanted.bound, rel=2e-3, abs=1e-6) and abs(every.gain.bound - got.gain.bound) > 1e-5


def test_the_discounted_kl_is_a_mean_over_episodes_however_often_the_agent_spoke() -> None:
    """def:kltok is a sum over an episode's messages. Episodes where it did not speak are not in the reading."""
    batch: Any = SimpleNamespace(
        messages=[SimpleNamespace(turn=turn) for turn in (0, 2, 1)],
        episode_M=torch.tensor([0, 0, 3]),
        weight_M=torch.tensor([3.0, 3.0, 1.0]),
    )
    first, second = 0.5 * (0.1 + 0.25 * 0.2), 0.5 * 0.5 * 0.4
    assert _discounted(torch.tensor([0.1, 0.2, 0.4]), batch, 0.5) == pytest.approx((3 * first + second) / 4)


def test_the_current_policy_reads_exactly_zero(make_team, episodes, config) -> None:
    playable = make_team()
    batch, scorer = batch_of(episodes[:8], "left"), Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=16)
    playable.bank.activate("left")
    with gate_pass(scorer):
        got = read_candidate(scorer, batch, keep_current(scorer, batch), config(), 0.5)
    assert got.kl["exact"].bound == got.message_sum_kl == got.token_mean_kl == got.discounted_kl == 0.0
    assert got.gain.mean == got.gain.bound == 0.0 and got.log_ratio_max == 0.0


def test_a_half_precision_base_is_gated_in_fp32(make_team, episodes, move, config) -> None:
    """The policy is fp32 arithmetic on the stored weights: the gate of a bf16 base reads what an fp32 copy of it reads."""
    half = make_team(precision="bf16")
    whole = make_team()
    whole.base.model.load_state_dict({n: t.float() for n, t in half.base.model.state_dict().items()})
    readings = []
    for playable in (half, whole):
        scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=16)
        batch = batch_of(episodes[:8], "left")
        playable.bank.activate("left")
        with gate_pass(scorer):
            current = keep_current(scorer, batch)
            move(playable, "left", 0.003)
            readings.append(read_candidate(scorer, batch, current, config(), 0.5))
    assert readings[0].message_sum_kl == pytest.approx(readings[1].message_sum_kl, rel=1e-3)
    assert readings[0].gain.mean == pytest.approx(readings[1].gain.mean, rel=1e-2, abs=1e-6)


def test_sampler_gap_is_measured_token_by_token(episodes) -> None:
    batch = batch_of(episodes[:4], "left")
    generator = torch.Generator().manual_seed(0)
    gaps = [0.3 * torch.randn(len(p.target_N), generator=generator) for p in batch.microbatches]
    current = CurrentPolicy([], [p.sampler_logp_N + g for p, g in zip(batch.microbatches, gaps, strict=True)])
    got, d = sampler_gap(Ranks(), batch, current, "message_sum"), torch.cat(gaps).double()
    assert got["mean_abs"] == pytest.approx(float(d.abs().mean()), rel=1e-4)
    assert got["max_abs"] == pytest.approx(float(d.abs().max()), rel=1e-4)
    assert got["message_kl"] == pytest.approx(float((d.exp() - 1 - d).sum()) / len(batch.messages), rel=1e-4)
    message_N = torch.cat([p.message_N for p in batch.microbatches])
    k3 = (d.exp() - 1 - d).numpy()
    means = [k3[(message_N == m).numpy()].mean() for m in range(len(batch.messages))]
    assert sampler_gap(Ranks(), batch, current, "token_mean")["message_kl"] == pytest.approx(sum(means) / len(means), rel=1e-4)


def test_weights_enter_every_mean_of_a_reading(make_team, episodes, move, config) -> None:
    """A message of weight w counts w times, in the KL, its bound, the gain and the discounted KL: against whole copies."""
    playable, chosen = make_team(), episodes[:8]
    weight_E = [1.0, 3.0, 2.0, 1.0, 2.0, 1.0, 1.0, 3.0]
    scorer = Scorer(playable.base, playable.bank, temperature=1.0, head_chunk_tokens=16)

    def read(some, weights):
        batch = message_batch(
            agent_sequences(some, "left"),
            [float(chosen.index(e) % 4) - 1.0 for e in some],
            weight_E=weights,
            tokens_per_microbatch=200,
            device=scorer.device,
        )
        before = playable.bank.snapshot("left")
        playable.bank.activate("left")
        with gate_pass(scorer):
            current = keep_current(scorer, batch)
            move(playable, "left", 0.05)
            reading = read_candidate(scorer, batch, current, config(), 0.5)
        playable.bank.restore("left", before)
        return reading

    weighted, plain = read(chosen, weight_E), read(chosen, None)
    copies = read([e for e, w in zip(chosen, weight_E, strict=True) for _ in range(int(w))], None)
    for got, wanted in (
        (weighted.kl["exact"], copies.kl["exact"]),
        (weighted.kl["k3"], copies.kl["k3"]),
        (weighted.gain, copies.gain),
    ):
        assert (got.mean, got.standard_error, got.bound) == pytest.approx(
            (wanted.mean, wanted.standard_error, wanted.bound), rel=1e-4
        )
    for name in ("token_mean_kl", "message_sum_kl", "discounted_kl"):
        assert getattr(weighted, name) == pytest.approx(getattr(copies, name), rel=1e-4)
        assert getattr(weighted, name) != pytest.approx(getattr(plain, name), rel=1e-3)
    assert weighted.gain.mean != pytest.approx(plain.gain.mean, rel=1e-3)
