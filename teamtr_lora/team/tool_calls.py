"""Tool calls in what an agent says: found in the usual spellings, written in one canonical JSON form (app:pnp-protocol).

Pure functions of a text. What is read: {"name", "arguments"}, {"tool", "args"} and their like, OpenAI's {"function": {...}} and
{"tool_calls": [...]}, any of them in a code fence or in <tool_call> tags, <function=NAME>{...}</function>, and NAME(key="value")
in such tags, or alone where the caller says which tools there are (prose and formulas look like it too).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

NAME_KEYS = ("name", "tool", "tool_name", "function", "function_name", "action")
ARGUMENT_KEYS = ("arguments", "args", "parameters", "kwargs", "input", "action_input")
MOST_DEPTH = 32  # of lists and objects in a call; deeper is no call
MOST_TRIES = 256  # places in one message where a call may begin: a megabyte of braces must not take minutes
LONGEST_PYTHON = 4000  # characters of NAME(key=value) that are read

_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_OBJECT = re.compile(r'<function=([A-Za-z_][A-Za-z0-9_.-]{0,127})>\s{0,8}(?=\{)|(?:\[\s{0,8})?\{\s*"')
_PYTHON = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]{0,127})\s*\((.*)\)\s*;?\s*", re.DOTALL)
_LEFT = re.compile(r"(<tool_call>|<function_call>|```[A-Za-z_]{0,12})\s{0,8}\Z")
_SPACE = re.compile(r"\s{0,8}")
_CLOSING = {"<tool_call>": "</tool_call>", "<function_call>": "</function_call>"}
_FENCE = "```"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]

    def canonical(self) -> str:
        """{"name": ..., "arguments": {...}}: keys of arguments sorted at every depth, one space after : and , and none else."""
        arguments = json.dumps(self.arguments, ensure_ascii=False, sort_keys=True)
        if any("\ud800" <= ch <= "\udfff" for ch in arguments):  # half of a surrogate pair can only be written escaped
            arguments = json.dumps(self.arguments, sort_keys=True)
        return f'{{"name": "{self.name}", "arguments": {arguments}}}'


@dataclass(frozen=True)
class FoundCall:
    """The calls that `text[start:end]` makes, which includes the tags or the code fence around them."""

    calls: tuple[ToolCall, ...]
    start: int
    end: int


def read_calls(text: str, names: Collection[str] = ()) -> tuple[list[ToolCall], str]:
    """The calls of a message in order, and what it says beside them. `names`: the tools there are, where that is known."""
    found = find_calls(text, names)
    return [call for place in found for call in place.calls], _replaced(text, found, [""] * len(found)).strip()


def canonical_text(text: str) -> str:
    """The message with every tool call in the canonical form; the rest is as it was, and so is a message without calls."""
    found = find_calls(text)
    return _replaced(text, found, ["\n".join(call.canonical() for call in place.calls) for place in found])


def find_calls(text: str, names: Collection[str] = ()) -> list[FoundCall]:
    if "{" not in text and "(" not in text:
        return []
    found = _json_calls(text, names)
    found += [tagged for tagged in _tagged_python(text) if not any(f.start < tagged.end and tagged.start < f.end for f in found)]
    if not found and names:
        call = _python_call(text.strip().removeprefix(_FENCE + "python").strip("` \n"))
        if call is not None and call.name in names:
            return [FoundCall((call,), 0, len(text))]
    return sorted(found, key=lambda place: place.start)


def _json_calls(text: str, names: Collection[str]) -> list[FoundCall]:
    found: list[FoundCall] = []
    place = 0
    for _ in range(MOST_TRIES):
        match = _OBJECT.search(text, place)
        if match is None:
            break
        name, start, begin = match[1], match.start(), match.end() if match[1] else match.start()
        value, end = _decode(text, begin)
        if name is None:
            calls = _calls_in(value, lambda bare: bare in names)
        else:
            calls = [ToolCall(name, value)] if isinstance(value, dict) else []
            end = _past(text, end, "</function>") or end
        if calls:
            start, end = _widened(text, start, end)
            found.append(FoundCall(tuple(calls), start, end))
        place = end if calls else begin + 1
    return found


def _calls_in(value: Any, may_be_bare: Callable[[str], bool]) -> list[ToolCall]:
    """`may_be_bare(name)`: whether an object with a name and no arguments is a call."""
    if isinstance(value, list):
        parts = [_calls_in(part, may_be_bare) for part in value]
        return [call for part in parts for call in part] if all(parts) else []
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("tool_calls"), list):
        return _calls_in(value["tool_calls"], lambda name: True)
    if isinstance(value.get("function"), dict):
        return _calls_in(value["function"], lambda name: True)
    name = next((value[key] for key in NAME_KEYS if isinstance(value.get(key), str)), "")
    given = [value[key] for key in ARGUMENT_KEYS if key in value]
    if not _TOOL_NAME.fullmatch(name) or not (given or may_be_bare(name)):
        return []
    arguments = given[0] if given else {}
    if isinstance(arguments, str):  # OpenAI's API has the arguments as JSON text
        arguments = _decode(arguments.strip() or "{}", 0)[0]
    elif arguments is None:
        arguments = {}
    return [ToolCall(name, arguments)] if isinstance(arguments, dict) else []


def _decode(text: str, place: int) -> tuple[Any, int]:
    """The JSON value that begins at `place`, and where it ends. None where there is none, it is nested too deep, or it has a
    number that JSON does not allow."""
    try:
        value, end = _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place
    return (value, end) if _shallow(value) else (None, place)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)


def _shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return True
    return False


def _widened(text: str, start: int, end: int) -> tuple[int, int]:
    """The call with the tags or code fence around it, where they hold nothing else."""
    while left := _LEFT.search(text, max(0, start - 40), start):
        closed = _past(text, end, _CLOSING.get(left[1], _FENCE))
        if closed is None and text[end : end + 9].strip():
            break  # the tags hold something else, too; an opening tag without a closing one is taken along
        start, end = left.start(), closed or end
    return start, end


def _past(text: str, place: int, closing: str) -> int | None:
    """Where `closing` ends, if it comes next."""
    space = _SPACE.match(text, place)
    gap = space.end() if space else place
    return gap + len(closing) if text.startswith(closing, gap) else None


def _tagged_python(text: str) -> list[FoundCall]:
    found = []
    for opening, closing in _CLOSING.items():
        start = text.find(opening)
        while start >= 0:
            stop = text.find(closing, start)
            if stop < 0:
                break
            call = _python_call(text[start + len(opening) : stop])
            if call is not None:
                found.append(FoundCall((call,), start, stop + len(closing)))
            start = text.find(opening, stop)
    return found


def _python_call(text: str) -> ToolCall | None:
    """NAME(key=value, ...) with literal values; nothing is evaluated."""
    match = _PYTHON.fullmatch(text) if len(text) <= LONGEST_PYTHON else None
    if match is None:
        return None
    try:
        node = ast.parse(text.strip().rstrip(";"), mode="eval").body
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            return None
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
        if len(arguments) != len(node.keywords):
            return None
        # what JSON cannot say (sets, bytes, complex numbers, NaN) is no argument
        arguments = json.loads(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return ToolCall(match[1], arguments) if node.func.id == match[1] and _shallow(arguments) else None


def _replaced(text: str, found: list[FoundCall], words: list[str]) -> str:
    parts, place = [], 0
    for call, word in zip(found, words, strict=True):
        parts += [text[place : call.start], word]
        place = call.end
    return "".join([*parts, text[place:]])
