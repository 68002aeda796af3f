"""How many tokens a pass takes, on a CPU, on a GPU that is made up, and after a resume; and which rows share a prefix there."""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.memory_model import CPU_TOKENS, MARGIN, SIZES, update_memory, update_peak
from teamtr_lora.common.ranks import deal
from teamtr_lora.team import Episode, Message, agent_sequences
from teamtr_lora.training.microbatch_size import microbatch_tokens, team_shape, update_bytes
from teamtr_lora.training.row_layout import ATTENTION_COSTS, KEYS_A_TOKEN, Numbered, Row, fill, fill_end_to_end, pack

GIB = 2**30


def test_on_a_cpu_auto_is_a_constant(make_team, config) -> None:
    playable = make_team()
    assert microbatch_tokens(playable, config(tokens_per_microbatch="auto")) == CPU_TOKENS
    assert microbatch_tokens(playable, config(tokens_per_microbatch=77)) == 77


@pytest.fixture
def on_gpu(make_team, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A team whose base says that it is on a GPU, which has as much memory as the test says."""
    memory = SimpleNamespace(free=0, lendable=0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    playable = make_team()
    playable.base = replace(playable.base, device=torch.device("cuda"), dtype=torch.float16)
    playable.sampler = SimpleNamespace(lendable_bytes=lambda: memory.lendable)
    return SimpleNamespace(playable=playable, memory=memory)


def test_on_a_gpu_it_fits_into_what_is_free(on_gpu: Any, config, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tokens_per_microbatch="auto")
    playable, memory = on_gpu.playable, on_gpu.memory
    facts, shape = base_facts(playable.base.folder), team_shape(playable, settings)
    assert shape.path == "compiled" and shape.value == 2
    memory.free = 60 * GIB
    assert microbatch_tokens(playable, settings) == SIZES[-1]  # so small a base is never enough work
    memory.free = int(1.3 * update_peak(update_memory(facts, replace(shape, tokens=4096))))
    assert microbatch_tokens(playable, settings) == 4096 and not caplog.records
    memory.lendable = 10 * GIB
    assert microbatch_tokens(playable, settings) == 8192  # an engine that sleeps lends its memory
    memory.free, memory.lendable = 1, 0
    with caplog.at_level(logging.WARNING):
        assert microbatch_tokens(playable, settings) == SIZES[0]
    assert "training.gradient_checkpointing=true" in caplog.text


def test_an_update_is_as_large_as_its_share_of_a_stage(on_gpu: Any, config) -> None:
    """Rollouts that share a stage's items have fewer each; a run on a CPU asks for nothing."""
    playable = on_gpu.playable
    whole, shared = (team_shape(playable, config(matched=how, items_per_stage=16, window=1)) for how in ("update", "stage"))
    assert shared.learned_tokens * 2 == whole.learned_tokens
    facts, shape = base_facts(playable.base.folder), team_shape(playable, config())
    least = update_bytes(playable, config(), 4096)
    assert least == int(MARGIN * update_peak(update_memory(facts, replace(shape, tokens=4096)))), "as choose_tokens fits it"
    long = config(max_message_tokens=512)
    assert update_bytes(playable, long, 256) == update_bytes(playable, long, 512), "a message is never cut"
    playable.ranks = SimpleNamespace(size=3)
    assert shape.learned_tokens / 3 <= team_shape(playable, config()).learned_tokens < shape.learned_tokens / 2
    playable.base = replace(playable.base, device=torch.device("cpu"))
    assert update_bytes(playable, config(), 4096) == 0 < least


def group_of(prompt: int, message: int, count: int = 8, group: int = 0) -> list[Numbered]:
    """`count` messages after one prompt, of these many tokens."""
    episodes = [Episode("", group, "", 0) for _ in range(count)]
    for number, episode in enumerate(episodes):
        said = [1000 + number] * message
        episode.messages = [Message("a", 0, list(range(prompt)), said, [0.0] * message, "", "stop", "")]
    return [Numbered(sequence, i) for i, sequence in enumerate(agent_sequences(episodes, "a"))]


@pytest.mark.parametrize(
    ("prompt", "message", "cpu", "cuda"),
    [(512, 32, True, True), (128, 256, True, False), (512, 1024, False, False), (32, 256, False, False)],
)
def test_a_shared_prefix_has_to_pay_for_its_mask(prompt: int, message: int, cpu: bool, cuda: bool) -> None:
    for device, shared in (("cpu", cpu), ("cuda", cuda)):
        rows = pack(group_of(prompt, message), longest=10**6, hidden_size=2048, cost=ATTENTION_COSTS[device])
        assert (len(rows) == 1) == shared, device


def test_rows_with_a_mask_stay_apart_where_that_is_asked_for() -> None:
    alone = [Row([member]) for member in group_of(10, 30, 3)]
    shared = [Row(group_of(20, 5, 4, group=1), 20)]  # as long as each of the others
    assert [len(part) for part in fill(alone + shared, 10**6)] == [4]
    assert [len(part) for part in fill(alone + shared, 10**6, apart=True)] == [3, 1]


def test_rows_end_to_end_fill_micro_batches_evenly() -> None:
    """Groups of 8 x 30 tokens after 10 in common, divided where the budget says: no micro-batch is a small remainder."""
    groups = [group_of(10, 30, 8, group=group) for group in range(20)]
    for budget in (600, 1200, 5000):
        parts = [sum(row.length for row in part) for part in fill_end_to_end(groups, budget)]
        assert max(parts) <= budget and len(parts) == -(-20 * 250 // budget)
        assert 20 * 250 <= sum(parts) <= 20 * 250 + 10 * len(parts) and min(parts) >= max(parts) / 2
    members = [member for part in fill_end_to_end(groups, 300) for row in part for member in row.members]
    assert members == [member for group in groups for member in group]


def test_copies_of_a_long_opening_count_as_well() -> None:
    """A group of 64 short messages after 1,600 tokens: every message is given the keys of all of those."""
    budget, long = 4000, [group_of(1600, 20, 64)]
    copies = [sum(row.prefix * len(row.members) for row in part) for part in fill_end_to_end(long, budget)]
    assert len(copies) > 2 and max(copies) <= KEYS_A_TOKEN * (budget - 1600) and sum(copies) == 64 * 1600


def test_one_sequence_opens_a_micro_batch_that_has_nothing_to_share() -> None:
    """Compiled layers know rows with openings: without one they would be compiled again."""
    groups = [group_of(10, 30, 3, group=group) for group in range(2)]
    for budget, openings in ((1000, [[10, 10]]), (45, [[10]] * 6), (80, [[10], [10], [10]])):
        parts = list(fill_end_to_end(groups, budget))
        assert [[row.prefix for row in part if row.prefix] for part in parts] == openings
    (part,) = fill_end_to_end([group_of(0, 30, 3)], 1000)  # nothing in common: a row each, none is lost
    assert [len(row.members) for row in part] == [1, 1, 1]


def test_two_processes_have_the_same_work_in_every_pass() -> None:
    draw = random.Random(0)
    for lengths in ([draw.randint(20, 60) for _ in range(count)] for count in (30, 47, 66, 101, 133)):
        rows = [Row(group_of(10, length - 10, 1)) for length in lengths]
        parts = list(fill(rows, 1024))
        sizes = [len(part) * max(row.length for row in part) for part in parts]
        assert sorted(row.length for part in parts for row in part) == sorted(lengths)
        assert max(sizes) <= 1024 and len(parts) <= sum(lengths) / 1024 + 3
        first = sum(size for size, owner in zip(sizes, deal(sizes, 2), strict=True) if owner == 0)
        assert 0.46 < first / sum(sizes) < 0.54
    assert [len(part) for part in fill([Row(group_of(10, 890, 1))] * 2, 512)] == [1, 1]
