"""Group advantages against a plain float64 loop."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.algorithm.advantage import group_advantages, message_discount

rewards = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -0.5]), st.floats(-50, 50, allow_nan=False, width=32))
members = st.lists(st.tuples(st.integers(0, 6), rewards), min_size=1, max_size=40)


def equal(values: list[float]) -> bool:
    return max(values) - min(values) <= 1e-9 * max(1.0, *map(abs, values))


def by_loop(returns: list[float], groups: list[int], eps: float) -> list[float]:
    """eq:group_adv as it is written, one episode at a time."""
    out = []
    for value, group in zip(returns, groups, strict=True):
        own = np.array([r for r, g in zip(returns, groups, strict=True) if g == group], dtype=np.float64)
        variance = float(own.var())
        out.append(0.0 if equal(own.tolist()) else (value - float(own.mean())) / math.sqrt(variance + eps))
    return out


@settings(max_examples=80, deadline=None)
@given(members, st.sampled_from([0.5, 1.0, 3.0, 1e9]), st.sampled_from([1e-8, 1e-6, 1e-2, 1.0]))
def test_advantages_are_those_of_a_plain_loop(pairs: list[tuple[int, float]], clip: float, eps: float) -> None:
    groups, returns = [7 * g - 3 for g, _ in pairs], [r for _, r in pairs]  # any integers name a group
    got = group_advantages(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups), clip=clip, eps=eps)
    wanted = np.array(by_loop(returns, groups, eps))
    tolerance = 2e-6 * np.abs(wanted) + 1e-13 * max(1.0, max(map(abs, returns))) / math.sqrt(eps) + 1e-30
    assert (np.abs(got.unclipped_E.double().numpy() - wanted) <= tolerance).all()
    assert (np.abs(got.clipped_E.double().numpy() - np.clip(wanted, -clip, clip)) <= tolerance).all()
    distinct = {g: [r for r, other in zip(returns, groups, strict=True) if other == g] for g in groups}
    assert got.groups == len(distinct)
    assert got.zero_variance_groups == sum(map(equal, distinct.values()))


def test_equal_returns_give_exactly_zero() -> None:
    for value in (0.1, 1 / 3, 1e-12, 12345.678, -0.7):
        for size in (1, 2, 3, 7, 10):  # 0.1 summed three times and divided by three is not 0.1
            equal_E = torch.full((size,), value, dtype=torch.float64)
            got = group_advantages(equal_E, torch.zeros(size, dtype=torch.long), clip=3.0, eps=1e-12)
            assert got.unclipped_E.tolist() == [0.0] * size
            assert got.zero_variance_groups == got.groups == 1 and got.clip_rate == 0.0


def test_sums_of_the_same_rewards_in_another_order_are_equal() -> None:
    returns = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6 * 1e6, 0.6 * 1e6 + 1e-7, 0.0, 1e-4], dtype=torch.float64)
    assert len(set(returns.tolist())) == 6
    for kind in ("group", "no_norm", "no_clip", "leave_one_out"):
        got = group_advantages(returns, torch.tensor([0, 0, 1, 1, 2, 2]), clip=3.0, eps=1e-12, kind=kind)
        assert got.zero_variance_groups == 2 and got.unclipped_E[:4].tolist() == [0.0] * 4 and got.unclipped_E[5] > 0


def test_one_success_among_many_has_the_closed_form_and_is_clipped() -> None:
    size = 16  # one success: p = 1/16, so a = (1 - p) / sqrt(p (1 - p)) = sqrt(15) for it and -sqrt(1/15) for the others
    returns = torch.tensor([1.0] + [0.0] * (size - 1))
    got = group_advantages(returns, torch.zeros(size, dtype=torch.long), clip=3.0, eps=1e-12)
    assert abs(float(got.unclipped_E[0]) - math.sqrt(15)) < 1e-6
    assert torch.allclose(got.unclipped_E[1:], torch.full((size - 1,), -math.sqrt(1 / 15)))
    assert float(got.clipped_E[0]) == 3.0
    assert got.clip_rate == 1 / size


def test_eps_is_inside_the_root() -> None:
    got = group_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), clip=9.0, eps=3.0)
    assert torch.allclose(got.unclipped_E, torch.tensor([-0.5, 0.5]))  # 1 / sqrt(1 + 3), not 1 / (1 + 3) or 1 / (1 + sqrt 3)


def test_groups_do_not_see_each_other() -> None:
    returns, groups = torch.tensor([0.0, 1.0, 5.0, 9.0]), torch.tensor([4, 4, 2, 2])
    alone = group_advantages(returns[:2], groups[:2], clip=3.0, eps=1e-6)
    together = group_advantages(returns, groups, clip=3.0, eps=1e-6)
    assert torch.equal(alone.clipped_E, together.clipped_E[:2])


def test_advantages_that_are_not_normalised_are_clipped_all_the_same() -> None:
    got = group_advantages(torch.tensor([0.0, 4.0]), torch.tensor([0, 0]), clip=0.5, eps=1e-6, kind="no_norm")
    assert got.unclipped_E.tolist() == [-2.0, 2.0] and got.clipped_E.tolist() == [-0.5, 0.5] and got.clip_rate == 1.0
    for kind in ("no_clip", "leave_one_out"):
        free = group_advantages(torch.tensor([0.0, 4.0]), torch.tensor([0, 0]), clip=0.5, eps=1e-6, kind=kind)
        assert torch.equal(free.clipped_E, free.unclipped_E) and free.clip_rate == 0.0


def test_the_discount_is_the_recipes_or_of_the_longest_episode() -> None:
    assert message_discount("auto", 4) == 0.75 and message_discount("auto", 1) == 0.0
    assert message_discount(0.9, 4) == 0.9 and message_discount(1, 4) == 1.0
