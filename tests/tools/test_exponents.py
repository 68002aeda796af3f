"""tools/exponents.py: the exponent of a power law, and an interval that covers it."""

import numpy as np
import pytest
from exponents import fit_exponent
from hypothesis import given, settings
from hypothesis import strategies as st


@given(st.floats(-3, 3), st.floats(0.1, 10))
@settings(max_examples=30, deadline=None)
def test_exponent_of_a_power_law(exponent: float, factor: float) -> None:
    sizes = [2, 3, 5, 8]
    fit = fit_exponent(sizes, [factor * n**exponent for n in sizes])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9) and fit.low is None and fit.high is None


def test_bootstrap_interval_covers() -> None:
    rng, sizes = np.random.default_rng(0), np.array([2, 3, 4, 5, 6, 8])
    covered = 0
    for run in range(100):
        value_SK = sizes**1.5 * rng.lognormal(0, 0.3, size=(30, 6))
        fit = fit_exponent(sizes.tolist(), value_SK, resamples=400, seed=run)
        assert fit.exponent == pytest.approx(np.polyfit(np.log(sizes), np.log(value_SK.mean(0)), 1)[0])
        assert fit.low is not None and fit.high is not None
        covered += fit.low <= 1.5 <= fit.high
    assert covered >= 85
    with pytest.raises(ValueError, match="positive"):
        fit_exponent([1, 2], [0.0, 1.0])
