"""The one list of task families. The recipe's `task` section, `tasks`, `keys` and the JSON schema all follow from it.

To add a task: write one file with its Task and its TaskSettings (`generated/countdown.py` is a short one), and add its line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Tag

from teamtr_lora.common.settings import OnThisMachine, Section
from teamtr_lora.tasks.machinery.task_settings import TaskSettings

DEFAULT = "column_sum"  # the task of a recipe whose `task` has no name
SCRIPT = "script"  # the task of a run that a Python script started: no recipe file can name it
OF_THE_USER = ("dataset", "custom", SCRIPT)  # whose items or code are the user's own
TABLE = (
    "generated.column_sum:ColumnSumSettings",
    "generated.small:SmallSettings",
    "generated.countdown:CountdownSettings",
    "generated.distinct:DistinctSettings",
    "dataset:DatasetSettings",
    "custom:CustomSettings",
    "benchmarks.math_tasks:MathSettings",
    "benchmarks.zebra:ZebraSettings",
    "benchmarks.autologi:AutoLogiSettings",
    "benchmarks.planbench:BlocksworldSettings",
    "benchmarks.guessing:GuessingSettings",
    "benchmarks.arbench:DetectiveSettings",
    "benchmarks.arbench:SituationSettings",
    "benchmarks.tau2:Tau2Settings",
    "custom:ScriptSettings",
)


def _settings_class(line: str) -> type[TaskSettings]:
    module, _, name = line.partition(":")
    found: type[TaskSettings] = getattr(import_module(f"teamtr_lora.tasks.{module}"), name)
    return found


FAMILIES = tuple(_settings_class(line) for line in TABLE)
BY_NAME = {name: family for family in FAMILIES for name in family.names()}  # every name of a task, and its settings


def _tag(value: Any) -> str:
    """The union's tag. A task without a name is the default one, so `task.digits=4` works alone."""
    name = value.get("name", DEFAULT) if isinstance(value, dict) else getattr(value, "name", DEFAULT)
    return (BY_NAME[name].names()[0] if name in BY_NAME else name) if isinstance(name, str) else repr(name)


if TYPE_CHECKING:
    TaskSection = TaskSettings
else:
    _MEMBERS = tuple(Annotated[family, Tag(family.names()[0])] for family in FAMILIES)
    TaskSection = Annotated[Union[_MEMBERS], Discriminator(_tag)]  # noqa: UP007


def machine_keys(what: Literal["file", "choice", "path or name"]) -> tuple[str, ...]:
    """The keys of any task, such as `task.responder.url`, that name something of this machine; those of inner sections last."""
    found = {key: None for family in FAMILIES for key, marks in _marked(family, "task.") if OnThisMachine(what) in marks}
    return tuple(sorted(found, key=lambda key: key.count(".")))


def _marked(section: type[Section], prefix: str) -> Iterator[tuple[str, list[Any]]]:
    for name, field in section.model_fields.items():
        yield prefix + name, field.metadata
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _marked(field.annotation, f"{prefix}{name}.")
