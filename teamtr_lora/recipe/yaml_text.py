"""YAML as recipes use it: safe, with the scalars of YAML 1.2, and small.

PyYAML reads YAML 1.1, where `1e-3` is text, `no` is false and `010` is 8. Here a number is what Python calls a number,
a switch is true or false, and everything else is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from teamtr_lora.common.errors import UserError

MAX_BYTES = 1_000_000
LARGE = 50_000  # characters
MAX_NODES = 100_000
MAX_NESTING = 64

_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = [
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
    ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), "<"),
]
_TEXT = "tag:yaml.org,2002:str"
_BREAKS = re.compile("[\\r\\x85\\u2028\\u2029\\ufeff]")
_MERGE = "tag:yaml.org,2002:merge"
# A stranger's large file is scanned by libyaml, which is ten times as fast; PyYAML's own errors say more.
_FAST = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Scalars(yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
    """What a scalar means: PyYAML's own words and values, by the patterns above."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def __init__(self) -> None:
        yaml.constructor.SafeConstructor.__init__(self)
        yaml.resolver.Resolver.__init__(self)

    def tag(self, event: Any) -> str:
        """A tag that is written out (!!int 3) changes nothing, except that !!str makes text of anything."""
        if event.tag == _TEXT or (event.tag in (None, "!") and not event.implicit[0]):
            return _TEXT
        tag = str(self.resolve(yaml.ScalarNode, event.value, (True, False)))
        if event.tag not in (None, "!", tag):
            raise _wrong(f"{event.value[:60]!r} is not what its tag {event.tag!r} says; leave the tag out", event)
        return tag

    def value(self, event: Any) -> Any:
        tag = self.tag(event)
        if tag == _TEXT:
            return event.value
        return self.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark), deep=True)


class _Reader:
    """Makes values out of a parser's events as they come, without PyYAML's nodes between.

    Refuses duplicate keys, keys that are not text, deep nesting, and aliases that expand without bound.
    """

    def __init__(self, events: Iterator[Any]) -> None:
        self._events, self._scalars = events, _Scalars()
        self._named: dict[str, tuple[Any, int]] = {}  # by anchor: the value, and how many values are in it (0: not yet known)
        self._size = 0  # values so far, once aliases are written out: a few lines of them can stand for billions

    def document(self) -> Any:
        next(self._events)
        if not isinstance(next(self._events), yaml.DocumentStartEvent):
            return None
        value = self._value(next(self._events), 1)
        next(self._events)
        another = next(self._events)
        if isinstance(another, yaml.DocumentStartEvent):
            raise _wrong("expected a single document, but there is another", another)
        return value

    def _value(self, event: Any, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if depth > MAX_NESTING:
            raise _wrong(f"nested more than {MAX_NESTING} deep", event)
        if event.anchor is not None:
            self._named[event.anchor] = (None, 0)
        before = self._size
        self._count(1, event)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalars.value(event)
        elif event.tag not in (None, "!", _PLAIN[type(event)]):
            raise _wrong(f"could not determine a constructor for the tag {event.tag!r}", event)
        else:
            value = (self._list if isinstance(event, yaml.SequenceStartEvent) else self._mapping)(depth)
        if event.anchor is not None:
            self._named[event.anchor] = (value, self._size - before)
        return value

    def _alias(self, event: Any) -> Any:
        if event.anchor not in self._named:
            raise _wrong(f"found undefined alias {event.anchor!r}", event)
        value, size = self._named[event.anchor]
        if not size:
            raise _wrong("an alias contains itself", event)
        self._count(size, event)
        return value

    def _count(self, more: int, event: Any) -> None:
        self._size += more
        if self._size > MAX_NODES:
            raise _wrong(f"more than {MAX_NODES} values once aliases are expanded", event)

    def _list(self, depth: int) -> list[Any]:
        values = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, depth + 1))
        return values

    def _mapping(self, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            tag = self._scalars.tag(event) if isinstance(event, yaml.ScalarEvent) else None
            if tag not in (_TEXT, _MERGE):
                raise _wrong(f"the key {repr(event.value) if tag else 'a list or mapping'} is not text; put it in quotes", event)
            key = event.value
            if key in lines:
                raise _wrong(f"the key {key!r} appears twice (first on line {lines[key]}); keep one", event)
            lines[key] = event.start_mark.line + 1
            self._count(1, event)
            value = self._value(next(self._events), depth + 1)
            if tag == _TEXT:
                values[key] = value
                continue
            for one in reversed(value) if isinstance(value, list) else [value]:
                if not isinstance(one, dict):
                    raise _wrong("expected a mapping or a list of mappings to merge", event)
                merged |= one
        return merged | values


_PLAIN = {yaml.SequenceStartEvent: "tag:yaml.org,2002:seq", yaml.MappingStartEvent: "tag:yaml.org,2002:map"}


def _wrong(what: str, event: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, what, event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Scalars` would otherwise read as something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> Any:
        """Double quotes where text has a line break YAML would fold (or one it knows and Python's files do not)."""
        return self.represent_scalar(_TEXT, text, style='"' if _BREAKS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)

for _tag, _pattern, _first in _RESOLVERS:
    _Scalars.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def parse(text: str, source: str, *, fast: bool = False) -> Any:
    """The value of one YAML document; `source` names it in errors, which say less where the file is large or this is `fast`."""
    try:
        return _Reader(yaml.parse(text, Loader=_FAST if fast or len(text) > LARGE else yaml.SafeLoader)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        said = error.problem or error.context or "not valid YAML"
        if said.startswith("but "):  # the second half of a sentence
            said = f"{error.context} {said}"
        raise UserError(f"{source}{where}: {said}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{source} line {line}: not valid YAML: the character {chr(error.character)!r} is not allowed") from error
    except ValueError as error:
        # An integer of thousands of digits.
        raise UserError(f"{source}: not valid YAML: {error}") from error


def write(data: Any) -> str:
    """Block-style YAML in the order of `data`; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
