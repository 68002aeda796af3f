"""The text that the embedded base is made from: what it says, to whom, and that a seed fixes it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.base.source import resolve
from teamtr_lora.common.settings import SAFE_NAME
from teamtr_lora.tasks.generated.column_sum import pair_key
from teamtr_lora.tasks.machinery.drawn import split_of

PIECES = ["plan", "er", "q", "x", "7", "_", "-", "ones", "Ġthe", "Add"]


@pytest.fixture(scope="module")
def text(tool: Callable[[str], Any]) -> Any:
    return tool("nano_text")


@pytest.fixture(scope="module")
def maker(tool: Callable[[str], Any]) -> Any:
    return tool("make_nano_base")


@pytest.fixture(scope="module")
def tokenizer(maker: Any) -> Any:
    return maker.make_tokenizer(0)


def test_names_are_free_and_allowed_in_recipes(text: Any) -> None:
    author = text.Author(random.Random(0), PIECES, usual=0)
    names = [name for _ in range(300) for name in author.names(4)]
    assert all(re.fullmatch(SAFE_NAME, name) for name in names)
    assert len(set(names)) > 600 and sum(name in text.KNOWN_NAMES for name in names) < 200
    for _ in range(50):
        assert len(set(author.names(8))) == 8


def test_roles_tell_the_column_in_some_sums_and_nothing_in_others(text: Any) -> None:
    author = text.Author(random.Random(0), PIECES, usual=0)
    first = [next(iter(author.columns().roles.values())) for _ in range(400)]
    assert first.count("ones") > 100 and first.count("") > 50
    assert sum("ones" not in role and role != "" for role in first) > 50


def test_whoever_speaks_adds_the_column_of_the_turn(text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CARELESS", dict.fromkeys(text.CARELESS, 0.0))
    author = text.Author(random.Random(0), PIECES)
    sizes: Counter[int] = Counter()
    for _ in range(300):
        scene = author.columns()
        first, second = scene.prompt.split("+")
        if len(first) == len(second):
            assert split_of(pair_key((int(first), int(second)))) == "train"
        totals = [message.partition("=")[2] for _, message in scene.said][: len(first)]
        columns, carry = [], 0
        for column in range(len(totals)):
            columns.append(sum(int(number) // 10**column % 10 for number in (first, second)) + carry)
            carry = columns[-1] // 10
        assert totals == [str(total) for total in columns]
        assert [name for name, _ in scene.said[: len(scene.roles)]] == list(scene.roles)
        sizes[len(scene.roles)] += 1
    assert set(sizes) == set(range(1, 9))


def test_careless_authors_leave_something_to_learn(text: Any) -> None:
    author = text.Author(random.Random(0), PIECES, usual=1)
    right = [author._added(347, 285, 3, "abc") for _ in range(400)]
    assert 0.35 < sum([m.partition("=")[2] for _, m in said] == ["12", "13", "6"] for said in right) / 400 < 0.6


def test_choices_are_options_and_every_place_is_as_likely(text: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHOICES", ("Pick one of {}.",))
    author = text.Author(random.Random(0), PIECES)
    places: Counter[int] = Counter()
    for _ in range(1500):
        scene = author.choice()
        found = re.search(r"Pick one of ([A-Za-z0-9]+(?:, [A-Za-z0-9]+){3})\.", scene.prompt)
        for _, message in scene.said:
            assert message in scene.prompt or message.isdigit()  # "from 2 to 5" does not list 3
            if found and len(set(found[1].split(", "))) == 4:
                places[found[1].split(", ").index(message)] += 1
    assert set(places) == {0, 1, 2, 3} and min(places.values()) > 0.15 * places.total() > 15


def test_a_batch_is_fixed_by_seed_and_step(maker: Any, tokenizer: Any) -> None:
    make = lambda seed: maker.Batches(tokenizer, seed=seed, steps=3, size=6, usual=0.15)  # noqa: E731
    again = make(0)
    again[0]  # what was drawn before does not matter
    ids_B_T, labels_B_T = make(0)[2]
    assert torch.equal(ids_B_T, again[2][0]) and torch.equal(labels_B_T, again[2][1])
    assert ids_B_T.shape == labels_B_T.shape and ids_B_T.shape[1] % maker.BUCKET == 0
    other = make(1)[2][0]
    assert other.shape != ids_B_T.shape or not torch.equal(other, ids_B_T)


@pytest.mark.parametrize("view", ["shared", "per_agent"])
def test_the_loss_counts_what_the_reader_says(maker: Any, text: Any, tokenizer: Any, view: str) -> None:
    said = [("alice", "7+5+0=12"), ("b-2", "4+8+1=13")]
    scene = text.Scene({"alice": "", "b-2": "waits"}, None, "47+85", said, view, feedback=["ok", "done"])
    batches = maker.Batches(tokenizer, seed=0, steps=1, size=1, usual=0)
    ids, labels = batches.example(scene, random.Random(0))
    assert len(ids) == len(labels) and all(label in (maker.IGNORED, token) for token, label in zip(ids, labels, strict=True))
    counted = tokenizer.decode([label for label in labels if label != maker.IGNORED]).split("<|im_end|>")[:-1]
    assert counted == [text for _, text in said] if view == "shared" else counted in [["7+5+0=12"], ["4+8+1=13"]]


def test_digits_and_usual_names_are_single_tokens(text: Any, tokenizer: Any) -> None:
    for word in (*text.REFERENCE_NAMES, " ones", " tens", " hundreds", *"0123456789"):
        assert len(tokenizer.encode(word)) == 1, word
    assert len(tokenizer.encode("347+285")) == 7


def test_a_larger_base_begins_as_the_smaller_one(maker: Any, tokenizer: Any) -> None:
    nano = resolve("nano")

    def untrained(layers: int) -> Qwen3ForCausalLM:
        more = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
        return Qwen3ForCausalLM(Qwen3Config.from_pretrained(nano, **more))

    smaller, larger = Qwen3ForCausalLM.from_pretrained(nano), untrained(6)
    ids = torch.tensor([tokenizer.encode("108+195")])
    assert not torch.equal(larger(ids).logits, smaller(ids).logits)
    maker.start_from(larger, nano)
    assert torch.equal(larger(ids).logits, smaller(ids).logits)
    larger(ids).logits.logsumexp(-1).sum().backward()
    assert all(layer.mlp.down_proj.weight.grad.abs().max() > 0 for layer in larger.model.layers), "and all of it learns"
    with pytest.raises(SystemExit, match="at most as many layers"):
        maker.start_from(untrained(2), nano)
