"""The learning rate that ends at the edge of the region, against a policy whose KL is exactly quadratic."""

import math

import pytest

from teamtr_lora.algorithm.step_size import (
    AIMED_SHARE,
    MOST_CHANGE,
    MOST_GROWTH,
    MOST_PROBES,
    Pace,
    next_rate,
    probed_rate,
    remaining_rate,
)


def moved(rate: float, steps: int, scale: float = 3.0) -> float:
    """The KL of `steps` equal steps of one direction."""
    return scale * (rate * steps) ** 2


@pytest.mark.parametrize("rate", [1e-5, 3e-4, 1e-2])
@pytest.mark.parametrize("planned", [1, 4, 8])
@pytest.mark.parametrize("radius", [1e-3, 0.4])
def test_one_probe_of_a_quadratic_kl_finds_the_rate(rate: float, planned: int, radius: float) -> None:
    found = probed_rate(rate, moved(rate, 1), radius, planned)
    assert moved(found, planned) == pytest.approx(AIMED_SHARE * radius)
    assert moved(found, planned) < radius, "a bound is compared with the radius, and it is larger than the mean"


def test_a_probe_that_says_nothing_moves_by_a_large_factor() -> None:
    assert probed_rate(1e-3, 0.0, 0.01, 4) == pytest.approx(0.1)
    for broken in (math.inf, math.nan):
        assert probed_rate(1e-3, broken, 0.01, 4) == pytest.approx(1e-5)


@pytest.mark.parametrize("rates", [[1e-3], [1e-3, 4e-3], [2e-3, 1e-3, 1e-3]])
@pytest.mark.parametrize("planned", [4, 7])
def test_the_rest_of_the_steps_ends_at_the_aim(rates: list[float], planned: int) -> None:
    rest = planned - len(rates)
    radius = 3.0 * 0.008**2 / AIMED_SHARE  # 0.008 is how far the rates may go together
    rate = remaining_rate(rates, moved(sum(rates), 1), radius, planned)
    assert sum(rates) + rest * rate == pytest.approx(0.008)


def test_steps_do_not_go_on_from_the_edge_and_do_not_leap() -> None:
    assert remaining_rate([1e-3], AIMED_SHARE * 0.01, 0.01, 2) == pytest.approx(0.0, abs=1e-12)
    for beyond in (0.0101, 3.0, math.inf, math.nan):
        assert remaining_rate([1e-3], beyond, 0.01, 2) == 0.0
    for nothing in (0.0, 1e-12):
        assert remaining_rate([1e-3, 3e-3], nothing, 0.01, 3) == pytest.approx(MOST_GROWTH * 2e-3)


def test_the_next_rate_ends_all_planned_steps_at_the_edge() -> None:
    rate, radius, planned = 1e-3, 3.0 * (4.8e-3) ** 2, 4  # 4 steps of 1.2e-3 are on the edge
    reach = math.sqrt(radius / moved(rate, planned))
    assert moved(next_rate(rate, reach, taken=planned, planned=planned), planned) == pytest.approx(radius)
    reach = math.sqrt(radius / moved(2e-3, 3))  # stopped after three of them
    assert moved(next_rate(2e-3, reach, taken=3, planned=planned), planned) == pytest.approx(radius)


@pytest.mark.parametrize("rate", [3e-3, 4.8e-3, 6e-3])
def test_a_single_step_aims_inside_the_edge(rate: float) -> None:
    radius = moved(4.8e-3, 1)
    found = next_rate(rate, math.sqrt(radius / moved(rate, 1)), taken=1, planned=1)
    assert moved(found, 1) == pytest.approx(AIMED_SHARE * radius), "nothing measures it before the gate does"
    stopped = next_rate(rate, 1.5, taken=1, planned=2)
    assert stopped == pytest.approx(0.75 * rate), "one step of several has been measured on the way"


def test_one_reading_changes_the_rate_by_a_limited_factor() -> None:
    assert next_rate(1e-3, 100.0, taken=4, planned=4) == pytest.approx(MOST_CHANGE * 1e-3)
    assert next_rate(1e-3, 1e-3, taken=4, planned=4) == pytest.approx(1e-3 / MOST_CHANGE)
    assert next_rate(1e-3, 1.0, taken=4, planned=4) == 1e-3
    assert next_rate(1e-3, 1.0, taken=3, planned=4) == pytest.approx(0.75e-3)
    assert next_rate(1e-3, 100.0, taken=4, planned=4, most=1.0) == 1e-3, "the radius is not what bounds the steps"
    assert next_rate(1e-3, 0.8, taken=4, planned=4, most=1.0) == pytest.approx(0.8e-3)


def test_updates_settle_at_the_edge_from_anywhere() -> None:
    for rate in (1e-5, 1e-3, 3e-2):
        for _ in range(16):
            rate = next_rate(rate, math.sqrt(0.01 / moved(rate, 4)), taken=4, planned=4)
        assert moved(rate, 4) == pytest.approx(0.01)


@pytest.mark.parametrize("planned", [1, 3, 8])
@pytest.mark.parametrize("rate", [1e-7, 1e-4, 3e-3, 1.0])
def test_a_pace_fills_the_region_wherever_it_begins(rate: float, planned: int) -> None:
    """A whole update of it, against a KL that is exactly quadratic."""
    radius = 0.02
    pace = Pace(rate, radius, planned, automatic=True, probe=True)
    while len(pace.taken) < planned or planned == 1 and len(pace.taken) == 1:
        kl = moved(sum(pace.taken), 1)
        if pace.takes_back(kl, harms=False):
            continue
        if len(pace.taken) == planned:
            break
        if pace.taken:
            pace.after(kl)
        pace.taken.append(pace.rate)
    near = 0.5 if planned == 1 else 1.0  # a single step is left where it is off by less than a factor of two
    assert near / 2 * AIMED_SHARE * radius < moved(sum(pace.taken), 1) < 1.0001 * AIMED_SHARE * radius / near**2
    assert pace.mean == pytest.approx(sum(pace.taken) / planned) and pace.probes <= MOST_PROBES and not pace.overshot


def test_a_first_step_is_taken_back_so_often_only_and_a_fixed_rate_never() -> None:
    pace = Pace(1.0, 0.02, 3, automatic=True, probe=False)
    for probes in range(MOST_PROBES):
        pace.taken.append(pace.rate)
        assert pace.takes_back(math.inf, harms=False) and pace.rate == pytest.approx(0.01 ** (probes + 1)) and not pace.taken
    pace.taken.append(pace.rate)
    assert not pace.takes_back(math.inf, harms=False)
    fixed = Pace(1.0, 0.02, 3, automatic=False, probe=True)
    fixed.taken.append(1.0)
    assert not fixed.takes_back(math.inf, harms=True)
    fixed.after(math.inf)
    assert fixed.rate == fixed.mean == 1.0


@pytest.mark.parametrize(("share", "taken_back"), [(1.0, False), (3.9, False), (4.1, True)])
def test_without_a_probe_a_first_step_is_taken_back_only_where_it_went_too_far_by_itself(share: float, taken_back: bool) -> None:
    """The steps after it make good what it left: what counts is not that eight such steps would go too far. KL grows with the
    square of the length, so twice as long as tolerated is four times the aim."""
    pace = Pace(1e-3, 0.02, 8, automatic=True, probe=False)
    pace.taken.append(pace.rate)
    assert pace.takes_back(share * AIMED_SHARE * 0.02, harms=False) is taken_back
    assert pace.rate == pytest.approx(1e-3 / math.sqrt(share) / 8 if taken_back else 1e-3)
