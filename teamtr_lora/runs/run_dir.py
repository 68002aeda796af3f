"""The run directory: recipe.yaml, team.json, metrics.jsonl, episodes/, adapters/, checkpoint/. One recipe, one run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors, dump_json, remove_temporaries, write_atomic
from teamtr_lora.recipe import Recipe, dump_recipe, first_difference, load_recipe
from teamtr_lora.registry.stored import EVALUATIONS
from teamtr_lora.runs.transcripts import episode_record
from teamtr_lora.team import Episode
from teamtr_lora.runs.checkpoint import CheckpointStore
from teamtr_lora.runs.metrics import MetricsLog

logger = logging.getLogger(__name__)

ORIGIN = "origin.json"  # where the recipe was; what makes a folder a run's
BASELINE = "baseline.json"  # what `teamtr-lora baseline` leaves in its runs, which train must not go on from

ELSEWHERE = "choose another --run-dir (in Python: output_dir)"

# A resumed run may train longer, look at other things and live elsewhere; everything else decides what it learns.
MAY_CHANGE = (
    "training.stages", "output_dir", "tracking", "base.device", "rollout.server", "rollout.vllm", "rollout.requests_per_batch",
    "swap", "diagnostics", "evaluation.every_stages",
)  # fmt: skip


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def metrics(self) -> MetricsLog:
        return MetricsLog(self.path / "metrics.jsonl")

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.path)

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuses a folder that holds something else, before anything is loaded or written."""
        saved = self.path / "recipe.yaml"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path}: is a file; {ELSEWHERE}")
        if (self.path / BASELINE).exists():
            raise UserError(f"{self.path}: holds a run of `teamtr-lora baseline`; {ELSEWHERE}")
        if saved.exists() and self.checkpoints.exists():
            self._check_same(recipe)
            if not resume:
                raise UserError(
                    f"{self.path}: already holds a run of this recipe; add --resume to go on (in Python: train(resume=True)), "
                    f"or {ELSEWHERE}"
                )
            return
        ours = (self.path / ORIGIN).exists()  # claimed by a run that did not come to its first checkpoint
        if not ours and self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir()):
            holds = "a recipe but no run" if saved.exists() else "no run"
            raise UserError(f"{self.path}: is not empty and holds {holds}; {ELSEWHERE}")

    def lock(self) -> FileLock:
        """Held by whoever changes the run. It goes with the process, however that ends."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock", timeout=0)
            try:
                lock.acquire()
            except Timeout as error:
                raise UserError(f"{self.path}: another process is training here; wait for it or {ELSEWHERE}") from error
        remove_temporaries(self.path, apart=EVALUATIONS)
        return lock

    def claim(self, recipe: Recipe, contents: Mapping[str, str]) -> FileLock:
        """Makes the folder this run's own. `contents`: hashes of what the recipe only names (code, data), by key. A user may
        repair those and go on, and is told that the run is of two kinds then."""
        lock = self.lock()
        before = self._origin().get("contents", {})
        if changed := [key for key, digest in contents.items() if before.get(key, digest) != digest]:
            logger.warning(
                "%s: what %s names is not what it was when this run was last started: accuracies, rewards and certificates from "
                "here on are not comparable with those before", self.path, " and ".join(changed),
            )  # fmt: skip
        self.write_recipe(recipe, contents)
        return lock

    def write_recipe(self, recipe: Recipe, contents: Mapping[str, str] | None = None) -> None:
        # the folder is a run's from the first of these on
        origin = self._origin() | {"recipe_folder": str(recipe.folder.resolve())} | ({"contents": contents} if contents else {})
        write_atomic(self.path / ORIGIN, dump_json(origin))
        write_atomic(self.path / "recipe.yaml", dump_recipe(recipe))

    def _origin(self) -> dict[str, Any]:
        place = self.path / ORIGIN
        try:
            found = json.loads(place.read_text()) if place.exists() else {}
        except ValueError:  # whoever reads the recipe's folder from it will say so; here it is written anew
            found = {}
        return found if isinstance(found, dict) else {}

    def with_swaps(self, recipe: Recipe) -> Recipe:
        """The recipe with the adapters that swaps have put in place of the ones it names. A recipe that names something an
        agent never had is left as it is, for `check` to find."""
        if not self.checkpoints.exists():
            return recipe
        state = self.checkpoints.state()
        had: dict[str, list[Any]] = {}
        for record in state.swaps:
            had.setdefault(record["agent"], []).extend([record["lora_before"], record["lora"]])
        now = {agent: state.loras.get(agent, loras[0]) for agent, loras in had.items()}
        return recipe.with_loras({a.name: now[a.name] for a in recipe.team.agents if a.lora.model_dump() in had.get(a.name, [])})

    def with_stages_done(self, recipe: Recipe) -> Recipe:
        """The recipe with no fewer stages than are complete: a run does not become shorter."""
        done = self.checkpoints.state().stage if self.checkpoints.exists() else 0
        if recipe.training.stages >= done:
            return recipe
        training = recipe.training.model_copy(update={"stages": done})
        return recipe.model_copy(update={"training": training}).placed_in(recipe.folder)

    def _check_same(self, recipe: Recipe) -> None:
        saved = self.with_swaps(load_recipe(self.path / "recipe.yaml"))
        difference = first_difference(saved, self.with_swaps(recipe), ignore=MAY_CHANGE)
        if difference:
            key, old, new = difference
            raise UserError(f"{self.path}: holds another recipe's run: {key} is {old!r} there and {new!r} here; {ELSEWHERE}")

    def write_team(self, versions: dict[str, AdapterVersion], loras: dict[str, dict[str, Any]]) -> None:
        """The current team, so that eval and ask need nothing of the checkpoint. `loras`: of agents that were swapped; with the
        versions in one file, no reader ever sees a version without the adapter it belongs to."""
        team: dict[str, dict[str, Any]] = {
            a: {"number": v.number, "content_hash": v.content_hash, "version": v.name} for a, v in versions.items()
        }
        for agent, lora in loras.items():
            team[agent]["lora"] = lora
        write_atomic(self.path / "team.json", dump_json(team))

    def write_episodes(self, name: str, episodes: list[Episode], keep: str | int) -> None:
        if keep == "none" or keep == 0:
            return
        chosen = episodes if keep == "all" else episodes[: int(keep)]
        lines = [json.dumps(episode_record(e), ensure_ascii=False) for e in chosen]
        write_atomic(self.path / "episodes" / f"{name}.jsonl", "\n".join(lines) + "\n")


def default_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """runs/NAME, or the first free runs/NAME-2, -3, ..."""
    candidate, number = root / name, 1
    while candidate.exists():
        number += 1
        candidate = root / f"{name}-{number}"
    return candidate


def latest_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """The one of runs/NAME, runs/NAME-2, ... that was started or resumed last, for `--resume` without a --run-dir."""
    alike = re.compile(re.escape(name) + r"(-\d+)?")
    folders = [path for path in root.iterdir() if alike.fullmatch(path.name) and path.is_dir()] if root.is_dir() else []
    if not folders:
        raise UserError(f"--resume: there is no run in {root / name}; leave --resume out to start one")
    return max(folders, key=_last_started)


def _last_started(run: Path) -> float:
    return (run / ORIGIN).stat().st_mtime if (run / ORIGIN).exists() else 0.0
