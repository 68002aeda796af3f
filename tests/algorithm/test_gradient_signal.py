"""How much of a gradient is signal, against draws of gradients whose signal is known."""

import numpy as np
import pytest

from teamtr_lora.algorithm.gradient_signal import signal_share


@pytest.mark.parametrize("messages", [(40, 40, 40), (100, 15, 5, 30)])
def test_the_squared_signal_is_right_on_average(messages: tuple[int, ...]) -> None:
    """A message's gradient is (3, 0, 4) plus noise; parts of unequal size are sums over their messages."""
    draw, shares = np.random.default_rng(0), np.array(messages) / sum(messages)
    found = []
    for _ in range(4000):
        noise = draw.normal(size=(len(messages), 3)) * 30 * np.sqrt(messages)[:, None] / sum(messages)
        parts = shares[:, None] * np.array([3.0, 0.0, 4.0]) + noise
        whole = float((parts.sum(0) ** 2).sum())
        share = signal_share(whole, float((parts**2).sum()), float((shares**2).sum()))
        assert share is not None
        found.append(share * whole)
    assert np.mean(found) == pytest.approx(25, abs=4 * np.std(found) / 4000**0.5) and np.std(found) / 4000**0.5 < 1


def test_parts_that_agree_are_all_signal_and_one_part_tells_nothing() -> None:
    assert signal_share(100.0, 0.3**2 * 100 + 0.7**2 * 100, 0.3**2 + 0.7**2) == pytest.approx(1)
    assert signal_share(9.0, 9.0, 1.0) is None and signal_share(0.0, 1.0, 0.5) is None
    assert signal_share(float("inf"), 1.0, 0.5) is None and signal_share(float("nan"), 1.0, 0.5) is None
