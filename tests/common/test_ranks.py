"""Dealing parts out, and the two collectives, between threads that stand for processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from teamtr_lora.common import ranks as ranks_module
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.ranks import Ranks, _Group, deal


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """`work` on as many ranks at once; what it returned or raised, in their order."""
    found: list[Any] = [None] * size
    store = distributed.HashStore()

    def run(rank: int) -> None:
        try:
            found[rank] = work(_Group(store, rank, size))
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_parts_are_dealt_so_that_no_rank_has_much_more() -> None:
    costs = [5.0, 1.0, 1.0, 9.0, 4.0, 4.0]
    owners = deal(costs, 3)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sorted(loads) == [6.0, 9.0, 9.0] or max(loads) == 9.0
    assert deal(costs, 1) == [0] * 6
    assert sorted(deal([1.0] * 5, 3)) == [0, 0, 1, 1, 2]
    assert deal([], 2) == []


def test_every_rank_gets_what_all_have_given() -> None:
    found = on_ranks(3, lambda ranks: ranks.gather({"rank": ranks.rank, "text": "x" * 1000 * ranks.rank}))
    assert [[each["rank"] for each in one] for one in found] == [[0, 1, 2]] * 3
    assert found[1][2]["text"] == "x" * 2000
    assert on_ranks(3, lambda ranks: ranks.broadcast(ranks.rank)) == [0, 0, 0]


def test_integers_are_added_up_in_place() -> None:
    def work(ranks: Ranks) -> list[int]:
        units = torch.tensor([2**60, ranks.rank, -(2**60)])
        ranks.add_up(units)
        return units.tolist()

    assert on_ranks(3, work) == [[3 * 2**60, 3, -3 * 2**60]] * 3


def test_ranks_that_differ_are_told_by_number() -> None:
    found = on_ranks(2, lambda ranks: ranks.check_equal(ranks.rank, "its number"))
    assert all(str(error) == "rank 1 has 1 and rank 0 has 0 as its number; the run is stopped" for error in found)
    assert on_ranks(2, lambda ranks: ranks.check_equal("a", "its letter")) == [None, None]


def test_the_first_that_fails_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.0)
    assert sorted(on_ranks(3, lambda ranks: ranks.announce_failure())) == [False, False, True]
    assert Ranks().announce_failure()


def test_one_process_is_the_same_without_a_peer() -> None:
    ranks = Ranks()
    tensor = torch.arange(3)
    ranks.add_up(tensor)
    assert ranks.first and ranks.gather(5) == [5] and tensor.tolist() == [0, 1, 2]
    assert ranks.idle_share() == 0.0 and list(ranks.take_turns()) == [True]
