"""Fixed-point sums against float64, in any order and division, and what they do with addends that do not fit."""

from __future__ import annotations

import math

import pytest
import torch

from teamtr_lora.algorithm.fixed_point import MORE_ROOM, FixedPointSum, unit_exponent

CPU = torch.device("cpu")


def vectors(count: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Entries of many sizes, as gradients have: the smallest are 1e-6 of the largest."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 0, 500)
    return [scale * sizes * torch.randn(500, generator=generator) for _ in range(count)]


def total(parts: list[torch.Tensor], exponent: int, addends: int) -> FixedPointSum:
    found = FixedPointSum(parts[0].numel(), exponent, addends, CPU)
    for part in parts:
        found.add(part)
    return found


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_sum_is_that_of_float64_to_the_precision_of_float32(scale: float) -> None:
    parts = vectors(100, scale)
    found = total(parts, unit_exponent(parts[0]), len(parts)).value()
    exact = torch.stack(parts).double().sum(0)
    unit = 2.0 ** unit_exponent(parts[0])
    # float32 rounds the result once, and every addend has been rounded to the unit
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-24 + len(parts) * unit / 2).all()
    assert float(((found.double() - exact) / exact).abs().median()) < 2**-24
    one_by_one = torch.zeros(500)
    for part in parts:
        one_by_one += part
    assert (found.double() - exact).abs().sum() < (one_by_one.double() - exact).abs().sum()


def test_order_and_division_change_no_bit() -> None:
    parts = vectors(30)
    exponent = unit_exponent(parts[0])
    whole = total(parts, exponent, 30).value()
    assert torch.equal(total(parts[::-1], exponent, 30).value(), whole)
    for ranks in (2, 3, 7):
        shares = [total(parts[rank::ranks], exponent, 30) for rank in range(ranks)]
        for share in shares[1:]:
            shares[0].units += share.units
        assert torch.equal(shares[0].value(), whole), ranks


def test_the_largest_entry_has_42_bits() -> None:
    for largest in (1.0, 1.5, 1e-30, 3e38):
        units = largest / 2.0 ** unit_exponent(torch.tensor([largest / 3, -largest]))
        assert 2**41 <= units < 2**42


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 2.0**30])
def test_what_does_not_fit_makes_the_sum_infinite_and_never_wraps(wrong: float) -> None:
    """The first addend is 1; a sum of 64 has 14 bits of room for larger ones."""
    parts = [torch.ones(3), torch.tensor([0.0, wrong, 0.0])]
    found = total(parts, unit_exponent(parts[0]), 64)
    assert torch.isinf(found.value()).all() and found.too_small is math.isfinite(wrong)
    fits = [torch.ones(3), torch.full((3,), 2.0**13)]
    assert torch.equal(total(fits, unit_exponent(fits[0]), 64).value(), torch.full((3,), 2.0**13 + 1))


def test_the_room_is_shared_by_all_addends() -> None:
    """Each of four would fit alone; together they would wrap."""
    parts = [torch.full((1,), 2.0**19)] * 4
    assert total(parts, -42, 4).too_small and not total(parts[:1], -42, 1).too_small
    assert torch.equal(total(parts, -42 + MORE_ROOM, 4).value(), torch.full((1,), 2.0**21))


def test_a_first_addend_of_zeros_gives_a_usable_unit() -> None:
    parts = [torch.zeros(2), torch.tensor([1e-3, 2e-3])]
    assert torch.allclose(total(parts, unit_exponent(parts[0]), 2).value(), parts[1], rtol=1e-6)
