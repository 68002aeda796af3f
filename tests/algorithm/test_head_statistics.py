"""The training pass's scores against float64 softmaxes over the whole vocabulary, values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from teamtr_lora.algorithm.head_statistics import read_with_statistics, score_with_statistics
from teamtr_lora.algorithm.token_kl import score_tokens

N, D, V = 23, 16, 101


def case(dtype: torch.dtype, step: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head, hidden = torch.randn(V, D, dtype=dtype), torch.randn(N, D, dtype=dtype)
    return head, hidden, hidden + step * torch.randn(N, D, dtype=dtype), torch.randint(0, V, (N,))


def reference(head: Tensor, current: Tensor, hidden: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and KL(current || new) by their definitions."""
    logp = torch.log_softmax(hidden @ head.t() / temperature, -1)
    logp_cur = torch.log_softmax(current @ head.t() / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], (logp_cur.exp() * (logp_cur - logp)).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_values_and_gradients_are_those_of_the_definition(temperature: float) -> None:
    head, current, hidden, target = case(torch.float64)
    weight_logp, weight_kl = torch.randn(N, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    found = []
    kept = score_with_statistics(current, head, target, temperature=temperature, chunk_tokens=7)[1]
    for ours in (True, False):
        leaf = hidden.clone().requires_grad_()
        if ours:
            scores, _ = score_with_statistics(leaf, head, target, temperature=temperature, chunk_tokens=5, current=kept)
            assert scores.kl_N is not None
            logp, kl = scores.logp_N, scores.kl_N
        else:
            logp, kl = reference(head, current, leaf, target, temperature)
        (weight_logp * logp + weight_kl * kl).sum().backward()
        assert leaf.grad is not None
        found.append((logp.detach(), kl.detach(), leaf.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_a_first_pass_has_no_kl_and_is_what_later_passes_measure_from() -> None:
    head, hidden, _, target = case(torch.float64)
    scores, kept = score_with_statistics(hidden, head, target, temperature=0.9, chunk_tokens=50)
    assert scores.kl_N is None
    again, _ = score_with_statistics(hidden, head, target, temperature=0.9, chunk_tokens=3, current=kept)
    assert again.kl_N is not None and float(again.kl_N.abs().max()) < 1e-13
    torch.testing.assert_close(again.logp_N, scores.logp_N)


def test_reading_has_the_same_values_from_one_head_product() -> None:
    head, current, hidden, target = case(torch.float64)
    how = {"temperature": 0.9, "chunk_tokens": 7}
    with FlopCounterMode(display=False) as without_kl:
        first, kept = score_with_statistics(current, head, target, **how)
    with FlopCounterMode(display=False) as scoring:
        scored, _ = score_with_statistics(hidden, head, target, current=kept, **how)
    with FlopCounterMode(display=False) as reading:
        read = read_with_statistics(hidden.requires_grad_(), head, target, current=kept, **how)
    assert torch.equal(read.logp_N, scored.logp_N) and read.kl_N is not None and torch.equal(read.kl_N, scored.kl_N)
    assert not read.logp_N.requires_grad and not read.kl_N.requires_grad
    assert 0 < 2 * reading.get_total_flops() == scoring.get_total_flops()
    assert scoring.get_total_flops() == without_kl.get_total_flops(), "the exact KL takes no product of its own"
    alone = read_with_statistics(current, head, target, **how)
    assert alone.kl_N is None and torch.equal(alone.logp_N, first.logp_N)


def test_float32_agrees_with_the_scores_of_the_gate() -> None:
    head, current, hidden, target = case(torch.float32, step=0.1)
    kept = score_with_statistics(current, head, target, temperature=1.0, chunk_tokens=9)[1]
    ours, _ = score_with_statistics(hidden, head, target, temperature=1.0, chunk_tokens=9, current=kept)
    gate = score_tokens(hidden, head, target, temperature=1.0, chunk_tokens=9, current_ND=current)
    assert ours.kl_N is not None and gate.kl_N is not None
    torch.testing.assert_close(ours.logp_N, gate.logp_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.kl_N, gate.kl_N, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the half-precision path needs a GPU; its formulas are tested above")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = (torch.randn(5000, 64) / 8).to("cuda", dtype)
    current, target = torch.randn(300, 64, device="cuda").to(dtype), torch.randint(0, 5000, (300,), device="cuda")
    hidden = (current + 0.05 * torch.randn(300, 64, device="cuda")).to(dtype)
    kept = score_with_statistics(current, head, target, temperature=0.8, chunk_tokens=128)[1]
    leaf, wide = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    scores, _ = score_with_statistics(leaf, head, target, temperature=0.8, chunk_tokens=128, current=kept)
    logp, kl = reference(head.double(), current.double(), wide, target, 0.8)
    assert scores.kl_N is not None
    read = read_with_statistics(hidden, head, target, temperature=0.8, chunk_tokens=128, current=kept)
    assert read.kl_N is not None and torch.equal(read.logp_N, scores.logp_N) and torch.equal(read.kl_N, scores.kl_N)
    assert float((scores.logp_N - logp).abs().max()) < 1e-4 and float((scores.kl_N - kl).abs().max()) < 1e-4
    (scores.logp_N.sum() * 64).backward()
    (logp.sum() * 64).backward()
    assert leaf.grad is not None and wide.grad is not None
    assert float((leaf.grad.double() - wide.grad).norm() / wide.grad.norm()) < (1e-3 if dtype == torch.float16 else 8e-3)
