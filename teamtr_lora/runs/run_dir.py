"""The run directory as those see it who write it. One recipe, one run; runs/layout.py says what lies where."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from teamtr_lora.base.versions import AdapterVersion, stored_versions
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors, dump_json, remove_temporaries, write_atomic
from teamtr_lora.common.locks import acquire
from teamtr_lora.common.program import said
from teamtr_lora.recipe import Recipe, differences, dump_recipe, load_recipe
from teamtr_lora.runs import layout
from teamtr_lora.runs.layout import RUNS, is_baseline, read_own_json, refuse_links
from teamtr_lora.runs.metrics import MetricsLog, damaged_rows
from teamtr_lora.runs.rollout_store import RolloutStore
from teamtr_lora.runs.run_state import CheckpointReader
from teamtr_lora.runs.transcripts import EpisodeMarks, episode_record
from teamtr_lora.team import Episode

if TYPE_CHECKING:
    from teamtr_lora.runs.checkpoint import CheckpointStore

logger = logging.getLogger(__name__)


def elsewhere() -> str:
    return f"choose another {said(cli='--run-dir', python='output_dir')}"


def begin_from(run: str) -> str:
    """How a new run begins with the adapters of this one."""
    return said(cli=f"train RECIPE --from {shlex.quote(run)} --run-dir NEW", python=f"give team={run!r} and another output_dir")


# A resumed run may train longer, look at other things and live elsewhere; everything else decides what it learns.
MAY_CHANGE = (
    "training.stages", "output_dir", "tracking", "base.device", "rollout.server", "rollout.vllm", "rollout.requests_per_batch",
    "swap", "diagnostics", "evaluation.every_stages", "training.stop_after_idle_stages",
    "training.tokens_per_microbatch", "training.gradient_checkpointing",  # the same sums in other parts: what a full GPU needs
)  # fmt: skip
LISTED = 4  # differing keys that a message names


@dataclass(frozen=True)
class RunDir:
    """A run directory to write: its places, and the steps that change it. `read_run` is for those who only read one."""

    path: Path

    @property
    def adapters(self) -> Path:
        """AGENT/VERSION lies in here."""
        return self.path / layout.ADAPTERS

    @property
    def stage_contexts(self) -> Path:
        """The file of a stage's contexts, which diagnostics keep."""
        return self.path / layout.STAGE_CONTEXTS

    @property
    def rollouts(self) -> RolloutStore:
        """Episodes that later updates learn from again."""
        return RolloutStore(self.path / layout.ROLLOUTS)

    @property
    def trl(self) -> Path:
        """The folder of TRL's own checkpoints in a run of `baseline`."""
        return self.path / layout.TRL

    @property
    def swap_work(self) -> Path:
        """The folder of a swap in progress."""
        return self.path / layout.SWAP_WORK

    @property
    def script_rows(self) -> Path:
        """The folder of the rows that a script trained on."""
        return self.path / layout.SCRIPT_ROWS

    @property
    def metrics(self) -> MetricsLog:
        """The log of metric rows."""
        return MetricsLog(self.path / layout.METRICS)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        """The checkpoints, tensors included. One store, which knows what it has written."""
        from teamtr_lora.runs.checkpoint import CheckpointStore

        return CheckpointStore(self.path)

    # --- whose directory it is

    def check(self, recipe: Recipe, *, resume: bool, start: Path | None = None) -> None:
        """Refuses a folder that holds something else, before anything is loaded or written. `start`: the run or team whose
        adapters a new run begins with."""
        self.check_place()
        with disk_errors(self.path):
            saved = (self.path / layout.RECIPE).exists()
        if is_baseline(self.path):
            raise UserError(f"{self.path}: holds a run of `teamtr-lora baseline`; {elsewhere()}")
        if saved and CheckpointReader(self.path).exists():
            self.check_same(recipe)
            if not resume:
                go_on = said(cli="add --resume to go on", python="go on with train(resume=True)")
                raise UserError(f"{self.path}: already holds a run of this recipe; {go_on}, or {elsewhere()}")
            return
        ours = (self.path / layout.ORIGIN).exists()  # claimed by a run that did not come to its first checkpoint
        if not ours:
            self.check_empty("a recipe but no run" if saved else "no run")
        begun = self._origin().get("started_from") if ours else None
        if isinstance(begun, dict) and start is None:  # fresh adapters would be another run, and nothing would tell
            again = f"{said(cli='--from', python='team=')} {begun.get('source')}"
            raise UserError(
                f"{self.path}: was killed before it had taken its first adapters; give {again} again, or {elsewhere()}"
            )

    def check_place(self) -> None:
        """Refuses what is no folder, and one of which links lead elsewhere."""
        with disk_errors(self.path):  # a name that no file system takes
            refuse_links(self.path, layout.OWN_NAMES)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path}: is a file; {elsewhere()}")

    def check_empty(self, holds: str) -> None:
        """Refuses a folder in which something lies, but for hidden files. `holds`: what it is instead of the folder of a run."""
        if self.path.is_dir() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise UserError(f"{self.path}: is not empty and holds {holds}; {elsewhere()}")

    def check_same(self, recipe: Recipe) -> None:
        """Refuses to go on with another recipe than the run's own."""
        saved = self.with_swaps(load_recipe(self.path / layout.RECIPE))
        fixed = {"training.stages"} if saved.training.rate_changes else set()  # they decide the rate of each stage
        found = differences(saved, self.with_swaps(recipe), ignore={*MAY_CHANGE} - fixed)
        if not found:
            return
        keys = ", ".join(f"{key} is {old!r} there and {new!r} here" for key, old, new in found[:LISTED])
        keys += f", and {len(found) - LISTED} more" if len(found) > LISTED else ""
        fix = elsewhere()
        if not is_baseline(self.path):
            fix = f"to go on from its adapters with other settings: {begin_from(str(self.path))}; to begin anew: {fix}"
        raise UserError(f"{self.path}: holds another recipe's run: {keys}; such keys decide what a run learns; {fix}")

    def lock(self) -> FileLock:
        """Held by whoever changes the run; the system releases it with the process, however that ends."""
        refuse_links(self.path, layout.OWN_NAMES)
        lock = acquire(self.path / layout.LOCK, self.path, f"another process is training here; wait for it or {elsewhere()}")
        remove_temporaries(self.path, apart=layout.EVALUATIONS)  # each evaluation has a lock of its own
        return lock

    def claim(self, recipe: Recipe, contents: Mapping[str, str], started_from: Mapping[str, Any] | None = None) -> FileLock:
        """Locks the folder and makes it this run's own. `contents`: hashes of what the recipe only names (code, data), by key.
        `started_from`: of a run that begins with adapters of another one, which.

        A user may repair those and go on; the log then warns that rows from before and after do not compare.
        """
        lock = self.lock()
        before = self._origin().get("contents", {})
        if changed := [key for key, digest in contents.items() if before.get(key, digest) != digest]:
            logger.warning(
                "%s: what %s names is not what it was when this run was last started: accuracies, rewards and certificates from "
                "here on are not comparable with those before", self.path, " and ".join(changed),
            )  # fmt: skip
        self.write_recipe(recipe, contents, started_from)
        return lock

    def remove(self) -> None:
        """Of a run that has not begun: whoever calls this has made the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_recipe(
        self, recipe: Recipe, contents: Mapping[str, str] | None = None, started_from: Mapping[str, Any] | None = None
    ) -> None:
        """The recipe and where it came from. origin.json is first: with it the folder is a run's."""
        origin = self._origin() | {"recipe_folder": str(recipe.folder.resolve())} | ({"contents": contents} if contents else {})
        origin |= {"started_from": started_from} if started_from else {}
        write_atomic(self.path / layout.ORIGIN, dump_json(origin))
        write_atomic(self.path / layout.RECIPE, dump_recipe(recipe))

    def _origin(self) -> dict[str, Any]:
        try:
            return read_own_json(self.path / layout.ORIGIN) or {}
        except UserError:  # a damaged one is written anew; whoever reads the recipe's folder from it is told
            return {}

    # --- what swaps and earlier sessions made of the recipe

    def with_swaps(self, recipe: Recipe) -> Recipe:
        """The recipe with the adapters that swaps have put in place of the ones it names. A recipe that names something an
        agent never had is left as it is, for `check` to find."""
        checkpoints = CheckpointReader(self.path)
        if not checkpoints.exists():
            return recipe
        state = checkpoints.state()
        had: dict[str, list[Any]] = {}
        for record in state.swaps:
            had.setdefault(record.agent, []).extend([record.lora_before, record.lora])
        now = {agent: state.loras.get(agent, loras[0]) for agent, loras in had.items()}
        return recipe.with_loras({a.name: now[a.name] for a in recipe.team.agents if a.lora.model_dump() in had.get(a.name, [])})

    def with_stages_done(self, recipe: Recipe) -> Recipe:
        """The recipe with no fewer stages than are complete: a run does not become shorter."""
        checkpoints = CheckpointReader(self.path)
        done = checkpoints.state().stage if checkpoints.exists() else 0
        if recipe.training.stages >= done:
            return recipe
        training = recipe.training.model_copy(update={"stages": done})
        return recipe.model_copy(update={"training": training}).placed_in(recipe.folder)

    # --- files

    def write_team(self, versions: Mapping[str, AdapterVersion], loras: Mapping[str, dict[str, Any]]) -> None:
        """The current team, so that its readers need nothing of the checkpoint. `loras`: the recipe's `lora` sections of agents
        that were swapped; in one file with the versions, so that no reader sees a version without the shape it has."""
        write_atomic(self.path / layout.TEAM, _team_text(versions, loras))

    def restore_team(self, versions: Mapping[str, AdapterVersion], loras: Mapping[str, dict[str, Any]]) -> None:
        """Writes the team of the checkpoint again where team.json is missing, damaged or another one."""
        try:
            found = read_own_json(self.path / layout.TEAM)
        except UserError as error:
            found = None
            logger.warning("%s; it is written again from the checkpoint", error)
        if found != json.loads(_team_text(versions, loras)):
            self.write_team(versions, loras)

    def check_rows(self) -> None:
        """Warns of damaged rows: training does not read them, but what certifies it does."""
        damaged = damaged_rows(self.path)[1]
        if damaged:
            logger.warning(
                "%s: line %d is %s (%d damaged rows in all): certify and diagnose will refuse this run",
                self.path / layout.METRICS, *damaged[0], len(damaged),
            )  # fmt: skip

    def write_episodes(
        self, name: str, episodes: list[Episode], keep: str | int, marks: Sequence[EpisodeMarks] | None = None
    ) -> None:
        """Transcripts of the first `keep` episodes, of all of them, or of none; `marks` are what an update says of each."""
        if keep == "none" or keep == 0:
            return
        chosen = episodes if keep == "all" else episodes[: int(keep)]
        marked = [marks[place] if marks else None for place in range(len(chosen))]
        lines = [json.dumps(episode_record(e, marks=m), ensure_ascii=False) for e, m in zip(chosen, marked, strict=True)]
        write_atomic(self.path / layout.EPISODES / f"{name}.jsonl", "\n".join(lines) + "\n")

    def write_rebase(self, request: dict[str, Any], report: dict[str, Any]) -> None:
        """What `rebase` was asked for and what came of it, in the run that it made."""
        write_atomic(self.path / layout.REBASE, dump_json({"request": request, "report": report}))

    def write_baseline(self, record: dict[str, Any]) -> None:
        """How far a run of `baseline` is; written last, it is the commit point of each of its updates."""
        write_atomic(self.path / layout.BASELINE, dump_json(record))

    def read_baseline(self) -> dict[str, Any] | None:
        """What `write_baseline` wrote; None where no baseline has run here."""
        refuse_links(self.path, layout.OWN_NAMES)
        return read_own_json(self.path / layout.BASELINE)


def _team_text(versions: Mapping[str, AdapterVersion], loras: Mapping[str, dict[str, Any]]) -> str:
    team = stored_versions(versions)
    for agent, lora in loras.items():
        team[agent]["lora"] = lora
    return dump_json(team)


def chosen_run_dir(wanted: str | None, name: str, *, resume: bool) -> RunDir:
    """Where a run lives: where its user says, else in a new folder of its name, or with `resume` in the newest."""
    return RunDir(Path(wanted) if wanted else latest_run_dir(name) if resume else default_run_dir(name))


def default_run_dir(name: str) -> Path:
    """runs/NAME, or the first free runs/NAME-2, -3, ..."""
    candidate, number = RUNS / name, 1
    while candidate.exists():
        number += 1
        candidate = RUNS / f"{name}-{number}"
    return candidate


def latest_run_dir(name: str, root: Path = RUNS) -> Path:
    """The one of runs/NAME, runs/NAME-2, ... that was started or resumed last, for `--resume` without a --run-dir."""
    alike = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [path for path in root.iterdir() if alike.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    if not folders:
        resume = said(cli="--resume", python="resume=True")
        raise UserError(f"{resume}: there is no run in {root / name}; leave {resume} out to start one")
    origins = {folder: folder / layout.ORIGIN for folder in folders}
    return max(folders, key=lambda folder: origins[folder].lstat().st_mtime if origins[folder].exists() else 0.0)
