"""A team moved to a base of another width, with another head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.algorithm.token_kl import score_tokens
from teamtr_lora.base.versions import read_adapter_folder, write_version
from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.rollout.playable import open_team
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.swap.compatibility import compare_vocabularies
from teamtr_lora.swap.probe_contexts import play_probe

ROOT = Path(__file__).resolve().parents[2]

RADIUS = ["--delta-align", "3", "--probe-contexts", "8", "--items", "3"]


@pytest.fixture(scope="session")
def wide_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random base of the same tokenizer: 96 wide where the tiny one is 64, and 16 more ids in its head."""
    folder = tmp_path_factory.mktemp("wide-base") / "wide"
    config = Qwen3Config.from_pretrained(tiny_base)
    config.hidden_size, config.num_attention_heads, config.vocab_size = 96, 3, config.vocab_size + 16
    with torch.random.fork_rng():
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("old", "new"), [(11, 11), (11, 14), (14, 11)])
def test_kl_between_heads_of_different_widths(old: int, new: int) -> None:
    """Against float64 sums: the old policy renormalised over shared ids, the new one with all the probability it really has."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 5, generator=generator), torch.randn(new, 5, generator=generator)
    other, other_head = torch.randn(7, 3, generator=generator), torch.randn(old, 3, generator=generator)
    shared = min(old, new)
    scores = score_tokens(
        hidden,
        head,
        torch.zeros(7, dtype=torch.long),
        temperature=0.7,
        chunk_tokens=3,
        current_ND=other,
        current_head_VD=other_head,
    )
    p = torch.softmax((other.double() @ other_head.double().t())[:, :shared] / 0.7, -1)
    q = torch.softmax(hidden.double() @ head.double().t() / 0.7, -1)[:, :shared]
    assert scores.kl_N is not None
    torch.testing.assert_close(scores.kl_N.double(), (p * (p / q).log()).sum(-1), rtol=1e-5, atol=1e-6)


def test_a_team_moves_to_a_base_of_another_width(
    trained: Path, wide_base: Path, tmp_path: Path, files: Callable[[Path], dict[str, bytes]], capsys: Any
) -> None:
    old, out = files(trained), tmp_path / "moved"
    assert main(["rebase", str(trained), "--to", str(wide_base), "--out", str(out), *RADIUS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert files(trained) == old, "the old team is left as it is"
    assert '"by_item"' not in json.dumps(report)
    checks = {c["check"]: c for c in report["checks"]}
    assert checks["head width"]["verdict"] == "note" and "ids from 272 on" in checks["head width"]["fix"]
    assert checks["token ids"]["verdict"] == "ok" and int(checks["token ids"]["old"].split()[0]) >= 1000
    for alignment in report["alignments"].values():
        assert alignment["before"]["mean"] > 3 >= alignment["after"]["mean"] and alignment["reached"]
    stored = read_run(out)
    recipe, versions = stored.recipe, stored.versions
    assert recipe.base.source == str(wide_base) and {a: v.name for a, v in versions.items()} == report["versions"]
    assert main(["ask", str(out), "item 3"]) == 0
    capsys.readouterr()
    stored = import_path(Registry(tmp_path / "registry"), out, team="moved")
    assert stored.team is not None and {a.made_by for a in stored.adapters} == {stored.team.made_by} == {"rebase"}
    assert {step.agent: step.old for step in stored.team.lineage} == report["old_versions"]
    assert stored.team.metrics["mean_reward"] == report["aligned"]["evaluation"]["mean_reward"]
    # the same command again: the team is there; training goes on from it, its first stage measured on the new base
    assert main(["rebase", str(trained), "--to", str(wide_base), "--out", str(out), *RADIUS]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["train", str(out), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 2
    assert (out / "adapters" / "left" / versions["left"].name).is_dir() and read_run(out).versions["left"].number == 1


def test_tokenizers_that_differ_are_refused_with_the_first_string(
    trained: Path, wide_base: Path, tmp_path: Path, capsys: Any
) -> None:
    other = Path(shutil.copytree(wide_base, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]  # the prompts before "item 7" are the same
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = tmp_path / "moved"
    assert main(["rebase", str(trained), "--to", str(other), "--out", str(out), *RADIUS]) == 2
    error = capsys.readouterr().err
    assert "the tokenizers differ on 'item 7'" in error or "the tokenizers differ on 'item 8'" in error
    # a token that no prompt of this task has is still a token
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    vocabulary["Q"], vocabulary["Z"] = vocabulary["Z"], vocabulary["Q"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["rebase", str(trained), "--to", str(other), "--out", str(out), *RADIUS]) == 2
    assert "the tokenizers differ on 'Q'" in capsys.readouterr().err
    assert main(["rebase", str(trained), "--to", str(wide_base), "--with", "fresh:rank=40", "--out", str(out), *RADIUS]) == 2
    assert "use at most 32" in capsys.readouterr().err
    for options, words in (
        (["--to", " ", "--out", str(out)], "--to: say which base"),
        (["--to", "nowhere", "--out", str(out)], "--to nowhere: base.source: 'nowhere': no such folder"),
        (["--to", str(wide_base), "--out", str(other / "config.json")], "is there already; choose another --out"),
        (["--to", str(wide_base), "--out", str(other / "config.json" / "x")], "cannot be written"),
        (["--to", str(wide_base), "--out", "/"], "is there already"),
    ):
        assert main(["rebase", str(trained), *options, *RADIUS]) == 2
        assert words in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"], "what is refused leaves nothing"


ADDED = {
    "id": 260,
    "content": "<think>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a new token": (lambda t: t["added_tokens"].append(ADDED), "'<think>'; take a base with the same one, or allow"),
    "a merge": (lambda t: (t["model"]["merges"].append(["i", "t"]), t["model"]["vocab"].update(it=260)), "'it'"),
    "a split": (
        lambda t: t.update(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, t["pre_tokenizer"]],
            }
        ),
        "pre_tokenizer",
    ),
    "case": (lambda t: t.update(normalizer={"type": "Lowercase"}), "normalizer"),
    "spaces around": (lambda t: t["added_tokens"][0].update(lstrip=True), "added tokens"),
    "nothing": (lambda t: t["pre_tokenizer"].update(trim_offsets=not t["pre_tokenizer"]["trim_offsets"]), ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tokenizers_are_compared_beyond_strings(tiny_base: Path, tmp_path: Path, change: str) -> None:
    other = Path(shutil.copytree(tiny_base, tmp_path / "other"))
    data = json.loads((other / "tokenizer.json").read_text())
    CHANGES[change][0](data)
    (other / "tokenizer.json").write_text(json.dumps(data))
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_base, other))
    found = compare_vocabularies(old, new, extra=False)
    assert (found.verdict, CHANGES[change][1] in found.fix) == ("fail" if CHANGES[change][1] else "ok", True), found
    if change == "a new token":
        assert compare_vocabularies(old, new, extra=True).verdict == "note"
        assert compare_vocabularies(new, old, extra=True).verdict == "fail", "what the old team can say, the new one must"


def test_ids_that_a_narrower_head_lacks_are_left_out(
    trained: Path, wide_base: Path, tiny_base: Path, tmp_path: Path, capsys: Any
) -> None:
    """A base with unused rows in its head samples them now and then; the other base has no such token to read."""
    recipe = load_recipe(trained / "recipe.yaml").model_copy(update={"output_dir": None})
    wide = recipe.model_copy(update={"base": recipe.base.model_copy(update={"source": str(wide_base)})}).placed_in(recipe.folder)
    playable = open_team(wide.base, wide.team, wide.rollout, seed=0, folder=trained)
    task = wide.task.build(Path(json.loads((trained / "origin.json").read_text())["recipe_folder"]))
    probe = play_probe(playable, task, wide, ["left", "right"], 30, ids=272)
    everything = play_probe(playable, task, wide, ["left", "right"], 30)
    playable.close()
    ids = {i for e in probe.episodes for m in e.messages for i in m.token_ids}
    assert max(ids) < 272 <= max(i for e in everything.episodes for m in e.messages for i in m.token_ids)
    assert len(probe.halves("left", 30, 0)[0]) + len(probe.halves("left", 30, 0)[1]) == 30


def test_killed_at_any_moment_the_same_rebase_ends_the_same(
    trained: Path, wide_base: Path, tmp_path: Path, killable: Any, without_times: Callable[[Any], Any]
) -> None:
    """The new base's chat template opens an answer differently: the same messages are then learned in its own contexts."""
    other = Path(shutil.copytree(wide_base, tmp_path / "other"))
    template = other / "chat_template.jinja"
    assert "assistant\n{% endif %}" in template.read_text()
    template.write_text(template.read_text().replace("assistant\n{% endif %}", "assistant\nSo: {% endif %}"))

    def command(out: Path) -> list[str]:
        return ["rebase", str(trained), "--to", str(other), "--out", str(out), *RADIUS, "--json"]

    output, moved = tmp_path / "out.json", tmp_path / "moved"
    reference = killable(command(tmp_path / "undisturbed"), output).result()
    work, kills, old = tmp_path / ".moved.rebase", 0, read_run(trained)
    for part in ("probe.json", "agent-left-*", "agent-right-*"):
        kills += killable(command(moved), output).kill_when(lambda part=part: any(work.glob(part)))
        assert read_run(trained) == old and not moved.exists()
    assert kills >= 2, "the rebase was over before it could be killed"
    assert without_times(killable(command(moved), output).result()) == without_times(reference)
    assert read_run(moved).versions == read_run(tmp_path / "undisturbed").versions
    assert not work.exists() and not list(moved.rglob(".tmp-*"))


def test_between_two_nano_bases_of_different_width(
    tool: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Made by tools/make_nano_base.py, trained for a moment only: what counts here is that both fit together."""
    maker = tool("make_nano_base")
    for width in (32, 64):
        arguments = [
            "--out",
            str(tmp_path / f"nano{width}"),
            "--hidden",
            str(width),
            "--layers",
            "1",
            "--steps",
            "2",
            "--batch",
            "4",
        ]
        monkeypatch.setattr("sys.argv", ["make_nano_base.py", *arguments])
        maker.main()
    recipe = load_recipe(
        ROOT / "recipes" / "quickstart.yaml",
        [f"base.source={tmp_path / 'nano32'}", "base.device=cpu", "rollout.max_message_tokens=3", "rollout.items_per_stage=8"],
    )
    run = RunDir(tmp_path / "run")
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=0, folder=recipe.folder)
    for agent in playable.team.names:
        parameters = playable.bank.parameters(agent)
        with torch.no_grad():
            for name, parameter in parameters.items():
                if "lora_B" in name:  # no longer the base itself
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        version = playable.bank.commit(agent)
        write_version(run.adapters, version, playable.bank.tensors(agent), playable.bank.config(agent))
    run.write_recipe(recipe)
    run.write_team({agent: playable.bank.version(agent) for agent in playable.team.names}, {})
    capsys.readouterr()
    options = ["--delta-align", "0.05", "--probe-contexts", "8", "--items", "2", "--with", "fresh:rank=16", "--json"]
    assert main(["rebase", str(run.path), "--to", str(tmp_path / "nano64"), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == str(tmp_path / "run-nano64")
    for alignment in report["alignments"].values():
        assert alignment["reached"] and alignment["after"]["mean"] < alignment["before"]["mean"]
    stored = read_run(tmp_path / "run-nano64")
    moved, versions = stored.recipe, stored.versions
    assert moved.base.source == str(tmp_path / "nano64") and {a.lora.rank for a in moved.team.agents} == {16}
    tensors, config = read_adapter_folder(tmp_path / "run-nano64" / "adapters" / "solver" / versions["solver"].name)
    assert {t.shape[1] for n, t in tensors.items() if "q_proj.lora_A" in n} == {64}


def test_a_team_is_not_moved_to_the_base_it_is_on(trained: Path, tiny_base: Path, tmp_path: Path, capsys: Any) -> None:
    copy = Path(shutil.copytree(tiny_base, tmp_path / "by-another-name"))
    for base in (tiny_base, copy):
        assert main(["rebase", str(trained), "--to", str(base), "--out", str(tmp_path / "out"), *RADIUS]) == 2
        error = capsys.readouterr().err.strip()
        assert f"--to {base}: {trained} is on this base already" in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
