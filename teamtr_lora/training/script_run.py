"""Runs that a script starts on its own rows and reward functions, written down so that the command line can go on with them.

Where every reward is a function in a file beside the script (not in the script itself, which would train again when imported) and
the rows are JSON, the run's recipe names them as any recipe would: `eval RUN`, `train RUN --resume` and the rest work as with
a recipe's run. Otherwise the recipe says that the task lives in a script.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teamtr_lora.common.code_paths import misnamed, undefined
from teamtr_lora.common.files import write_atomic
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.tasks.dataset import DatasetSettings

MOST_BYTES = 64 << 20  # of the rows: more stay where they are


@dataclass(frozen=True)
class ScriptData:
    """What a script gave: its rewards as module:function, its rows as JSON lines, and how they are used."""

    rewards: list[str]
    train: str
    test: str | None
    settings: dict[str, Any]

    def recipe_for(self, recipe: Recipe, run_dir: RunDir) -> Recipe:
        """The run's recipe with the task as a file would name it."""
        task = DatasetSettings(
            name="dataset",
            path=_beside(run_dir.script_rows / "train.jsonl", recipe.folder),
            test_path=None if self.test is None else _beside(run_dir.script_rows / "test.jsonl", recipe.folder),
            reward=self.rewards[0] if len(self.rewards) == 1 else self.rewards,
            **self.settings,
        )
        return recipe.model_copy(update={"task": task})

    def write(self, run_dir: RunDir) -> None:
        for name, text in (("train", self.train), ("test", self.test)):
            if text is not None:
                write_atomic(run_dir.script_rows / f"{name}.jsonl", text)


def script_data(
    functions: Sequence[Callable[..., Any]],
    answer: Callable[[str], Any] | None,
    train: Any,
    test: Any,
    folder: Path,
    settings: dict[str, Any],
) -> ScriptData | None:
    """None where the command line could not find the functions, or the rows cannot be written down."""
    rewards, reader = [_importable(function, folder) for function in functions], answer and _importable(answer, folder)
    if None in rewards or (answer and not reader):
        return None
    texts = [None if rows is None else _lines(rows) for rows in (train, test)]
    if texts[0] is None or (test is not None and texts[1] is None):
        return None
    return ScriptData([name for name in rewards if name], texts[0], texts[1], settings | ({"answer": reader} if reader else {}))


def _importable(function: Callable[..., Any], folder: Path) -> str | None:
    """module:function, where that leads to this very function in a file beside the script."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    home = sys.modules.get(str(module))
    if not inspect.isfunction(function) or module in (None, "__main__") or getattr(home, name, None) is not function:
        return None
    path, file = f"{module}:{name}", folder / (str(module).replace(".", "/") + ".py")
    own = getattr(home, "__file__", None)
    found = own is not None and file.is_file() and os.path.samefile(own, file)
    return path if found and not misnamed(path, folder) and not undefined(path, folder) else None


def _lines(rows: Any) -> str | None:
    """The rows as JSON lines; None where one is no JSON, or they are too many."""
    lines: list[str] = []
    size = 0
    for place in range(len(rows)):
        try:
            lines.append(json.dumps(dict(rows[place]), ensure_ascii=True, allow_nan=False) + "\n")
        except (TypeError, ValueError):
            return None
        size += len(lines[-1])
        if size > MOST_BYTES:
            return None
    return "".join(lines)


def _beside(path: Path, folder: Path) -> str:
    full, folder = path.absolute(), folder.absolute()
    return str(full.relative_to(folder)) if full.is_relative_to(folder) else str(full)
