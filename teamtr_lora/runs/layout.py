"""Where everything lies in a run directory, and the one place that refuses links in it.

    recipe.yaml           the resolved recipe
    origin.json           the folder that the recipe's relative paths start from; hashes of the code and data that it names;
                          of a run that started from another team's adapters, which
    team.json             each agent's current version, and the shape of its adapter where a swap changed it
    metrics.jsonl         one row an update, a stage and a swap
    checkpoint/step-N/    state.json, tensors.safetensors, moments-AGENT.safetensors, manifest.json
    adapters/AGENT/VERSION/
    episodes/NAME.jsonl   transcripts
    evaluations/NAME/     settings.json, episodes.jsonl, result.json
    rollouts/NAME.json    episodes that later updates learn from again, for a run that is resumed in between
    data/                 of a script's run: its rows, train.jsonl and test.jsonl
    stage_contexts.json   contexts of the stage in progress, which a resumed run compares later ones with
    rebase.json           of a run that `rebase` made: what was asked for and what came of it
    baseline.json, trl/   of a run of `baseline`: how far it is, and TRL's own checkpoints
    .swap/                what is finished of a swap in progress
    .lock                 held by the process that changes the run

A run directory may come from somebody else. A link in it could make this program read or write anywhere, so `refuse_links` is
called by whatever opens a run directory, to read or to change it, before the first file is touched.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import TEMPORARY, disk_errors
from teamtr_lora.common.foreign_files import parse_json, read_regular

RECIPE, ORIGIN, TEAM, METRICS = "recipe.yaml", "origin.json", "team.json", "metrics.jsonl"
CHECKPOINTS, ADAPTERS, EPISODES, EVALUATIONS = "checkpoint", "adapters", "episodes", "evaluations"
STAGE_CONTEXTS, REBASE, BASELINE, TRL = "stage_contexts.json", "rebase.json", "baseline.json", "trl"
ROLLOUTS, SCRIPT_ROWS, SWAP_WORK, LOCK = "rollouts", "data", ".swap", ".lock"
OWN_NAMES = frozenset(
    (RECIPE, ORIGIN, TEAM, METRICS, CHECKPOINTS, ADAPTERS, EPISODES, EVALUATIONS)
    + (STAGE_CONTEXTS, REBASE, BASELINE, TRL, ROLLOUTS, SCRIPT_ROWS, SWAP_WORK, LOCK)
)

RUNS = Path("runs")  # where runs live whose user names no place
MAX_METRICS_BYTES = 1 << 30
MAX_RUN_JSON_BYTES = 64 << 20
MAX_FOLDER_DEPTH = 32  # folders in folders: a run has a handful, and what lists or removes them goes down by calls


def is_run(path: Path) -> bool:
    """Whether this is a run directory, as far as one look can tell: a recipe alone may be somebody's own, as that of `init`."""
    written = (ORIGIN, TEAM, METRICS, BASELINE)
    return holds_recipe(path) and any(os.path.lexists(path / name) for name in written)


def holds_recipe(path: Path) -> bool:
    return os.path.isfile(path / RECIPE)  # os.path's, as Path's raises for a name that no file system takes


def is_baseline(path: Path) -> bool:
    """Whether this is the directory of a run of `teamtr-lora baseline`."""
    return os.path.lexists(path / BASELINE)


def refuse_links(folder: Path, names: Collection[str] | None = None, depth: int = MAX_FOLDER_DEPTH) -> None:
    """UserError for the first symbolic link in a folder, at any depth. The folder itself may be reached by a link.

    `names`: look at these entries only (and at what a killed process left unfinished). In a run directory those are OWN_NAMES:
    what others keep there, a tracker's files for example, is never opened by this program.
    """
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except (FileNotFoundError, NotADirectoryError):  # nothing is there, or a run at work has just removed it
        return
    for entry in entries:
        if names is not None and entry.name not in names and not entry.name.startswith(TEMPORARY):
            continue
        if entry.is_symlink():
            raise UserError(f"{entry.path}: a link, which is not followed; put the file or folder itself in its place")
        if entry.is_dir(follow_symlinks=False):
            if not depth:
                raise UserError(f"{folder}: folders are nested more than {MAX_FOLDER_DEPTH} deep, which no run has; remove them")
            refuse_links(Path(entry.path), depth=depth - 1)


def read_own(path: Path, limit: int = MAX_RUN_JSON_BYTES) -> bytes | None:
    """The bytes of a file in a run directory, or None where there is none. A link or a device is refused."""
    try:
        return read_regular(path, limit)
    except FileNotFoundError:
        return None


def read_own_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of a run directory, or None where there is none."""
    data = read_own(path)
    return None if data is None else parse_json(data, str(path))


def append_synced(path: Path, data: bytes) -> None:
    """Adds to the end of a file in a run directory, on the disk when this returns; never through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    with disk_errors(path), os.fdopen(os.open(path, flags, 0o666), "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
