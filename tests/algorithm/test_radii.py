"""Radii: the same total, more of it where the gain per distance was larger, and the share that maximises the modelled gain."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from teamtr_lora.algorithm.variants.radii import KEPT_SHARE, gain_slope, gain_weighted_radii, smoothed

slopes = st.dictionaries(st.text("abcd", min_size=1, max_size=3), st.none() | st.floats(0, 1e3), min_size=1, max_size=8)


@given(slopes, st.floats(1e-6, 1.0))
def test_total_is_kept_and_nobody_starves(observed: dict[str, float | None], delta: float) -> None:
    radii = gain_weighted_radii(delta, observed)
    assert radii.keys() == observed.keys()
    assert math.isclose(sum(radii.values()), len(observed) * delta, rel_tol=1e-9)
    assert min(radii.values()) >= KEPT_SHARE * delta * (1 - 1e-9)


def test_equal_without_anything_to_go_by() -> None:
    assert gain_weighted_radii(0.01, {"a": None, "b": None}) == {"a": 0.01, "b": 0.01}
    assert gain_weighted_radii(0.01, {"a": 0.0, "b": 0.0}) == {"a": 0.01, "b": 0.01}


def test_an_unseen_agent_counts_as_average() -> None:
    radii = gain_weighted_radii(0.01, {"a": 1.0, "b": 1.0, "new": None})
    assert radii["new"] == pytest.approx(0.01)


def test_the_shared_part_maximises_the_modelled_gain() -> None:
    """max sum c_i sqrt(d_i) under sum d_i = D, by a numerical optimizer, is what is shared beyond the kept part."""
    slope, delta = np.array([0.3, 1.0, 2.5]), 0.02
    total = len(slope) * delta
    best = minimize(
        lambda d: -float((slope * np.sqrt(d)).sum()),
        np.full(3, delta),
        bounds=[(1e-9, total)] * 3,
        constraints={"type": "eq", "fun": lambda d: d.sum() - total},
        tol=1e-14,
    ).x
    radii = gain_weighted_radii(delta, dict(zip("abc", slope.tolist(), strict=True)))
    shared = (np.array(list(radii.values())) - KEPT_SHARE * delta) / (1 - KEPT_SHARE)
    np.testing.assert_allclose(shared, best, rtol=1e-3)


def test_slope_does_not_depend_on_the_step_length() -> None:
    """Gain is linear and KL quadratic in the step, so a shrunk step has the slope of the whole one."""
    assert gain_slope(0.4, 0.04) == pytest.approx(gain_slope(0.4 * 0.1, 0.04 * 0.1**2))
    assert gain_slope(-0.1, 0.01) == gain_slope(0.1, 0.0) == gain_slope(math.inf, 0.1) == 0.0


def test_smoothing_starts_at_the_first_observation() -> None:
    assert smoothed(None, 2.0) == 2.0
    assert smoothed(2.0, 0.0) == 1.0
