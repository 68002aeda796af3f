"""YAML as recipes use it: safe, with the scalars of YAML 1.2, and small.

PyYAML reads YAML 1.1, where `1e-3` is text, `no` is false and `010` is 8. Here a number is what Python calls a number,
a switch is true or false, and everything else is text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from teamtr_lora.common.errors import UserError

MAX_BYTES = 1_000_000
LARGE = 50_000  # characters
MAX_NODES = 100_000
MAX_DEPTH = 64

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


class _Checks(yaml.composer.Composer):
    """Refuses duplicate keys, keys that are not text, deep nesting, and aliases that expand without bound."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}
    depth = 0
    peek_event: Any  # the parser's

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {MAX_DEPTH} deep", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TEXT, _MERGE):
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise yaml.composer.ComposerError(None, None, f"the key {shown} is not text; put it in quotes", key.start_mark)
            if key.value in lines:
                text = f"the key {key.value!r} appears twice (first on line {lines[key.value]}); keep one"
                raise yaml.composer.ComposerError(None, None, text, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _expanded_size(node, {})
        return node


class _Loader(_Checks, yaml.SafeLoader):
    """The words of its errors are PyYAML's."""


# The scanner of a stranger's large file is libyaml's, which is ten times as fast; what it scans goes through the same checks.
_Scanner: Any = vars(yaml.cyaml)["CParser"] if yaml.__with_libyaml__ else None
if _Scanner is None:
    _LargeLoader: Any = _Loader
else:

    class _LargeLoader(_Checks, _Scanner, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):  # type: ignore[no-redef]
        def __init__(self, stream: str) -> None:
            _Scanner.__init__(self, stream)
            yaml.composer.Composer.__init__(self)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_Loader` would otherwise read as something else."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> Any:
        """Double quotes where text has a line break YAML would fold (or one it knows and Python's files do not)."""
        return self.represent_scalar(_TEXT, text, style='"' if _BREAKS.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)

for _tag, _pattern, _first in _RESOLVERS:
    for _loader in {_Loader, _LargeLoader}:
        _loader.add_implicit_resolver(_tag, _pattern, list(_first))
    _Dumper.add_implicit_resolver(_tag, _pattern, list(_first))


def _expanded_size(node: Any, sizes: dict[Any, int]) -> int:
    """Nodes of the document once aliases are written out; a few lines of aliases can stand for billions."""
    known = sizes.get(node)  # a node equals itself only; 0 while its children are being counted
    if known == 0:
        raise yaml.composer.ComposerError(None, None, "an alias contains itself", node.start_mark)
    if known is not None:
        return known
    sizes[node] = 0
    size = 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_expanded_size(child, sizes) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        size += sum(_expanded_size(child, sizes) for pair in node.value for child in pair)
    if size > MAX_NODES:
        raise yaml.composer.ComposerError(None, None, f"more than {MAX_NODES} values once aliases are expanded", node.start_mark)
    sizes[node] = size
    return size


def parse(text: str, source: str) -> Any:
    """The value of one YAML document; `source` names it in errors."""
    try:
        return yaml.load(text, Loader=_LargeLoader if len(text) > LARGE else _Loader)  # both construct what SafeLoader does
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
        # An integer of thousands of digits, or text after an explicit tag such as !!int.
        raise UserError(f"{source}: not valid YAML: {error}") from error


def write(data: Any) -> str:
    """Block-style YAML in the order of `data`; `parse` gives the same data back."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
