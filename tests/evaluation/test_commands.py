"""Evaluations on disk: interrupted ones go on and end alike, finished ones are read when asked, others are refused."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation import commands
from teamtr_lora.evaluation.commands import EvalOptions, compare_runs, evaluate_team
from teamtr_lora.evaluation.inference_baselines import BaselineOptions
from teamtr_lora.evaluation.outcome import Attempt
from teamtr_lora.recipe.measuring_sections import EvaluationSection
from teamtr_lora.runs.evaluations import EvaluationStore
from teamtr_lora.tasks.table import FAMILIES

RECIPE = """
base: {source: BASE, device: cpu}
team:
  protocol: {view: per_agent}
  agents: [{name: a, lora: {rank: 2}}, {name: b, lora: {rank: 2}}]
task: {name: largest, shots: 1}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 4, requests_per_batch: 32}
evaluation: {items: 40}
"""
OPTIONS = EvalOptions(k=2)


@pytest.fixture
def recipe(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("BASE", str(tiny_base)))
    return path


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Interrupts the evaluation when it writes its next chunk but `chunks`, half of which reaches the disk."""
    real = EvaluationStore.append

    def arm(chunks: int) -> None:
        left = [chunks]

        def append(self: EvaluationStore[Any], rows: Sequence[dict[str, Any]]) -> None:
            if not left[0]:
                half = len(rows) // 2
                real(self, rows[:half])
                with open(self.folder / "episodes.jsonl", "ab") as file:
                    file.write(b'{"item": "cut o')
                raise KeyboardInterrupt
            left[0] -= 1
            real(self, rows)

        monkeypatch.setattr(EvaluationStore, "append", append)

    return arm


def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The items of every chunk that is played from here on."""
    seen: list[int] = []
    real = commands.Played.attempts

    def attempts(self: Any, items: Any, groups: Any, k: int, progress: Any) -> list[Attempt]:
        seen.extend(groups)
        return real(self, items, groups, k, progress)

    monkeypatch.setattr(commands.Played, "attempts", attempts)
    return seen


def test_an_interrupted_evaluation_goes_on_and_ends_alike(
    recipe: Path, tmp_path: Path, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate_team(recipe, OPTIONS)
    folder = Path(whole.folder)
    lines = (folder / "episodes.jsonl").read_bytes()
    result = json.loads((folder / "result.json").read_text())
    assert len(lines.splitlines()) == 80 == whole.evaluation.episodes
    assert result == json.loads(json.dumps(whole.as_dict()))
    stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        evaluate_team(recipe, OPTIONS)
    assert not (folder / "result.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    seen = played(monkeypatch)
    told: list[tuple[int, int]] = []
    again = evaluate_team(recipe, OPTIONS, lambda done, total, tokens: told.append((done, total)))
    assert seen == list(range(32, 40)), "two chunks of sixteen items were there, the half one is played again"
    assert told[0][0] >= 64 and told[-1] == (80, 80)
    assert (folder / "episodes.jsonl").read_bytes() == lines
    assert again.as_dict() == whole.as_dict()


def test_a_finished_evaluation_is_played_again_unless_reused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = evaluate_team(recipe, OPTIONS)
    seen = played(monkeypatch)
    assert evaluate_team(recipe, EvalOptions(k=2, reuse=True)).as_dict() == first.as_dict() and seen == []
    assert evaluate_team(recipe, OPTIONS).as_dict() == first.as_dict() and seen == list(range(40))
    (Path(first.folder) / "result.json").unlink()  # killed between the last answer and the result
    assert evaluate_team(recipe, OPTIONS).as_dict() == first.as_dict() and len(seen) == 40


def test_other_settings_are_another_evaluation(recipe: Path, tmp_path: Path) -> None:
    small = EvalOptions(k=1, limit=3)
    names = {Path(evaluate_team(recipe, option).folder).name for option in (small, EvalOptions(k=1, limit=3, temperature=0.5))}
    assert len(names) == 2 and all(name.startswith("team-test-3x1-t") for name in names)
    out = tmp_path / "mine"
    evaluate_team(recipe, EvalOptions(k=1, limit=3, out=out))
    assert (out / "result.json").exists()
    with pytest.raises(UserError, match=r"holds another evaluation \(temperature differ\); choose another --out"):
        evaluate_team(recipe, EvalOptions(k=1, limit=3, temperature=0.5, out=out))
    with pytest.raises(UserError, match="is not empty and holds no evaluation"):
        evaluate_team(recipe, EvalOptions(k=1, limit=3, out=tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        evaluate_team(recipe, EvalOptions(k=1, limit=3, out=tmp_path / "file"))
    (out / "settings.json").write_text("{")
    with pytest.raises(UserError, match=r"settings.json: no proper JSON"):
        evaluate_team(recipe, EvalOptions(k=1, limit=3, out=out))


def test_an_evaluation_of_a_team_that_votes_is_not_one_from_before_its_votes_were_right(recipe: Path, tmp_path: Path) -> None:
    voting = ["team.router.kind=debate", "team.router.answer=majority", 'team.agents=[{"name": "a"}, {"name": "b"}]']
    for name, more in (("turns", voting[2:]), ("votes", voting)):
        out = tmp_path / name
        options = EvalOptions(k=1, limit=3, out=out, reuse=True, more=((), ["team.protocol.view=per_agent", *more]))
        evaluate_team(recipe, options)
        settings = json.loads((out / "settings.json").read_text())
        assert ("votes" in settings) == (name == "votes"), "others are read as before"
        if settings.pop("votes", None):
            (out / "settings.json").write_text(json.dumps(settings))
            with pytest.raises(UserError, match="holds another evaluation"):
                evaluate_team(recipe, options)


def test_one_process_at_a_time(recipe: Path, tmp_path: Path) -> None:
    option = EvalOptions(k=1, limit=3, out=tmp_path / "mine")
    result = evaluate_team(recipe, option)
    with EvaluationStore(tmp_path / "mine", result.settings, dict).claimed(), pytest.raises(UserError, match="another process"):
        evaluate_team(recipe, option)


def test_runs_that_cannot_be_compared_are_refused_before_anything_is_played(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = played(monkeypatch)
    short = evaluate_team(recipe, EvalOptions(k=1, limit=3))
    played_before = len(seen)
    with pytest.raises(UserError, match="has 6 and .* has 3; give --limit"):
        compare_runs([recipe, Path(short.folder)], EvalOptions(k=1, limit=6))
    with pytest.raises(UserError, match="is sampled 2 times an item and .* 1 times; give --k"):
        compare_runs([recipe, Path(short.folder)], EvalOptions(k=2, limit=3))
    with pytest.raises(UserError, match="a paired test needs the same items, but item 0 is"):
        compare_runs([recipe, Path(short.folder)], EvalOptions(k=1, limit=3, split="train"))
    assert len(seen) == played_before


def test_comparing_runs_and_folders(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team against itself and against a baseline of its base, on the same items."""
    option = EvalOptions(k=1, limit=6)
    same = compare_runs([recipe, recipe], option)
    assert same.tests["avg@1"].difference == 0 and same.tests["avg@1"].p_value == 1
    seen = played(monkeypatch)
    assert compare_runs([recipe, recipe], option) == same and not seen, "finished ones are read"
    team = evaluate_team(recipe, option)
    chain = evaluate_team(recipe, EvalOptions(k=1, limit=6, baseline=BaselineOptions("cot")))
    found = compare_runs([Path(team.folder), Path(chain.folder)], EvalOptions())
    tokens = found.tests["sampled tokens per answer"]
    assert (tokens.first, tokens.second) == (team.evaluation.sampled_tokens / 6, chain.evaluation.sampled_tokens / 6)
    (Path(chain.folder) / "result.json").unlink()
    with pytest.raises(UserError, match="not finished"):
        compare_runs([Path(team.folder), Path(chain.folder)], EvalOptions())
    with pytest.raises(UserError, match="--out is for one evaluation"):
        compare_runs([recipe, recipe], EvalOptions(out=tmp_path / "x"))


@pytest.mark.parametrize("kind", ["cot", "self_consistency", "tree_of_thoughts"])
def test_baselines_by_the_command(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    argv = ["eval", str(recipe), "--baseline", kind, "--k", "2", "--limit", "3", "--depth", "1", "--breadth", "2"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    policy = found["settings"]["policy"]
    assert policy["kind"] == kind and found["episodes"] == 6 and found["measures"]["avg@2"]["value"] == found["avg_at_k"]
    limit = {"cot": 8, "self_consistency": 12, "tree_of_thoughts": policy["tokens"]}[kind]  # two messages of four tokens
    per_answer = [row["measures"]["sampled tokens per answer"] for row in found["by_item"]]
    assert 0 < max(per_answer) <= limit == policy["tokens"]
    beside, team = found["beside_team"]["tests"]["avg@2"], evaluate_team(recipe, EvalOptions(k=2, limit=3, reuse=True))
    assert (beside["first"], beside["second"]) == (team.evaluation.avg_at_k, found["avg_at_k"])
    seen = played(monkeypatch)
    assert main([*argv, "--reuse"]) == 0 and not seen, "both have been played"
    text = capsys.readouterr().out
    assert "by the base alone" in text and "A: the team at" in text and "B: the baseline at" in text


def test_mistakes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        ([], "eval takes one RUN_OR_TEAM, or --compare"),
        ([str(recipe), "--compare", "x", "y"], "eval takes one RUN_OR_TEAM, or --compare"),
        ([str(recipe), "--baseline", "cot", "--agent", "c"], "--agent c: the team has no such agent; it has a, b"),
        (
            [str(recipe), "--baseline", "tree_of_thoughts", "--tokens", "20"],
            "--tokens 20: this tree has 9 thoughts and needs 323",
        ),
        (["--compare", "nowhere", str(recipe)], "nowhere: no run or team here"),
    ):
        assert main(["eval", *argv]) == 2
        assert words in capsys.readouterr().err


def test_the_papers_k() -> None:
    assert EvaluationSection().samples_in_training == 1
    found = {name: k for family in FAMILIES for name, k in family.paper_samples.items() if name in family.names()}
    assert found == {
        "aime24": 64,
        "aime25": 64,
        "math500": 4,
        "zebralogic": 64,
        "autologi": 64,
        "arbench_gn": 25,
        "arbench_dc": 25,
        "arbench_sp": 25,
        "planbench_blocksworld": 8,
        "tau2_retail": 4,
        "tau2_airline": 4,
    }


REWARDS = """
def found(prompts, completions, answer, **columns):
    return [1.0 for _ in prompts]
"""


def test_a_recipe_is_changed_by_others_and_by_settings(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.yaml").write_text("evaluation: {items: 3}\n")
    assert main(["eval", str(recipe), "more.yaml", "--k", "2", "task.shots=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["items"] == 3 and found["folder"].startswith(f"evaluations/{recipe.stem}-more/")
    assert main(["eval", str(recipe), "task.shoots=0"]) == 2 and "did you mean 'shots'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained team. Evaluations are added."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "recipe.yaml").write_text(RECIPE.replace("BASE", "base") + "training: {stages: 1, inner_epochs: 1}\n")
    (folder / "base").symlink_to(tiny_base)
    short = ["evaluation.items=2", "rollout.max_message_tokens=2", "--run-dir", str(folder / "run")]
    assert main(["train", str(folder / "recipe.yaml"), *short]) == 0
    return folder / "run"


def test_a_trained_team_is_measured_on_other_items(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evaluation has its own folder, and is read again as itself."""
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "answer": f"{i}"}) + "\n" for i in range(9)))
    (tmp_path / "task.yaml").write_text(
        "task: {name: dataset, path: rows.jsonl, answer_column: answer, test_fraction: 0.5, reward: 'own_rewards:found'}\n"
        "evaluation: {items: 2}\nseed: 7\nteam: {agents: [{name: c}, {name: d}]}\ntraining: {stages: 900}\n"
    )

    def evaluated(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["eval", str(run), *words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    ways = ([], ["task.shots=0", "rollout.max_message_tokens=3"], [str(tmp_path / "task.yaml")], ["task.name=letter_count"])
    results = [evaluated(*words) for words in ways]
    settings = [result["settings"] for result in results]
    assert len({result["folder"] for result in results}) == 4
    assert all(Path(result["folder"]).parent == run / "evaluations" for result in results)
    assert [of["task"]["name"] for of in settings] == ["largest", "largest", "dataset", "letter_count"]
    assert [of["task"].get("shots") for of in settings[:2]] == [1, 0]
    assert [of["max_message_tokens"] for of in settings] == [2, 3, 2, 2]
    assert results[2]["avg_at_k"] == 1 and results[2]["items"] == 2, "its rows and its reward lie beside the task's recipe"
    for of in settings[1:]:
        assert {key: of[key] for key in ("team", "versions", "seed", "base_sha256")} == {
            key: settings[0][key] for key in ("team", "versions", "seed", "base_sha256")
        }
    seen = played(monkeypatch)
    assert [evaluated(*words, "--reuse") for words in ways] == results and not seen
    evaluated("task.shots=1", "--reuse")
    assert not seen, "what the recipe says already is no other evaluation"


def test_two_trained_teams_are_compared_on_other_items(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name for path in (run / "evaluations").glob("*")}
    assert main(["eval", "task.shots=2", "--compare", str(run), str(run), "--k", "1", "rollout.temperature=0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tests"]["avg@1"]["difference"] == 0 and found["temperatures"] == [0.5, 0.5]
    (new,) = {path.name for path in (run / "evaluations").glob("*")} - before
    assert json.loads((run / "evaluations" / new / "settings.json").read_text())["task"]["shots"] == 2


def test_what_makes_a_trained_team_is_settled(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "task.yaml").write_text("tasks: {name: largest}\n")
    for word, part in (
        ("team.agents.a.role=x", f"team.agents.a.role=x: {run} is a trained team, whose recipe is settled"),
        ("base.precision=float32", "is a trained team, whose recipe is settled but for task, evaluation, rollout; change a"),
        ("seed=1", "is a trained team, whose recipe is settled"),
        ("tasks", "is a trained team, whose recipe is settled"),
        ("task.shoots=1", "did you mean 'shots'"),
        (str(tmp_path / "task.yaml"), "did you mean 'task'"),
        (str(tmp_path / "none.yaml"), "no such recipe"),
    ):
        assert main(["eval", str(run), word]) == 2
        assert part in (error := capsys.readouterr().err) and error.count("\n") == 1, error


def test_a_reward_of_ones_own_says_nothing_of_single_messages(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The team is right by its reward, whatever one message looks like: unknown is no 0, in the table and in the JSON."""
    monkeypatch.setenv("COLUMNS", "140")
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}", "answer": f"{i}"}) + "\n" for i in range(30)))
    text = recipe.read_text().replace("{name: largest, shots: 1}", "{name: dataset, path: rows.jsonl, answer_column: answer, "
                                      "test_fraction: 0.5, reward: 'own_rewards:found'}")  # fmt: skip
    recipe.write_text(text)
    assert main(["eval", str(recipe), "--k", "2", "--limit", "2", "--out", "results"]) == 0
    shown = capsys.readouterr().out
    for name in ("maj@2", "a's own answer right", "b's own answer right", "all agents right", "given that the team is right"):
        assert name not in shown
    assert "single messages are not judged" in shown and "task.answer" in shown
    result = json.loads((tmp_path / "results" / "result.json").read_text())
    assert result["avg_at_k"] == 1.0 and "maj@2" not in result["measures"]
    assert result["agents"] == {"a": None, "b": None} and result["coordination"] is result["coordination_given_success"] is None
