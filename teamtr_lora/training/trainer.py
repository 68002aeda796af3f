"""`TeamTRTrainer`: the Python front door, in TRL's idiom. The command line goes through it too."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from teamtr_lora.base.memory import process_age
from teamtr_lora.base.versions import version_names
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.program import in_a_script
from teamtr_lora.common.ranks import process_ranks
from teamtr_lora.common.settings import nearest
from teamtr_lora.evaluation.contents import code_hashes, data_hashes
from teamtr_lora.evaluation.evaluate import Evaluation, plan_in_training, summarise
from teamtr_lora.recipe import Recipe, RecipeError, TeamTRConfig, problems
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.named import missing_trackers
from teamtr_lora.recipe.words import MISSING, Problem, in_their_words, own_names
from teamtr_lora.registry.programs import trust_programs
from teamtr_lora.rollout.playable import PlayableTeam, fits, load_versions, open_recipe
from teamtr_lora.runs.run_dir import RunDir, chosen_run_dir
from teamtr_lora.tasks import Rewards, Task
from teamtr_lora.tasks.custom import checked_task
from teamtr_lora.tasks.dataset import DatasetTask, read_answer
from teamtr_lora.training.events import Events, checked_callback
from teamtr_lora.training.live_view import LiveView
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.script_run import ScriptData, script_data
from teamtr_lora.training.stage import train
from teamtr_lora.training.team_spec import TeamSpec, start_of, team_parts
from teamtr_lora.training.tracking import open_accelerator

logger = logging.getLogger(__name__)

Callbacks = Sequence[TrainerCallback | type[TrainerCallback]]


@dataclass(frozen=True)
class TrainSummary:
    """What `train` returns, and `train --json` prints.

    run_dir             the folder of the run: adapters, metrics, transcripts, checkpoint
    stages, updates     how many there were; `updates` is the sum of accepted, rejected and skipped ones
    accepted, shrunk    updates that made a new adapter version; those among them whose step was shortened to fit the region
    rejected, skipped   updates that the gate refused; those that had nothing to learn from
    out_of_region_accepted             accepted updates with a bound of their KL above the radius: the KL may be below
    accuracy_before, accuracy_after    on held-out items, before and after training (None: not evaluated, as where a callback
                                       stopped the run)
    reward_before, reward_after        mean rewards of the same evaluations
    episodes_evaluated  episodes of the last evaluation; 0 where that was of an earlier team
    tokens, seconds     sampled tokens and wall-clock time of the whole run
    adapters            the content hash of each agent's adapter
    """

    run_dir: str
    stages: int
    updates: int
    accepted: int
    shrunk: int
    rejected: int
    skipped: int
    out_of_region_accepted: int
    accuracy_before: float | None
    accuracy_after: float | None
    reward_before: float | None
    reward_after: float | None
    episodes_evaluated: int
    tokens: int
    seconds: float
    adapters: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name, as `train --json` prints them."""
        return asdict(self)


_FROM_TRL = {  # arguments of TRL's trainers, and of transformers', that have another place here
    **dict.fromkeys(("model", "quantization_config"), "the base is TeamSpec's, as base={'source': ..., 'quantization': ...}"),
    "peft_config": "each agent has its own adapter: lora={'rank': ..., 'alpha': ...} in TeamSpec's agents",
    **dict.fromkeys(("processing_class", "tokenizer", "data_collator"), "the base brings its own tokenizer"),
    "reward_processing_classes": "a reward is a Python function, which brings what it needs",
    "optimizers": "choose one with optimizer= in TeamTRConfig",
    **dict.fromkeys(("tools", "rollout_func", "environment_factory"), "an environment of your own is a Task: give it as task="),
    "compute_metrics": "an evaluation's numbers are fixed; on_evaluate of a callback gets them",
}
P = ParamSpec("P")
R = TypeVar("R")


def _named(make: Callable[P, R]) -> Callable[P, R]:
    """Refuses an argument of a wrong name in a line that says where it belongs."""
    names = [*inspect.signature(make).parameters][1:]

    @functools.wraps(make)
    def checked(*args: P.args, **given: P.kwargs) -> R:
        if wrong := [name for name in given if name not in names]:
            raise RecipeError([_misnamed(name, names) for name in wrong], "TeamTRTrainer")
        return make(*args, **given)

    return checked


def _misnamed(name: str, names: list[str]) -> Problem:
    theirs, like = NAMES.get(name), nearest(name, names)
    meant = own_names().get(name) or (theirs.key if theirs else None)
    if name in _FROM_TRL:
        return Problem(name, MISSING, "is no argument of TeamTRTrainer", _FROM_TRL[name])
    if not like and meant and not meant.startswith("task."):
        return Problem(name, MISSING, "", theirs.words(str) if theirs else "", suggestion=meant).of_a_script("TeamTRTrainer")
    fix = "" if like else theirs.words(in_a_script) if theirs and not theirs.key else f"there are {', '.join(names)}"
    return Problem(name, MISSING, "unknown argument", fix, suggestion=like)


class TeamTRTrainer:
    """Trains a team of LoRA agents by TeamTR; `with TeamTRTrainer(...) as trainer:` closes it at the end.

    `team`: a TeamSpec, a dict of its fields, or the folder of an earlier run to go on from its adapters.
    `reward_funcs`: one function with TRL's signature, or several, whose rewards are summed.
    `args`: the settings; a TeamTRConfig.
    `train_dataset`, `eval_dataset`: a `datasets.Dataset` or a list of dicts with a `prompt` column; without `eval_dataset` a
    tenth of the prompts is held out.
    `callbacks`: transformers' TrainerCallbacks, or classes of them.
    `progress`: show a line an update and a bar while it trains, in terminals and notebooks; False: silent. A ProgressCallback or
    PrinterCallback among the callbacks takes its place.
    `task`: an environment of your own (a teamtr_lora.Task), in place of datasets and reward functions and of all that follows,
    which describes those.
    `on_reward_error`: a reward that raises, is NaN or has the wrong length stops the run, or counts as 0.
    `on_overlap`: prompts of one dataset that are in the other too are refused, dropped from training, or allowed.
    `success_at_least`: the reward from which an episode counts as right in accuracies.
    `reward_range`: the lowest and the highest reward an episode can get (the sum, where there are several functions). Learning
    does not depend on it; `certify` does, and the first reward outside is told.
    `answer`: a function of a message that returns the answer it states, or None: what teams vote over.
    """

    @_named
    def __init__(
        self,
        team: TeamSpec | dict[str, Any] | str | Path,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        args: TeamTRConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Callbacks | None = None,
        *,
        progress: bool = True,
        task: Task | None = None,
        on_reward_error: Literal["stop", "zero"] = "stop",
        on_overlap: Literal["refuse", "drop", "allow"] = "refuse",
        success_at_least: float = 1.0,
        reward_range: tuple[float, float] = (0.0, 1.0),
        answer: Callable[[str], str | None] | None = None,
    ) -> None:
        _check_choice("on_reward_error", on_reward_error, ("stop", "zero"))
        _check_choice("on_overlap", on_overlap, ("refuse", "drop", "allow"))
        if task is not None:
            given = {"reward_funcs": reward_funcs != (), "train_dataset": train_dataset is not None}
            given |= {"eval_dataset": eval_dataset is not None, "on_reward_error": on_reward_error != "stop"}
            given |= {"on_overlap": on_overlap != "refuse", "success_at_least": success_at_least != 1.0}
            _check_alone(given | {"reward_range": tuple(reward_range) != (0.0, 1.0), "answer": answer is not None})
            reward_range = checked_task(task, "task: got").reward_range
        elif train_dataset is None:
            raise UserError("train_dataset: give a datasets.Dataset or a list of dicts with a 'prompt' column, or task=")
        functions = _functions(reward_funcs) if task is None else []
        args = TeamTRConfig() if args is None else args
        if not isinstance(args, TeamTRConfig):
            raise UserError(f"args: give a TeamTRConfig, not {type(args).__name__}")
        base, section, self._start_from = team_parts(team)
        data = args.model_dump() | {"base": base, "team": section, "task": {"name": "script", "reward_range": reward_range}}
        recipe = _checked_recipe(data)
        if task is not None:
            self._set_up(recipe, task, callbacks, progress)
            return
        within = recipe.task.reward_range
        rewards = Rewards(functions, on_reward_error, in_a_script)
        same = eval_dataset is train_dataset
        used = {"success_at_least": success_at_least, "reward_range": within, "on_reward_error": on_reward_error}
        used["on_overlap"] = "allow" if same else on_overlap
        reader = functools.partial(read_answer, answer, key="answer") if answer else None
        rows = DatasetTask(
            train_dataset, eval_dataset, rewards, success_at_least=success_at_least, reward_range=within, answer=reader
        )
        script = script_data(functions, answer, train_dataset, eval_dataset, recipe.folder, used)
        if same:
            logger.warning("eval_dataset is train_dataset: accuracies are those on the prompts that are trained on")
        elif eval_dataset is not None:
            rows.settle_overlap(on_overlap, "pass on_overlap='drop'")
        self._set_up(recipe, rows, callbacks, progress, script)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, callbacks: Callbacks | None = None, *, progress: bool = True, team: str | Path | None = None
    ) -> TeamTRTrainer:
        """A trainer for a recipe file: `TeamTRTrainer.from_recipe(load_recipe("recipe.yaml"))`. Team, task and rewards are the
        recipe's; one that a script's run has saved is refused, since its rewards are in the script. `team`: a run or a stored
        team whose adapters a new run begins with; its base, agents' names and LoRA settings must be the recipe's."""
        trainer = cls.__new__(cls)
        trainer._start_from = None if team is None else Path(team)
        trainer._set_up(recipe, recipe.task.build(recipe.folder), callbacks, progress)
        return trainer

    def _set_up(
        self, recipe: Recipe, task: Task, callbacks: Callbacks | None, progress: bool, script: ScriptData | None = None
    ) -> None:
        self.recipe, self.task, self._progress = recipe, task, progress
        self._script = script
        if missing := missing_trackers(recipe):
            raise (
                RecipeError([p.of_a_script("TeamTRConfig") for p in missing], "TeamTRTrainer") if script else RecipeError(missing)
            )
        listed = [callbacks] if isinstance(callbacks, (TrainerCallback, type)) else callbacks or ()
        self._callbacks = [checked_callback(callback) for callback in listed]
        self.playable: PlayableTeam | None = None
        self.run: TrainingRun | None = None
        self._broken_off: RunDir | None = None  # a run that was interrupted; its checkpoint has the last whole team
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Adds a callback, or a class of them, to those that the next `train` calls."""
        self._callbacks.append(checked_callback(callback))

    def _with_progress(self) -> list[TrainerCallback]:
        shown = any(isinstance(callback, (LiveView, ProgressCallback, PrinterCallback)) for callback in self._callbacks)
        return self._callbacks if shown or not self._progress else [LiveView(), *self._callbacks]

    def open(self) -> PlayableTeam:
        """Loads the base and the adapters, once, and returns the team as it is now; `train` and `evaluate` do it themselves."""
        return self._open(self._start_from)

    def _open(self, start: Path | None) -> PlayableTeam:
        if self._closed:  # another load would have the adapters from before the training
            raise UserError("the trainer is closed; make another one, with team=RUN_DIR to go on from this one's adapters")
        if self.playable is None:
            stored = start_of(self.recipe, start) if start else None  # what does not fit shows before a base is loaded
            self.playable = open_recipe(self.recipe)
            if stored is not None:
                load_versions(self.playable, stored.versions, stored.adapters)
        self.playable.renew_sampler(self.recipe.rollout)
        if self._broken_off is not None:
            load_versions(self.playable, self._broken_off.checkpoints.state().versions, self._broken_off.adapters)
            self._broken_off = None
        return self.playable

    def train(self, *, resume: bool = False, name: str = "team") -> TrainSummary:
        """Runs all stages and returns what came of them; `TrainSummary.run_dir` holds the adapters and everything logged.

        `resume` goes on from the newest checkpoint of the run directory, exactly where it stopped; the settings must be the
        same, `stages` may be more. The directory is `output_dir`, or runs/NAME with `name` (the first that is free, or with
        `resume` the newest). KeyboardInterrupt and errors leave a run that can be resumed, and nothing where it had not begun.
        """
        with in_their_words(self.recipe), fits(self.recipe, self._tokens):
            return self._train(resume, name)

    def _tokens(self) -> int | None:
        """The size of a micro-batch, once a run has chosen it."""
        return self.run.updater.scorer.tokens_per_microbatch if self.run else None

    def _train(self, resume: bool, name: str) -> TrainSummary:
        started, process, threads = time.monotonic(), process_age(), torch.get_num_threads()
        recipe, ranks = self.recipe, process_ranks()
        run_dir = ranks.broadcast(chosen_run_dir(recipe.output_dir, name, resume=resume) if ranks.first else RunDir(Path()))
        if self._script is not None:
            recipe = self._script.recipe_for(recipe, run_dir)
        if ranks.first:
            run_dir.check(recipe, resume=resume, start=self._start_from)
        trust_programs(recipe)
        ranks.check_equal(sha256(recipe.model_dump_json().encode())[:12], "its recipe")
        new, callbacks = ranks.first and not run_dir.path.exists(), self._with_progress() if ranks.first else []
        recipe = self.recipe = run_dir.with_stages_done(run_dir.with_swaps(recipe))
        goes_on = ranks.broadcast(run_dir.checkpoints.exists())  # with the adapters of its checkpoint
        start = None if goes_on else self._start_from
        playable = self._open(start)
        if self._script is not None and ranks.first:
            self._script.write(run_dir)
        source = {"source": str(start), "versions": version_names(playable.adapter_versions())} if start else None
        lock = run_dir.claim(recipe, {**code_hashes(recipe), **data_hashes(recipe)}, source) if ranks.first else None
        try:
            context = RunContext(
                playable=playable,
                task=self.task,
                config=recipe,
                run_dir=run_dir,
                accelerator=open_accelerator(recipe, playable, run_dir),
                events=Events(callbacks, recipe, updates=recipe.training.stages * len(playable.team.names)),
                process_seconds=process,
                started=started,
            )
            self.run = TrainingRun(context)
            with closing(self.run):
                if ranks.broadcast(run_dir.checkpoints.exists()):
                    self.run.resume()
                train(self.run)
        except BaseException:
            self._broken_off = run_dir if run_dir.checkpoints.exists() else None
            if new and self._broken_off is None:
                run_dir.remove()  # a start that failed leaves no empty run behind
            raise
        finally:
            if run_dir.checkpoints.exists():
                self._start_from = run_dir.path  # another run of this trainer begins with what this one has made
            torch.set_num_threads(threads)  # a resumed run goes on with those that it was started with
            if lock is not None:
                lock.release()
            for view in callbacks:
                if isinstance(view, LiveView):
                    view.close()
        return self._summary(self.run)

    def close(self) -> None:
        """Ends the sampler: an engine gives its memory back, servers forget the adapters. Nothing is lost: what was trained is in
        the run directory. A second call does nothing; training or evaluating after it is refused."""
        if self.playable is not None and not self._closed:
            self.playable.close()
        self._closed = True

    def evaluate(self, *, items: int | None = None, k: int | None = None) -> Evaluation:
        """Plays the team as it is now on held-out prompts, `k` times on each of the first `items` (None: the settings'), and
        returns its accuracy (`avg_at_k`), `pass_at_k`, `mean_reward` and more, with standard errors."""
        for name, count in (("items", items), ("k", k)):
            if count is not None and count < 1:
                raise UserError(f"{name} = {count}: must be at least 1")
        with in_their_words(self.recipe), fits(self.recipe):
            playable = self.open()
            playable.publish_all()  # within the stage of a joint update the sampler has the team that began it
            plan = plan_in_training(self.task, self.recipe, items, k)
            return summarise(playable.play(self.task, plan), self.task, plan)

    def _summary(self, run: TrainingRun) -> TrainSummary:
        state = run.state
        measured = not state.accepted_since  # a callback may stop a run before it evaluates the team
        return TrainSummary(
            run_dir=str(run.run_dir.path),
            stages=state.stage,
            **state.counts,
            accuracy_before=state.accuracy_before,
            accuracy_after=state.accuracy_after if measured else None,
            reward_before=state.reward_before,
            reward_after=state.reward_after if measured else None,
            episodes_evaluated=state.episodes_evaluated if measured else 0,
            tokens=state.sampled_tokens,
            seconds=round(state.seconds, 3),
            adapters={agent: version.content_hash for agent, version in state.versions.items()},
        )


def _functions(reward_funcs: Any) -> list[Callable[..., Any]]:
    """One function or several as a list. TRL also takes the names of reward models: those are no functions here."""
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    wanted = "f(prompts, completions, **columns) -> list[float]"
    if not functions:
        raise UserError(f"reward_funcs: give at least one reward function {wanted}")
    for function in functions:
        if not callable(function):
            raise UserError(f"reward_funcs: {function!r} is no function; give {wanted}")
    return functions


def _check_alone(given: dict[str, bool]) -> None:
    """Refuses datasets and rewards that are given together with a task."""
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise UserError(f"task: {', '.join(names)} given too; a task brings its own items and rewards, so leave that out")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} = {value!r}: must be one of {', '.join(choices)}")


def _checked_recipe(data: dict[str, Any]) -> Recipe:
    found = problems(data)
    if found:
        raise RecipeError([problem.of_a_script("TeamTRTrainer") for problem in found], "TeamTRTrainer")
    return Recipe(**data).placed_in(Path.cwd()).of_a_script()
