"""Exact KL, k1 and k3 against float64, and the chunked head against the whole one: values, gradients and memory."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from teamtr_lora.algorithm.token_kl import k1_terms, k3_terms, kl_terms, score_tokens


def plain_kl(cur: Tensor, new: Tensor) -> Tensor:
    """sum p (log p - log q) in float64, from logits."""
    logp, logq = torch.log_softmax(cur.double(), -1), torch.log_softmax(new.double(), -1)
    return torch.special.entr(logp.exp()).neg().sum(-1) - (logp.exp() * logq).sum(-1)


def kl_of_logits(cur: Tensor, new: Tensor) -> Tensor:
    return kl_terms(torch.log_softmax(cur, -1), torch.log_softmax(new, -1))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_exact_kl_is_the_float64_sum(scale: float) -> None:
    cur, new = scale * noise(40, 300), scale * noise(40, 300, seed=1)
    assert torch.allclose(kl_of_logits(cur, new).double(), plain_kl(cur, new), rtol=2e-5, atol=1e-6)


def test_small_steps_keep_their_relative_accuracy() -> None:
    """Where the plain float32 sum drowns: KL of 1e-12 nats is still right to a percent."""
    cur = noise(20, 300)
    for step in (1e-2, 1e-3, 1e-4, 1e-5):
        new = cur + step * noise(20, 300, seed=2)
        got, wanted = kl_of_logits(cur, new).double(), plain_kl(cur, new)
        assert torch.allclose(got.sum(), wanted.sum(), rtol=0.02), step
        assert (got >= 0).all()


def test_extreme_logits_are_finite_and_non_negative() -> None:
    corners = torch.tensor([-200.0, 0.0, 200.0])
    cur = torch.cartesian_prod(corners, corners, corners)
    pairs = [(a, b) for a in cur for b in cur]
    left, right = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
    got = kl_of_logits(left, right)
    assert torch.isfinite(got).all() and (got >= 0).all()
    assert torch.allclose(got.double(), plain_kl(left, right), rtol=1e-5, atol=1e-6)
    leaf = right.clone().requires_grad_(True)
    kl_of_logits(left, leaf).sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


def test_gradient_is_q_minus_p() -> None:
    """d KL(p || softmax(z)) / dz = q - p: the gradient of the plain formula, in float64 by autograd and in closed form."""
    for scale in (0.01, 1.0, 20.0):
        cur, new = noise(12, 100), noise(12, 100) + scale * noise(12, 100, seed=3)
        leaf = new.clone().requires_grad_(True)
        kl_of_logits(cur, leaf).sum().backward()
        reference = new.double().requires_grad_(True)
        plain_kl(cur, reference).sum().backward()
        assert leaf.grad is not None and reference.grad is not None
        assert torch.allclose(reference.grad, torch.softmax(new.double(), -1) - torch.softmax(cur.double(), -1), atol=1e-12)
        assert torch.allclose(leaf.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)


def test_identical_policies_are_exactly_zero_apart() -> None:
    cur = 10 * noise(30, 200)
    assert kl_of_logits(cur, cur.clone()).tolist() == [0.0] * 30


def test_kl_is_of_the_current_policy_relative_to_the_candidate() -> None:
    """The direction: KL(cur || new), not KL(new || cur)."""
    cur, new = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    p = torch.softmax(cur.double(), -1)
    wanted = float((p * (p.log() - torch.log(torch.tensor(0.5)))).sum())
    assert float(kl_of_logits(cur, new)) == pytest.approx(wanted, rel=1e-5)
    assert abs(float(kl_of_logits(new, cur)) - wanted) > 0.05


def test_sampled_estimators_are_unbiased() -> None:
    """The expectation over the current policy, by enumeration of the vocabulary, is the KL."""
    logp, logq = torch.log_softmax(noise(8, 50).double(), -1), torch.log_softmax(noise(8, 50, seed=4).double(), -1)
    wanted = (logp.exp() * (logp - logq)).sum(-1)
    for terms in (k1_terms, k3_terms):
        assert torch.allclose((logp.exp() * terms(logp, logq)).sum(-1), wanted, rtol=1e-12, atol=1e-14)
    assert (k3_terms(logp, logq) >= 0).all() and (k1_terms(logp, logq) < 0).any()
    assert torch.allclose(kl_terms(logp, logq), wanted, rtol=1e-12, atol=1e-14)


def scored(N: int = 37, V: int = 90, D: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    target_N = torch.randint(V, (N,), generator=torch.Generator().manual_seed(5))
    return noise(N, D), noise(N, D) + 0.1 * noise(N, D, seed=6), noise(V, D, seed=7), target_N


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_scores_are_those_of_the_full_softmax_at_temperature_t(temperature: float) -> None:
    hidden_ND, current_ND, head_VD, target_N = scored()
    got = score_tokens(hidden_ND, head_VD, target_N, temperature=temperature, chunk_tokens=8, current_ND=current_ND)
    new, cur = (h.double() @ head_VD.double().t() / temperature for h in (hidden_ND, current_ND))
    logp = torch.log_softmax(new, -1)[torch.arange(len(target_N)), target_N]
    assert torch.allclose(got.logp_N.double(), logp, rtol=1e-5, atol=1e-5)
    assert got.kl_N is not None
    assert torch.allclose(got.kl_N.double(), plain_kl(cur, new), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a GPU; what it computes is tested on the CPU")
@pytest.mark.parametrize("step", [1e-4, 0.1, 5.0])
def test_on_a_gpu_a_kernel_finds_the_same(step: float) -> None:
    hidden_ND, _, head_VD, target_N = scored(V=9000)
    current_ND = hidden_ND + step * noise(*hidden_ND.shape, seed=6)
    given = {"temperature": 0.7, "chunk_tokens": 8}
    there = [each.cuda() for each in (hidden_ND, head_VD, target_N)]
    got = score_tokens(*there, **given, current_ND=current_ND.cuda())
    wanted = score_tokens(hidden_ND, head_VD, target_N, **given, current_ND=current_ND)
    assert got.kl_N is not None and wanted.kl_N is not None
    assert torch.allclose(got.logp_N.cpu(), wanted.logp_N, rtol=1e-5, atol=1e-5)
    assert torch.allclose(got.kl_N.cpu(), wanted.kl_N, rtol=1e-2, atol=1e-11)
    assert torch.equal(got.logp_N, score_tokens(*there, **given).logp_N)  # the ratio of a policy to itself is 1
    assert not score_tokens(*there, **given, current_ND=there[0]).kl_N.any()


def test_chunks_change_neither_values_nor_gradients() -> None:
    hidden_ND, current_ND, head_VD, target_N = scored()
    results = []
    for chunk in (1, 8, 37, 1000):
        leaf = hidden_ND.clone().requires_grad_(True)
        got = score_tokens(leaf, head_VD, target_N, temperature=0.8, chunk_tokens=chunk, current_ND=current_ND)
        assert got.kl_N is not None
        (got.logp_N.sum() - 0.7 * got.kl_N.sum()).backward()
        results.append((got.logp_N.detach(), got.kl_N.detach(), leaf.grad))
    for other in results[:-1]:
        for got, wanted in zip(other, results[-1], strict=True):
            assert torch.allclose(got, wanted, rtol=1e-4, atol=2e-5)


def test_without_a_current_policy_there_is_no_kl_and_no_tokens_is_no_error() -> None:
    hidden_ND, current_ND, head_VD, target_N = scored()
    assert score_tokens(hidden_ND, head_VD, target_N, temperature=1.0, chunk_tokens=8).kl_N is None
    empty = score_tokens(hidden_ND[:0], head_VD, target_N[:0], temperature=1.0, chunk_tokens=8, current_ND=current_ND[:0])
    assert empty.logp_N.shape == (0,) and empty.kl_N is not None and empty.kl_N.shape == (0,)


def peak_bytes(N: int, V: int, D: int, chunk: int) -> int:
    """Peak of what torch allocates on the CPU during a forward and a backward pass of the head."""
    hidden_ND, current_ND, head_VD, target_N = scored(N, V, D)
    leaf = hidden_ND.requires_grad_(True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        got = score_tokens(leaf, head_VD, target_N, temperature=1.0, chunk_tokens=chunk, current_ND=current_ND)
        assert got.kl_N is not None
        (got.logp_N.sum() - got.kl_N.sum()).backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    V, D, chunk, N = 4096, 8, 32, 64
    peak_bytes(N, V, D, chunk)  # the first pass also allocates what libraries keep
    small, large, whole = peak_bytes(N, V, D, chunk), peak_bytes(8 * N, V, D, chunk), peak_bytes(8 * N, V, D, 8 * N)
    per_vocabulary_row = 7 * N * V * 4
    assert small > chunk * V * 4, "the measurement sees the chunk's logits"
    assert large - small < 0.05 * per_vocabulary_row
    assert whole - small > per_vocabulary_row, "the same pass without chunks does grow, so the measurement can tell"
