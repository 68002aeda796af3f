"""The clipped surrogate against explicit loops over messages, and its gradient against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from teamtr_lora.algorithm.surrogate import surrogate_terms

RATIOS = ("message", "token", "sequence_mean")


def example(seed: int, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unequal messages, their tokens interleaved, in float64."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 5, 2, 9, 3, 1]
    message_N = torch.tensor([m for m, n in enumerate(lengths) for _ in range(n)])
    message_N = message_N[torch.randperm(len(message_N), generator=generator)]
    current_N = -3 * torch.rand(len(message_N), generator=generator, dtype=torch.float64)
    new_N = current_N + spread * torch.randn(len(message_N), generator=generator, dtype=torch.float64)
    advantage_M = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return new_N, current_N, message_N, advantage_M


def by_loop(
    new: list[float], current: list[float], message: list[int], advantage: list[float], clip: float, ratio: str, high: float
) -> list:
    """(objective, the same without clipping, log ratio, share clipped) of each message."""
    rows = []
    for m, a in enumerate(advantage):
        logs = [n - c for n, c, owner in zip(new, current, message, strict=True) if owner == m]
        used = {"message": [sum(logs)], "token": logs, "sequence_mean": [sum(logs) / len(logs)]}[ratio]
        values, plain, clipped = [], [], 0
        for log in used:
            w = math.exp(log)
            values.append(min(w * a, min(max(w, 1 - clip), 1 + high) * a))
            plain.append(w * a)
            clipped += w < 1 - clip or w > 1 + high
        rows.append((sum(values) / len(values), sum(plain) / len(plain), sum(logs), clipped / len(used)))
    return rows


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("high", [None, 0.28])
@pytest.mark.parametrize("seed", range(4))
def test_terms_are_those_of_explicit_loops(ratio: str, high: float | None, seed: int) -> None:
    new_N, current_N, message_N, advantage_M = example(seed)
    terms = surrogate_terms(new_N, current_N, message_N, advantage_M, clip=0.2, clip_high=high, ratio=ratio)  # type: ignore[arg-type]
    rows = by_loop(new_N.tolist(), current_N.tolist(), message_N.tolist(), advantage_M.tolist(), 0.2, ratio, high or 0.2)
    found = (terms.objective_M, terms.unclipped_M, terms.log_ratio_M, terms.clipped_M)
    for got, wanted in zip(found, zip(*rows, strict=True), strict=True):
        assert torch.allclose(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert 0 < float(terms.clipped_M.mean()) < 1, "the example should clip some ratios and not all"


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradient_is_that_of_finite_differences(ratio: str) -> None:
    new_N, current_N, message_N, advantage_M = example(11)

    def objective(logp_N: Tensor) -> Tensor:
        return surrogate_terms(logp_N, current_N, message_N, advantage_M, clip=0.2, ratio=ratio).objective_M.mean()  # type: ignore[arg-type]

    leaf = new_N.clone().requires_grad_(True)
    objective(leaf).backward()
    assert leaf.grad is not None
    step = 1e-6
    for i in range(len(new_N)):
        shift = torch.zeros_like(new_N)
        shift[i] = step
        slope = float(objective(new_N + shift) - objective(new_N - shift)) / (2 * step)
        assert abs(float(leaf.grad[i]) - slope) < 1e-8, i
    assert (leaf.grad == 0).any() and (leaf.grad != 0).any(), "clipped ratios earn nothing more, the others do"


def test_clipping_stops_gains_and_never_hides_losses() -> None:
    """The four corners of min(w A, clip(w) A) at w = 2 and w = 1/2 with clip 0.2."""
    for log_ratio, advantage, wanted in (
        (math.log(2), 1, 1.2),
        (math.log(2), -1, -2.0),
        (-math.log(2), 1, 0.5),
        (-math.log(2), -1, -0.8),
    ):
        terms = surrogate_terms(
            torch.tensor([log_ratio]),
            torch.zeros(1),
            torch.zeros(1, dtype=torch.long),
            torch.tensor([float(advantage)]),
            clip=0.2,
        )
        assert float(terms.objective_M) == pytest.approx(wanted)
        assert float(terms.clipped_M) == 1.0


def test_a_range_that_reaches_higher_clips_later_above_and_as_before_below() -> None:
    log_ratio_N = torch.log(torch.tensor([1.25, 1.4, 0.75]))
    message_N = torch.arange(3)
    terms = surrogate_terms(log_ratio_N, torch.zeros(3), message_N, torch.tensor([1.0, 1.0, -1.0]), clip=0.2, clip_high=0.28)
    assert terms.objective_M.tolist() == pytest.approx([1.25, 1.28, -0.8]) and terms.clipped_M.tolist() == [0.0, 1.0, 1.0]


def test_the_current_policy_scores_its_own_advantage() -> None:
    _, current_N, message_N, advantage_M = example(3)
    for ratio in RATIOS:
        terms = surrogate_terms(current_N, current_N, message_N, advantage_M, clip=0.2, ratio=ratio)  # type: ignore[arg-type]
        assert torch.equal(terms.objective_M, advantage_M) and not terms.clipped_M.any()


def test_a_long_message_does_not_overflow_before_it_is_clipped() -> None:
    """exp of a log ratio of 300 is infinite in float32: the clipped side must still be finite and have no NaN gradient."""
    new_N = torch.full((30,), 10.0, requires_grad=True)
    terms = surrogate_terms(new_N, torch.zeros(30), torch.zeros(30, dtype=torch.long), torch.tensor([1.0]), clip=0.2)
    assert float(terms.objective_M.detach()) == pytest.approx(1.2)
    terms.objective_M.sum().backward()
    assert new_N.grad is not None and bool(torch.isfinite(new_N.grad).all())
