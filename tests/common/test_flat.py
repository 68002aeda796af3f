"""Nested mappings as one."""

from teamtr_lora.common.flat import flat


def test_keys_are_joined_and_nothing_is_lost() -> None:
    nested = {"a": {"b": {"c": 1, "d": [{"e": 2}]}, "f": {}}, "g": None}
    assert flat(nested) == {"a.b.c": 1, "a.b.d": [{"e": 2}], "a.f": {}, "g": None}
    assert list(flat(nested, "/")) == ["a/b/c", "a/b/d", "a/f", "g"] and flat({}) == {}
