"""What the tools of both tau2 domains share: a database that episodes change without copying it, checked calls, arithmetic."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from teamtr_lora.common.errors import UserError

Record = dict[str, Any]
Amount = Annotated[int, Field(ge=-(10**9), le=10**9)]
Ids = Annotated[list[str], Field(max_length=200)]

LONGEST_EXPRESSION = 300  # characters


class ToolError(Exception):
    """Why a call changes nothing; the agent reads it after `Error: `."""


class Database:
    """Tables of records by key. The file's tables are shared and never written: what is edited is this database's own copy."""

    def __init__(self, tables: Mapping[str, Mapping[str, Record]]) -> None:
        self._tables = tables
        self._own: dict[tuple[str, str], Record] = {}

    def find(self, table: str, key: str) -> Record | None:
        """To read; `edit` to write."""
        own = self._own.get((table, key))
        return own if own is not None else self._tables[table].get(key)

    def edit(self, table: str, key: str) -> Record:
        if (table, key) not in self._own:
            self._own[table, key] = copy.deepcopy(self._tables[table][key])
        return self._own[table, key]

    def add(self, table: str, key: str, record: Record) -> None:
        self._own[table, key] = record

    def all(self, table: str) -> Iterator[tuple[str, Record]]:
        for key, record in self._tables[table].items():
            yield key, self._own.get((table, key), record)
        for (where, key), record in self._own.items():
            if where == table and key not in self._tables[table]:
                yield key, record

    def changes(self) -> dict[tuple[str, str], Record]:
        """The records that are not as in the file. Two databases of one file are equal when these are."""
        return {place: record for place, record in self._own.items() if self._tables[place[0]].get(place[1]) != record}


class Toolkit:
    """The public methods of a subclass are its tools; their docstrings are what an agent is told of them."""

    checks: ClassVar[dict[str, type[BaseModel]]] = {}  # by tool, what its arguments must be

    def __init_subclass__(cls) -> None:
        inner = {"call", "checks", "describe"}
        tools = [name for name in sorted(dir(cls)) if not name.startswith("_") and name not in inner]
        cls.checks = {name: _model_of(getattr(cls, name)) for name in tools}

    def __init__(self, db: Database) -> None:
        self.db = db

    def _record(self, table: str, key: str, missing: str) -> Record:
        """To read; raises `missing`, a text that may have the {key} in it, where there is none."""
        record = self.db.find(table, key)
        if record is None:
            raise ToolError(missing.format(key=key[:100]))
        return record

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """What the tool answers, and whether that is an error."""
        if name not in self.checks:
            return f"Error: Tool '{name}' not found.", True  # a name is plain letters, or it was no call
        try:
            checked = self.checks[name].model_validate(dict(arguments))
            result = getattr(self, name)(**{key: getattr(checked, key) for key in self.checks[name].model_fields})
        except ToolError as error:
            return f"Error: {error}".encode("utf-8", "replace").decode(), True  # it may quote half an emoji
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:100]
            return f"Error: {where}: {first['msg']}".encode("utf-8", "replace").decode(), True
        except (KeyError, TypeError, AttributeError) as error:  # a record without a field that tau2's have
            raise UserError(f"task.database: {name} fails on it ({error!r}); it needs the tables and fields of tau2's") from error
        return (result if isinstance(result, str) else json.dumps(result)), False

    def calculate(self, expression: str) -> str:
        """Calculate an expression of numbers, + - * /, parentheses and spaces, such as '2 * (3 + 4)'."""
        if not set(expression) <= set("0123456789+-*/(). "):
            raise ToolError("Invalid characters in expression")
        return str(round(arithmetic(expression), 2))

    def transfer_to_human_agents(self, summary: str) -> str:
        """Transfer the customer to a human agent, with a summary of the issue; only if the customer asks for one, or if you
        cannot solve the issue with the policy and the tools."""
        return "Transfer successful"

    @classmethod
    def describe(cls) -> str:
        """One line a tool, for the agent's prompt."""
        lines = []
        for name in cls.checks:
            method = getattr(cls, name)
            hints = get_type_hints(method)
            takes = ", ".join(f"{key}: {_kind(hints[key])}" for key in list(inspect.signature(method).parameters)[1:])
            lines.append(f"- {name}({takes}): {' '.join((method.__doc__ or '').split())}")
        return "\n".join(lines)


def _model_of(tool: Callable[..., Any]) -> type[BaseModel]:
    hints = get_type_hints(tool, include_extras=True)
    fields: dict[str, Any] = {key: (kind, ...) for key, kind in hints.items() if key != "return"}
    return create_model(tool.__name__, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)


def _kind(hint: Any) -> str:
    if get_origin(hint) is list:
        return f"list of {_kind(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "{" + ", ".join(hint.model_fields) + "}"
    return "text" if hint is str else "number"


_OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def arithmetic(expression: str) -> float:
    """The value of an expression, which is never executed as code."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError("The expression is too long")
    try:
        return float(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(str(error).splitlines()[0] if str(error) else "invalid expression") from error


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
            return -_value(inner) if isinstance(sign, ast.USub) else _value(inner)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return float(_OPERATIONS[type(operation)](_value(left), _value(right)))
    raise ValueError("invalid expression")
