"""What figures and words are made of: one run, as its own files tell it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.metrics import MetricsRow, StageRow, SwapRow, UpdateRow, first_and_now
from teamtr_lora.runs.stored_run import StoredRun, read_run
from teamtr_lora.study.certified import RunCertificates
from teamtr_lora.study.certify import certify_rows
from teamtr_lora.study.diagnose import RunDiagnosis, diagnose_rows


@dataclass(frozen=True)
class RunData:
    """A run and its rows. What is derived from them is made once, when a figure asks for it."""

    name: str
    stored: StoredRun
    rows: list[MetricsRow]

    @cached_property
    def agents(self) -> list[str]:
        return [agent.name for agent in self.stored.recipe.team.agents]

    @cached_property
    def updates(self) -> list[UpdateRow]:
        return [row for row in self.rows if isinstance(row, UpdateRow)]

    @cached_property
    def stages(self) -> list[StageRow]:
        return [row for row in self.rows if isinstance(row, StageRow)]

    @cached_property
    def evaluated(self) -> list[StageRow]:
        """The stages after which the team was measured on held-out items; stage 0 is the team before training."""
        return [row for row in self.stages if row.evaluation]

    @cached_property
    def ends(self) -> list[dict[str, Any]]:
        """The first evaluation, and that of the team as it is, where there are two."""
        return first_and_now(self.rows)

    @cached_property
    def swaps(self) -> list[SwapRow]:
        return [row for row in self.rows if isinstance(row, SwapRow)]

    @cached_property
    def certificates(self) -> RunCertificates | str:
        """Or why there are none."""
        try:
            return certify_rows(self.stored, self.rows)
        except UserError as error:
            return str(error).removeprefix(f"{self.stored.path}: ")

    @cached_property
    def diagnosis(self) -> RunDiagnosis | str:
        """Or why there is none."""
        try:
            return diagnose_rows(self.stored, self.rows)
        except UserError as error:
            return str(error).removeprefix(f"{self.stored.path}: ")


def read_named_runs(paths: Sequence[Path]) -> list[RunData]:
    """Each called by its folder's name, or by its whole path where two folders have one name."""
    given = {os.path.realpath(path): path for path in paths}  # a run given twice is one run
    names = [os.path.basename(real) for real in given]
    stored = [read_run(path) for path in given.values()]
    titles = [str(path) if names.count(name) > 1 else name for path, name in zip(given.values(), names, strict=True)]
    return [RunData(title, run, run.rows()) for title, run in zip(titles, stored, strict=True)]
