"""What `eval` and `ask` do with a stored team."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.ranks import process_ranks
from teamtr_lora.evaluation.compare import Comparison, check_comparable, compare
from teamtr_lora.evaluation.contents import code_hashes
from teamtr_lora.evaluation.evaluate import evaluation_items, evaluation_purpose
from teamtr_lora.evaluation.inference import Played, Policy
from teamtr_lora.evaluation.inference_baselines import BaselineOptions, open_baseline, resolve_baseline
from teamtr_lora.evaluation.outcome import Outcome, judge, problem_digest
from teamtr_lora.evaluation.result import EvaluationResult, Problems, make_result
from teamtr_lora.recipe import Recipe, RecipeError, ScriptSettings
from teamtr_lora.recipe.engine_facts import DEFAULT_ENGINE, ENGINES
from teamtr_lora.recipe.problems import check
from teamtr_lora.registry.identity import base_hash
from teamtr_lora.registry.reader import DEFAULT_ROOT
from teamtr_lora.registry.stored import StoredTeam, find_team
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.rollout.playable import PlayableTeam, fits, load_versions, open_recipe
from teamtr_lora.runs.evaluations import EvaluationStore, evaluation_name, is_evaluation, read_evaluation
from teamtr_lora.runs.transcripts import episode_record
from teamtr_lora.tasks import AskedTask, Item, Task
from teamtr_lora.tasks.machinery.task import Split
from teamtr_lora.team import Episode

logger = logging.getLogger(__name__)

# Episodes of a chunk: enough to fill the engine, yet an evaluation is written down in several pieces. An engine that refills its
# batch as rows finish gets longer chunks, since only their ends run half empty.
FEWEST_EPISODES = 32
PIECES = 8
REFILLED_BATCHES = 4


@dataclass(frozen=True)
class EvalOptions:
    """How `evaluate_team` measures. What is None is taken from the recipe of the run.

    split        which items: train or test
    k            episodes per item, for avg@k, pass@k, pass^k and maj@k
    temperature  of sampling; 0 is greedy
    limit        how many items, from the first on
    engine       what samples: a name that rollout.engine may have
    baseline     an inference-time baseline that answers in place of the team
    out          the folder of the results; None chooses one in the run
    reuse        whether a finished evaluation is read instead of played again
    registry     where a team's bare name is looked up
    more         recipe files and overrides that change a recipe, as `train` takes them; of a trained team only the sections task,
                 evaluation and rollout count, and an override of another one is refused
    """

    split: Split = "test"
    k: int | None = None
    temperature: float | None = None
    limit: int | None = None
    engine: str | None = None
    baseline: BaselineOptions | None = None
    out: Path | None = None
    reuse: bool = False
    registry: Path = DEFAULT_ROOT
    more: tuple[Sequence[str], Sequence[str]] = ((), ())


def _on_engine(stored: StoredTeam, engine: str) -> StoredTeam:
    """The team on another engine than its recipe's; UserError where the recipe asks for what that one cannot do."""
    recipe, problems = check(stored.recipe.model_dump() | {"rollout": {**stored.recipe.rollout.model_dump(), "engine": engine}})
    if recipe is None:
        raise RecipeError(problems, f"--engine {engine}")
    return replace(stored, recipe=recipe.placed_in(stored.recipe.folder))


@contextmanager
def opened(stored: StoredTeam) -> Iterator[tuple[Recipe, PlayableTeam]]:
    """A stored team, ready to play."""
    recipe = stored.recipe
    with fits(recipe), closing(open_recipe(recipe)) as playable:
        if stored.versions:
            load_versions(playable, stored.versions, stored.adapters)
        yield recipe, playable


def evaluate_team(source: str | Path, options: EvalOptions | None = None, progress: Progress | None = None) -> EvaluationResult:
    """Measures a team on held-out items and writes the results beside it.

    `source`: a run directory, a team of the registry, or a recipe file (its team untrained). `options`: how; see EvalOptions.
    `progress(done, total, tokens)` is called while it plays. The result has every measure with its interval (`measures`) and
    the folder it was written to. An evaluation that was interrupted goes on where it stopped when it is called again.
    """
    options = options or EvalOptions()
    stored, task, items, settings = _planned(source, options)
    store = EvaluationStore(options.out or stored.evaluations / evaluation_name(settings), settings, Outcome.from_dict)
    ranks, result = process_ranks(), None
    with store.claimed() if ranks.first else nullcontext(), fits(stored.recipe):
        if ranks.first and store.finished and not options.reuse:
            store.forget()
        _play_missing(stored, store, task, items, options, progress)
        if ranks.first:
            outcomes = [outcome for chunk in store.answers(_chunk_sizes(settings)) for outcome in chunk]
            result = make_result(outcomes, settings, str(store.folder))
            store.finish(result.as_dict())
    result = ranks.broadcast(result)
    assert result is not None
    return result


def _planned(source: str | Path, options: EvalOptions) -> tuple[StoredTeam, Task, list[Item], dict[str, Any]]:
    """The team, and what an evaluation of it plays, before a base is loaded: its task, items and settings."""
    stored = find_team(source, options.registry, recipes=True, more=options.more)
    if isinstance(stored.recipe.task, ScriptSettings):
        raise UserError(
            f"{source}: this run's items and rewards live in a Python script; use TeamTRTrainer(team={str(source)!r}, ...)"
            ".evaluate() there, or add a recipe whose task section names them"
        )
    if options.engine:
        stored = _on_engine(stored, options.engine)
    recipe = stored.recipe
    task = recipe.task.build(recipe.folder)
    items = evaluation_items(task, options.split, options.limit or recipe.evaluation.items)
    return stored, task, items, _settings(stored, task, items, options)


def compare_runs(sources: list[Path], options: EvalOptions, progress: Progress | None = None) -> Comparison:
    """Each source is a run, evaluated here unless it was with the same settings, or the folder of a finished evaluation."""
    if options.out is not None:
        raise UserError("--out is for one evaluation; with --compare each run keeps its own")
    options, names = replace(options, reuse=True), [str(source) for source in sources]
    finished = {source: _finished(source) for source in sources if is_evaluation(source)}
    first, second = (finished[s].problems if s in finished else _problems(s, options) for s in sources)
    check_comparable(first, second, names)  # before anything is played
    results = [finished[s] if s in finished else evaluate_team(s, options, progress) for s in sources]
    return compare(results[0], results[1], names)


def beside_team(source: str | Path, options: EvalOptions, baseline: EvaluationResult, progress: Progress | None) -> Comparison:
    """What `evaluate_team` found of a baseline, beside the team itself on the same items; a finished evaluation of it is read."""
    team = evaluate_team(source, replace(options, baseline=None, out=None, reuse=True), progress)
    return compare(team, baseline, ("the team", "the baseline"))


def _problems(source: Path, options: EvalOptions) -> Problems:
    _, _, items, settings = _planned(source, options)
    return Problems(settings["k"], [(item.id, problem_digest(item)) for item in items])


def _finished(folder: Path) -> EvaluationResult:
    settings, outcomes = read_evaluation(folder, Outcome.from_dict)
    return make_result(outcomes, settings, str(folder))


def _settings(stored: StoredTeam, task: Task, items: list[Item], options: EvalOptions) -> dict[str, Any]:
    """Everything that decides the result: an evaluation goes on, or is read again, only where all of it is the same."""
    recipe, versions = stored.recipe, stored.versions
    section, rollout = recipe.evaluation, recipe.rollout
    k = options.k or section.samples_per_item or recipe.task.paper_samples.get(recipe.task.name, 1)
    policy = resolve_baseline(options.baseline, recipe, task) if options.baseline else {"kind": "team"}
    speaking = set(versions) if not options.baseline else {options.baseline.agent}
    episodes = len(items) * k * int(policy.get("votes", 1))
    batches = REFILLED_BATCHES if ENGINES[rollout.engine].refills_batch else 1
    chunk = max(FEWEST_EPISODES, min(rollout.requests_per_batch * batches, -(-episodes // PIECES)))
    return {
        "task": recipe.task.model_dump(mode="json"),
        "split": options.split,
        "items": len(items),
        "items_digest": sha256("\n".join(f"{item.id} {problem_digest(item)}" for item in items).encode("utf-8", "replace")),
        "k": k,
        "temperature": section.sampled_at(rollout) if options.temperature is None else options.temperature,
        "max_message_tokens": rollout.max_message_tokens,
        "policy": policy,
        "base": recipe.base.model_dump(mode="json"),
        "team": recipe.team.model_dump(mode="json"),
        "versions": {agent: version.name for agent, version in versions.items() if agent in speaking},
        "engine": rollout.engine,
        "seed": recipe.seed,
        "items_per_chunk": max(1, chunk * len(items) // episodes),
        "code": code_hashes(recipe),
        "base_sha256": base_hash(recipe),
        # what is written of an answer; earlier ones of teams that vote had the votes of other messages
        **({"votes": "of the answer"} if recipe.team.router.votes else {}),
    }


def _chunk_sizes(settings: dict[str, Any]) -> list[int]:
    """Answers in each chunk."""
    items, step, k = settings["items"], settings["items_per_chunk"], settings["k"]
    return [(min(start + step, items) - start) * k for start in range(0, items, step)]


def _play_missing(
    stored: StoredTeam,
    store: EvaluationStore[Outcome],
    task: Task,
    items: list[Item],
    options: EvalOptions,
    progress: Progress | None,
) -> None:
    settings = store.settings
    sizes, k, ranks = _chunk_sizes(settings), settings["k"], process_ranks()
    done = ranks.broadcast(len(store.answers(sizes)) if ranks.first else 0)
    if done == len(sizes):
        return
    if done:
        logger.warning("%s: continuing after the %d answers that are there", store.folder, sum(sizes[:done]))

    def told(played: int, _: int, tokens: int) -> None:
        if progress:
            progress(start * k + played, len(items) * k, tokens)

    with _open_policy(stored, task, options, settings) as policy:
        for chunk in range(done, len(sizes)):
            start = chunk * settings["items_per_chunk"]
            part = items[start : start + settings["items_per_chunk"]]
            attempts = policy.attempts(part, range(start, start + len(part)), k, told)
            if ranks.first:
                store.append([episode_record(a.episode) | asdict(judge(a, task)) for a in attempts])


@contextmanager
def _open_policy(stored: StoredTeam, task: Task, options: EvalOptions, settings: dict[str, Any]) -> Iterator[Policy]:
    purpose = evaluation_purpose(settings["seed"], settings["split"])
    if options.baseline:
        with open_baseline(stored, settings, task, purpose) as policy:
            yield policy
        return
    with opened(stored) as (recipe, playable):
        tokens = recipe.rollout.max_message_tokens
        yield Played(playable, task, temperature=settings["temperature"], max_message_tokens=tokens, purpose=purpose)


def ask_team(
    folder: str | Path, question: str, *, temperature: float | None = None, seed: int = 0, registry: Path = DEFAULT_ROOT
) -> Episode:
    """Plays one episode of a team on your own question and returns it; `episode.messages` are what the agents said, and
    `episode.answer` is the team's answer, as its router and its task define it.

    `folder`: a run directory, or a team of the registry (a bare name is looked up in `registry`). `temperature`: None takes the
    recipe's, 0 is greedy. Another `seed` gives another answer. The task itself takes no part: nothing is scored and nothing
    replies to a message, so its items, reward functions and environment need not be on this machine.
    """
    if not question.strip():
        raise UserError("the question is empty")
    stored = find_team(folder, registry, scored=False, recipes=True)
    if stored.recipe.task.replies:
        logger.warning(
            "while it trains, %s replies to the team's messages; nothing does here, and the agents hear each other alone",
            stored.recipe.task.replies,
        )
    # starting another engine would take longer than one answer
    with opened(_on_engine(stored, DEFAULT_ENGINE)) as (recipe, playable):
        rollout = recipe.rollout
        plan = PlayPlan(
            [Item("question", question)],
            episodes_per_item=1,
            temperature=rollout.temperature if temperature is None else temperature,
            max_message_tokens=rollout.max_message_tokens,
            purpose=f"ask/{seed}",
        )
        reader = recipe.task.voting_reader(recipe.folder, votes=recipe.team.router.votes)
        episode = playable.play(AskedTask(reader), plan)[0]
        episode.answer = reader.team_answer(episode)
        return episode


def transcript(episode: Episode) -> dict[str, Any]:
    """What `ask_team` returned, as an evaluation would write it down; nothing has scored it."""
    return episode_record(episode, scored=False)
