"""Manifests, configs and weights with anything in them: they are read, or refused in one line. Nothing else happens."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teamtr_lora.base.frozen_base import BaseFacts, base_facts
from teamtr_lora.base.source import resolve
from teamtr_lora.common.errors import UserError
from teamtr_lora.registry.card import adapter_card
from teamtr_lora.registry.fit import open_contents, understand
from teamtr_lora.registry.manifest import BaseIdentity, own_hash
from teamtr_lora.registry.reader import parse_adapter, parse_team
from teamtr_lora.registry.registry_store import Registry

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["..", "/etc/passwd", "../../x", "a\nb", "\x00", "\x1b[2J", "nano", "v0001-0123456789ab", "0" * 64, "LORA", "A" * 5000]
    ),
)
LEAF = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.sampled_from([2**63, -1, 0, 1e308, 10**400]))
JSON = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of a JSON value, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*path, key), *places(inner, (*path, key))]]


def spoiled(good: dict[str, Any], data: st.DataObject) -> bytes:
    """A few keys replaced, removed or added."""
    value = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 3))):
        there = places(value)
        if not there:
            break
        *path, last = data.draw(st.sampled_from(there))
        holder = value
        for key in path:
            holder = holder[key]
        change = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "replace":
            holder[last] = data.draw(JSON)
        elif change == "remove":
            del holder[last]
        elif isinstance(holder, dict):
            holder[data.draw(TEXT)] = data.draw(JSON)
    with contextlib.suppress(ValueError):  # NaN: refused before any hash is looked at
        if "manifest_hash" in value and data.draw(st.booleans()):  # as a careful forger leaves it
            value["manifest_hash"] = own_hash(value)
    return json.dumps(value).encode("utf-8", "surrogatepass")


def only_refusals(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        str(error).encode()  # can be printed
        return None


class Parts(dict[str, Any]):
    def __repr__(self) -> str:
        return "parts of a good registry"  # not all of them in every report


@pytest.fixture(scope="module")
def parts(template: Path) -> Parts:
    registry = Registry(template)
    contents = registry.contents("demo", "checker", registry.team("demo").agents["checker"])
    return Parts(
        contents=contents,
        adapter=json.loads(contents["manifest.json"]),
        team=json.loads((template / "demo" / "team-0001.json").read_text()),
        config=json.loads(contents[CONFIG]),
    )


@pytest.fixture(scope="module")
def facts() -> BaseFacts:
    return base_facts(resolve("nano"))


@QUICK
@given(data=st.data())
def test_manifests(parts: dict[str, Any], data: st.DataObject) -> None:
    manifest = only_refusals(lambda: parse_adapter(spoiled(parts["adapter"], data), "x"))
    if manifest is not None:  # what is let through is safe to print, to put into a card and to make paths of
        assert all("/" not in name and ".." not in name for name in (manifest.team, manifest.agent, manifest.version))
        card = adapter_card(dict(manifest), parts["config"])
        assert card.count("\n---\n") == 1 and "\x1b" not in card


@QUICK
@given(data=st.data())
def test_teams(parts: dict[str, Any], data: st.DataObject) -> None:
    manifest = only_refusals(lambda: parse_team(spoiled(parts["team"], data), "x"))
    if manifest is not None:
        recipe = only_refusals(manifest.load_recipe)
        assert recipe is None or {agent.name for agent in recipe.team.agents} == set(manifest.agents)


@QUICK
@given(data=st.data())
def test_configs(parts: dict[str, Any], facts: BaseFacts, data: st.DataObject) -> None:
    contents = {**parts["contents"], CONFIG: spoiled(parts["config"], data)}
    adapter = only_refusals(lambda: understand(contents, "x", facts))
    if adapter is not None:  # the rank is the tensors', whatever else was said
        assert adapter.lora.rank == 2 and adapter.lora.targets == ["q_proj", "v_proj"]
        stored = adapter.config("nano")
        assert stored["base_model_name_or_path"] == "nano" and stored["auto_mapping"] is None


@QUICK
@given(raw=st.binary(max_size=300))
def test_bytes_for_json(parts: dict[str, Any], raw: bytes) -> None:
    for data in (raw, b"{" + raw, b'{"format": 1, ' + raw):
        assert only_refusals(lambda data=data: parse_adapter(data, "x")) is None
        assert only_refusals(lambda data=data: parse_team(data, "x")) is None
        opened = only_refusals(lambda data=data: open_contents({**parts["contents"], CONFIG: data}, "x"))
        assert opened is None or isinstance(opened[1], dict)


@QUICK
@given(data=st.data())
def test_weights(parts: dict[str, Any], data: st.DataObject) -> None:
    """Bits turned, bytes cut, inserted or put at the end, mostly in the header."""
    raw = bytearray(parts["contents"][WEIGHTS])
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header + 20) | st.integers(0, len(raw)))
        change = data.draw(st.sampled_from(["bit", "cut", "insert", "byte"]))
        if change == "cut":
            del raw[position : position + data.draw(st.integers(1, 50))]
        elif change == "insert":
            raw[position:position] = data.draw(st.binary(min_size=1, max_size=9))
        elif position < len(raw):
            raw[position] = (
                raw[position] ^ (1 << data.draw(st.integers(0, 7))) if change == "bit" else data.draw(st.integers(0, 255))
            )
    opened = only_refusals(lambda: open_contents({**parts["contents"], WEIGHTS: bytes(raw)}, "x"))
    if opened is not None:  # what is let through are finite matrices, and no more of them than there are bytes
        assert all(tensor.ndim <= 2 and tensor.isfinite().all() for tensor in opened[0].values())
        assert sum(tensor.nbytes for tensor in opened[0].values()) < len(raw)


@given(source=TEXT, task=TEXT)
def test_nothing_in_a_card_gets_out_of_its_place(parts: dict[str, Any], source: str, task: str) -> None:
    try:
        base = BaseIdentity(source=source, weights_hash="0" * 64)
    except ValueError:
        return
    card = adapter_card({**parts["adapter"], "base": base, "metrics": {}}, parts["config"], task)
    assert card.startswith("---\n") and card.count("\n---\n") == 1
