"""Logic grids: clues over positions in a row of houses, and a solver that counts solutions.

Values are numbered through all attributes: value v of attribute a is a * houses + v. A domain is a bit mask of houses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISTANCE = {"next": 1, "one_between": 2, "two_between": 3}
MOST_HOUSES = 6
# For the kinds between two values: how far to the right of the first value's house the second one's may be.
STEPS: dict[str, tuple[int, ...]] = {
    "same": (0,),
    "directly_left": (1,),
    "left": tuple(range(1, MOST_HOUSES)),
    "right": tuple(range(-1, -MOST_HOUSES, -1)),
    **{kind: (-distance, distance) for kind, distance in DISTANCE.items()},
}


@dataclass(frozen=True)
class Clue:
    """`first` and, for the kinds between two values, `second` are values; for at and not_at `second` is a house, from 0."""

    kind: str
    first: int
    second: int


def holds(clue: Clue, places: Sequence[int]) -> bool:
    """Whether a clue is true when value v lives in house places[v]."""
    first = places[clue.first]
    if clue.kind in ("at", "not_at"):
        return (first == clue.second) == (clue.kind == "at")
    return places[clue.second] - first in STEPS[clue.kind]


def solutions(houses: int, attributes: int, clues: Sequence[Clue], limit: int = 2) -> list[list[int]]:
    """Up to `limit` solutions, each as the house of every value."""
    found: list[list[int]] = []
    _search([2**houses - 1] * (houses * attributes), houses, clues, limit, found)
    return found


def _search(domains: list[int], houses: int, clues: Sequence[Clue], limit: int, found: list[list[int]]) -> None:
    if not _propagate(domains, houses, clues):
        return
    open_values = [v for v, domain in enumerate(domains) if domain & (domain - 1)]
    if not open_values:
        found.append([domain.bit_length() - 1 for domain in domains])
        return
    value = min(open_values, key=lambda v: domains[v].bit_count())
    left = domains[value]
    while left and len(found) < limit:
        bit = left & -left
        left -= bit
        _search([*domains[:value], bit, *domains[value + 1 :]], houses, clues, limit, found)


def _propagate(domains: list[int], houses: int, clues: Sequence[Clue]) -> bool:
    """Narrows the domains until nothing changes; False when one is empty."""
    while True:
        before = list(domains)
        for clue in clues:
            _narrow(domains, clue, 2**houses - 1)
        if not all(domains) or not _all_different(domains, houses):
            return False
        if domains == before:
            return True


def _narrow(domains: list[int], clue: Clue, everywhere: int) -> None:
    first = domains[clue.first]
    if clue.kind in ("at", "not_at"):
        house = 1 << clue.second
        domains[clue.first] = first & (house if clue.kind == "at" else ~house)
        return
    second, before, after = domains[clue.second], 0, 0
    for step in STEPS[clue.kind]:
        before |= _shifted(second, -step)
        after |= _shifted(first, step)
    domains[clue.first] = first & before
    domains[clue.second] = second & after & everywhere


def _shifted(mask: int, step: int) -> int:
    return mask << step if step >= 0 else mask >> -step


def _all_different(domains: list[int], houses: int) -> bool:
    for start in range(0, len(domains), houses):
        once = twice = 0
        for value in range(start, start + houses):
            domain = domains[value]
            if not domain & (domain - 1):  # settled: nobody else of this attribute lives there
                for other in range(start, start + houses):
                    if other != value:
                        domains[other] &= ~domain
            twice |= once & domains[value]
            once |= domains[value]
        if once != 2**houses - 1:
            return False
        only = once & ~twice  # houses that a single value can still have
        for value in range(start, start + houses):
            if domains[value] & only:
                domains[value] &= only
    return all(domains)
