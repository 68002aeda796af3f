"""The README and every page of teamtr_lora/docs are true: code runs, recipes load, commands parse, names exist.

A fence's first line says how its block is treated; teamtr_lora/docs/contributing.md has the table. Nothing may be left out: a
block in another language, or a command of an unknown program, is a failure. Tables that repeat what the program knows (engines,
patches, rooms, keys with their defaults, the files of a run) must be what the program says.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import pkgutil
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import teamtr_lora
from teamtr_lora.cli import build_parser, main
from teamtr_lora.cli.docs_command import TOPICS
from teamtr_lora.common.code_paths import OFFERED
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import check_named, load_recipe
from teamtr_lora.recipe.reference import recipe_keys
from teamtr_lora.recipe.template import write_starter

ROOT = Path(teamtr_lora.__file__).resolve().parent.parent
PAGES = {"README": ROOT / "README.md", **{topic: ROOT / "teamtr_lora" / "docs" / f"{topic}.md" for topic in TOPICS}}
LANGUAGES = {"python", "bash", "yaml", "text", "toml"}
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
TEAM = {"team": {"agents": [{"name": "planner"}, {"name": "solver"}, {"name": "checker"}]}}
# Commands that only read or write a small file: these are run, the others parsed.
HARMLESS = {"docs", "init", "keys", "tasks", "validate"}

_FENCE = re.compile(r"((?:^<!-- small: [^\n]*-->\n)*)^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    words: tuple[str, ...]  # what follows the language: no-run, file=NAME
    text: str
    small: tuple[tuple[str, str], ...]  # replacements that make it quick

    @property
    def file(self) -> str | None:
        return next((word.removeprefix("file=") for word in self.words if word.startswith("file=")), None)

    @property
    def quick(self) -> str:
        text = self.text
        for old, new in self.small:
            assert old in text, f"{self}: {old!r} is not in the block"
            text = text.replace(old, new)
        return text

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    text, found = PAGES[page].read_text(encoding="utf-8"), []
    for match in _FENCE.finditer(text):
        remarks, info, body = match.groups()
        language, *words = info.split() or [""]
        small = [remark.split(" => ") for remark in re.findall(r"small: (.*?) -->", remarks)]
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, language, tuple(words), body, tuple((old, new) for old, new in small)))
    return found


def all_blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def prose(page: str) -> str:
    return _FENCE.sub("", PAGES[page].read_text(encoding="utf-8"))


def inline() -> list[tuple[str, str]]:
    """(page, inline code) of all prose."""
    return [(page, " ".join(code.split())) for page in PAGES for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def of(start: str) -> list[tuple[str, str]]:
    return [(page, code) for page, code in inline() if re.match(start, code)]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in as a user would, with the repository's recipes and registry beside it."""
    for name in ("recipes", "adapters", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write_files(page: str, folder: Path) -> None:
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)


# Blocks


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_how_it_is_treated(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: a block in {block.language or 'no language'}"
        assert all(word == "no-run" or word.startswith("file=") for word in block.words), f"{block}: {block.words}"
        assert "no-run" not in block.words or block.language == "python", f"{block}: only Python can be left unrun"
    assert PAGES[page].read_text().count("\n```") == 2 * len(blocks(page)), f"{page}: a fence is not closed"


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" and not b.words for b in blocks(page))])
def test_the_python_of_a_page_runs(page: str, desk: Path) -> None:
    """In order, in one namespace, as if it were one script. Tables of variants, engines and figures are put back afterwards."""
    write_files(page, desk)
    before = [dict(table) for table in _tables()]
    namespace: dict[str, Any] = {"__name__": f"docs_{page}"}
    try:
        for block in blocks(page):
            if block.language == "python" and not block.words:
                exec(compile(block.quick, str(block), "exec", dont_inherit=True), namespace)
    finally:
        for table, was in zip(_tables(), before, strict=True):
            table.clear()
            table.update(was)


def _tables() -> list[dict[str, Any]]:
    from teamtr_lora.algorithm.variants.region import REGIONS
    from teamtr_lora.algorithm.variants.resampling import RESAMPLING
    from teamtr_lora.recipe.engine_facts import ENGINES
    from teamtr_lora.report.figures import FIGURES
    from teamtr_lora.rollout.engines import SAMPLERS

    return [REGIONS, RESAMPLING, ENGINES, SAMPLERS, FIGURES]


@pytest.mark.parametrize("block", [b for b in all_blocks("python") if b.words], ids=str)
def test_python_that_is_not_run_compiles_and_its_imports_exist(block: Block, desk: Path) -> None:
    write_files(block.page, desk)
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), f"{block}: {ast.unparse(node)}"


def test_example_environments_are_those_that_ship() -> None:
    """Each is named on the page, and one that is shown there is the shipped text."""
    shown = {block.file: block.text for block in blocks("environments") if block.file}
    shipped = {path.name: path.read_text() for path in (ROOT / "teamtr_lora" / "docs" / "examples").glob("*.py")}
    assert "number_vault.py" in shipped.keys() & shown.keys()
    for name, text in shipped.items():
        assert f"docs/examples/{name}`" in prose("environments") and len(text.splitlines()) < 80
        assert shown.get(name, text) == text, f"{name} is not what the page shows"


def test_examples_of_extending_are_short() -> None:
    sections = re.split(r"^## ", PAGES["extending"].read_text(), flags=re.M)[1:]
    assert [title.splitlines()[0] for title in sections] == [
        "A task", "A router", "An engine", "A kind of trust region", "A resampling rule", "An optimizer, an advantage, a ratio",
        "A figure",
    ]  # fmt: skip
    for section in sections:
        lengths = [len(body.splitlines()) for _, _, body in _FENCE.findall(section)]
        assert 0 < sum(lengths) < 40, f"{section.splitlines()[0]}: {lengths} lines"


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_yaml_is_a_recipe_or_a_part_of_one(block: Block, desk: Path) -> None:
    """One that names code of the page is also played."""
    write_files(block.page, desk)
    data = yaml.safe_load(block.text)
    text = block.text
    if "team" not in data and "extends" not in data:
        text += yaml.safe_dump(TEAM)
    for name in ("bases", "tasks"):
        (desk / name).symlink_to(ROOT / "recipes" / name)
    path = desk / "recipe.yaml"
    path.write_text(text)
    recipe = load_recipe(path, ["evaluation.items=1", f"output_dir={desk / 'run'}"])
    check_named(recipe, str(block))
    if re.search(r"\b(callable|reward):", block.text):
        with teamtr_lora.TeamTRTrainer.from_recipe(recipe) as trainer:
            assert trainer.evaluate(k=1).episodes == 1


@pytest.mark.parametrize("block", all_blocks("toml"), ids=str)
def test_toml_offers_tasks_in_our_group(block: Block) -> None:
    (group,) = tomllib.loads(block.text)["project"]["entry-points"]
    assert group == OFFERED


@pytest.mark.parametrize("block", [b for b in all_blocks("text") if b.text.startswith("$ ")], ids=str)
def test_output_is_what_the_command_prints(block: Block, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, said = block.text.split("\n", 1)
    main(shlex.split(command)[2:])
    captured = capsys.readouterr()
    assert captured.out + captured.err == said


# Commands


def commands() -> Iterator[tuple[str, str]]:
    """(where, line) of every command: lines of bash blocks, and inline code that begins with a program of ours."""
    for block in all_blocks("bash"):
        for offset, line in enumerate(block.text.splitlines(), start=1):
            if line.strip():
                yield f"{block.page}:{block.line + offset}", line
    yield from of(r"(teamtr-lora|python tools/|tools/\w+(\.py)?) ")


@pytest.mark.parametrize(("where", "line"), commands())
def test_a_command_can_be_given(
    where: str, line: str, desk: Path, monkeypatch: pytest.MonkeyPatch, tool: Callable[[str], ModuleType]
) -> None:
    line = re.split(r" > | \| ", line)[0]
    words = shlex.split(line, comments=True)
    while variable := re.fullmatch(r"([A-Z_]+)=\S*", words[0]):  # for this command
        assert variable[1] in _words_of_the_source(), f"{where}: {words[0]}"
        words.pop(0)
    program = Path(words[0]).name
    if program == "teamtr-lora":
        _give(words[1:], where)
    elif words[0] == "bash" or re.match(r"tools/\w+$", words[0]):
        script = words[1] if words[0] == "bash" else words[0]
        assert (ROOT / script).is_file(), f"{where}: {script}"
        if Path(script).name == "test":
            _pytest_words(["pytest", *words[words.index(script) + 1 :]], where)
        else:
            _options_in(ROOT / script, [word for word in words if word.startswith("-")], where)
    elif program == "python" and words[1] == "-m":
        _pytest_words(words[2:], where)
    elif program == "python" or words[0].startswith("tools/"):
        script, *rest = words[1:] if program == "python" else words
        _parse_tool(tool(Path(script).stem), rest, monkeypatch)
    else:
        assert program == "pip" and words[1] == "install", f"{where}: {words[0]} is no program that the tests know"
        _extras_exist(words[-1], where)


def _give(words: Sequence[str], where: str) -> None:
    """Runs a harmless command; of any other, parses it and loads its recipe with its overrides."""
    if len(words) == 1:  # only mentioned
        parser = build_parser()
        known = [name for action in parser._actions for name in (action.choices or action.option_strings)]
        assert words[0] in known, f"{where}: there is no command {words[0]}"
        return
    if "--with" in words:
        _newcomer(words[words.index("--with") + 1], where)
    if words[0] in HARMLESS:
        assert main(words) == 0, f"{where}: {shlex.join(words)}"
        return
    args, rest = build_parser().parse_known_args(words)
    given = [*getattr(args, "overrides", []), *rest]
    assert all("=" in word or word.endswith(".yaml") for word in given), f"{where}: {given}"
    first = getattr(args, "recipe", None) or getattr(args, "team", None)
    recipes = [word for word in [first, *given] if _is_recipe(word)]
    if recipes and not _is_recipe(first):  # a team that the reader has trained, and another task
        recipes.insert(0, QUICKSTART)
    if recipes:
        if str(recipes[0]).startswith("my-team/"):
            write_starter(Path("my-team"))
        load_recipe(recipes if len(recipes) > 1 else recipes[0], _settings(given))
    elif settings := _settings(given):  # of a run that the reader has made: its keys must exist
        load_recipe(QUICKSTART, settings)


def _newcomer(spec: str, where: str) -> None:
    from teamtr_lora.recipe.team_sections import LoraSection
    from teamtr_lora.swap.newcomer import find_fresh, fresh_lora

    assert spec.startswith("fresh:"), f"{where}: {spec} cannot be checked here"
    fresh_lora(find_fresh(spec), LoraSection())


def _pytest_words(words: Sequence[str], where: str) -> None:
    assert words[0] == "pytest", f"{where}: {words[0]}"
    for before, word in zip(words, words[1:], strict=False):
        expected = before == "-k" or word in ("-k", "-x", "-q") or (word.startswith("tests") and (ROOT / word).exists())
        assert expected, f"{where}: {word}"


def _is_recipe(word: Any) -> bool:
    return str(word).endswith(".yaml") and "=" not in str(word)


def _settings(words: Sequence[str]) -> list[str]:
    return [word for word in words if not _is_recipe(word)]


class _ParsedError(Exception):
    """Raised in place of the rest of a tool, once its options are parsed."""


def _parse_tool(module: ModuleType, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the tool's own main up to where its options are parsed. Words that are no options are recipes or settings."""
    parse = argparse.ArgumentParser.parse_known_args
    seen: list[argparse.Namespace] = []

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = parse(self, args, namespace)
        assert not any(word.startswith("-") for word in rest), rest
        seen.append(parsed)
        raise _ParsedError

    monkeypatch.setattr(sys, "argv", ["tool", *words])
    if hasattr(module, "parse"):  # it also checks values that argparse cannot
        seen.append(module.parse())
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        with pytest.raises(_ParsedError):
            module.main()
    settings = [word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=.*", word)]
    recipes = [ROOT / word for word in words if _is_recipe(word)] or [QUICKSTART]
    apart = module.__name__ == "compare.py"  # it compares recipes; other tools put them together
    for files in [[recipe] for recipe in recipes] if apart else [recipes]:
        load_recipe(files, settings)
    for _, _, varied in (text.partition(": ") for text in getattr(seen[0], "vary", None) or []):
        load_recipe(recipes[:1] if apart else recipes, [*settings, *shlex.split(varied)])


def _options_in(script: Path, options: Sequence[str], where: str) -> None:
    text = script.read_text()
    assert all(option in text for option in options), f"{where}: {script.name} has no {options}"


def _extras_exist(requirement: str, where: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r"\[(.*)\]", requirement)
    assert asked and set(asked[1].split(",")) <= set(extras), f"{where}: {requirement}"


# Names in the prose


@cache
def _source() -> str:
    """The code, the recipes, the project's file and the code on the pages."""
    files = [path for folder in ("teamtr_lora", "tools", "recipes") for path in (ROOT / folder).rglob("*")]
    texts = [
        path.read_text() for path in files if path.suffix in (".py", ".yaml") or path.parent.name == "tools" and path.is_file()
    ]
    texts += [(ROOT / "pyproject.toml").read_text(), *(block.text for kind in ("python", "yaml") for block in all_blocks(kind))]
    return "\n".join(texts)


@cache
def _words_of_the_source() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", _source()))


@cache
def _options_of_all_commands() -> frozenset[str]:
    parsers, options = [build_parser()], set[str]()
    for parser in parsers:
        for action in parser._actions:
            options.update(action.option_strings)
            parsers += action.choices.values() if isinstance(action, argparse._SubParsersAction) else []
    texts = [path.read_text() for path in (ROOT / "tools").iterdir() if path.is_file()]
    return frozenset(options).union(*(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text) for text in texts))


def test_identifiers_in_the_prose_exist() -> None:
    wrong = []
    for page, code in inline():
        name = re.fullmatch(r"(\w+(?:\.\w+)*)(?:(?:=|\(|: ).*)?", code)
        if name and not code.endswith((".md", ".json", ".gguf")) and not set(name[1].split(".")) <= _words_of_the_source():
            wrong.append(f"{page}: {code}")
    assert not wrong


def test_files_in_the_prose_are_those_of_the_code() -> None:
    """Files of a run or of a starter, which are no files of the repository."""
    names = [(page, code) for page, code in of(r"\w+\.(json|jsonl|yaml|py)$")]
    assert len(names) > 5
    assert not [f"{page}: {name}" for page, name in names if not re.search(rf"(?<!\w){re.escape(name)}", _source())]


def test_options_in_the_prose_exist() -> None:
    given = [(page, option) for page, code in inline() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*\b", code)]
    assert len(given) > 30
    assert not [f"{page}: {option}" for page, option in given if option not in _options_of_all_commands()]


def test_python_names_in_the_prose_exist() -> None:
    from teamtr_lora.team import Message

    public = {name: getattr(teamtr_lora, name) for name in teamtr_lora.__all__} | {"message": Message}
    found = [code for _, code in inline() if re.fullmatch(r"\w+(\.\w+)+(\(.*\))?", code)]
    names = {code.partition("(")[0] for code in found}
    for name in names:
        head, _, rest = name.partition(".")
        if head == "teamtr_lora":
            pkgutil.resolve_name(name)
        elif head in public:
            assert hasattr(public[head], rest) or rest in public[head].__annotations__, name
    assert sum(name.partition(".")[0] in {"teamtr_lora", *public} for name in names) >= 5


def test_recipe_keys_in_the_prose_exist(tmp_path: Path) -> None:
    """Where a value stands with a key, some recipe of ours takes it."""
    known = {key.name.replace(".*", "") for key in recipe_keys()}
    sections = {name.split(".")[0] for name in known if "." in name}
    write_starter(tmp_path / "starter")
    starter = tmp_path / "starter" / "recipe.yaml"
    wrong = []
    for page, text in inline():
        for code in text.split() if text.count("=") > 1 else [text]:
            found = re.fullmatch(r"([a-z_]+)((?:\.[a-z_0-9]+)+)(?:(?:: |=)(.*))?", code)
            if found and found[1] in sections and not code.endswith((".md", ".py", ".yaml", ".json", ".jsonl")):
                name = found[1] + found[2]
                if name not in known or (found[3] and not _taken(f"{name}={found[3]}", starter)):
                    wrong.append(f"{page}: {code}")
    assert not wrong


def _taken(setting: str, starter: Path) -> bool:
    beside = ([], ["training.resampling=never"], ["training.learning_rate=0.002"])
    for recipe, more in ((starter, []), *((QUICKSTART, own) for own in beside)):
        try:
            load_recipe(recipe, [*more, setting])
        except UserError:
            continue
        return True
    return False


def test_defaults_in_tables_are_the_programs() -> None:
    from teamtr_lora.recipe.recipe import Recipe

    recipe = Recipe.model_validate(TEAM)
    lines = re.findall(r"^\| `([a-z_]+\.[a-z_.]+)` \|.*\| `(\w+)`[^|]*\|$", prose("algorithm"), re.M)
    assert len(lines) >= 7
    for key, default in lines:
        value: Any = recipe
        for part in key.split("."):
            value = getattr(value, part)
        assert str(value) == default, key


def test_paths_in_the_prose_exist() -> None:
    paths = [(page, code) for page, code in of(r"(teamtr_lora|tests|tools|recipes)/[\w./-]*$")]
    assert len(paths) > 20
    assert not [f"{page}: {code}" for page, code in paths if not (ROOT / code).exists()]


def test_links_lead_somewhere() -> None:
    for page, path in PAGES.items():
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose(page)):
            assert (path.parent / target).exists(), f"{page}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", (path.parent / target).read_text(), re.M)
                assert anchor in [title.lower().replace(" ", "-") for title in titles], f"{page}: {target}#{anchor}"


def test_topics_in_the_prose_exist() -> None:
    for page in PAGES:
        for topic in re.findall(r"\b(?:[Tt]opics?|page) `(\w+)`", prose(page)):
            assert topic in TOPICS, f"{page}: there is no topic {topic}"


# Tables that repeat what the program knows


def _table(page: str, name: str) -> list[str]:
    (shown,) = re.findall(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", PAGES[page].read_text(), re.S)
    return str(shown).splitlines()


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(rows[0]), *lines[1:]]


def engine_table() -> list[tuple[str, ...]]:
    """The records of the engines as rows of text, the header first."""
    from teamtr_lora.recipe.engine_facts import ENGINES

    rows: list[tuple[str, ...]] = [
        ("engine", "what it is", "temperatures", "ranks", "DoRA", "quantised base", "a draw depends on", "exact resume")
    ]
    for facts in ENGINES.values():
        low, high = facts.temperatures
        rows.append((
            facts.name,
            facts.description + (f" (pip install 'teamtr-lora[{facts.needs}]')" if facts.needs else ""),
            "any" if high == sys.float_info.max else f"0, {low:g} to {high:g}",
            f"up to {facts.max_rank}" if facts.max_rank else "any",
            "yes" if facts.dora else "no",
            "; ".join(f"{kind}: {', '.join(names[1:]) or 'no'}" for kind, names in facts.quantization.items()),
            facts.seeds,
            "yes" if facts.exact_resume else "no",
        ))  # fmt: skip
    return rows


def test_the_table_of_engines_is_the_programs() -> None:
    columns = list(zip(*engine_table(), strict=True))
    expected = _lines([["", *(f"`{name}`" for name in columns[0][1:])], *columns[1:]])
    assert _table("rollouts", "engine_table") == expected, "\n".join(expected)


def test_the_table_of_patches_is_the_programs() -> None:
    from teamtr_lora.rollout.vllm.patches.choice import PATCHES

    rows = [["patch", "what it does", "on", "builds on"]]
    for name, patch in PATCHES.items():
        text = importlib.import_module(f"teamtr_lora.rollout.vllm.patches.{name}").__doc__ or ""
        (about,) = re.findall(rf"^Patch `{name}`: (.*?\w)[.] *(?:For GPUs\.)?$", text.splitlines()[0])
        devices = " and ".join({"cpu": "CPUs", "cuda": "GPUs"}[device] for device in patch.devices)
        rows.append([f"`{name}`", about, devices, ", ".join(f"`{need}`" for need in patch.needs) or "-"])
    expected = _lines(rows)
    assert _table("rollouts", "patches") == expected, "\n".join(expected)
    versions = {version for patch in PATCHES.values() for version in patch.versions}
    assert f"They know vLLM {' and '.join(sorted(versions))}." in prose("rollouts")


def test_the_table_of_rooms_is_the_rule() -> None:
    spec = importlib.util.spec_from_file_location("the_rules", ROOT / "tests" / "test_imports.py")
    assert spec is not None and spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    section = prose("contributing").partition("## Rooms")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*?) \|$", section, re.M))
    ties = {room: ", ".join(others.split()) or "nothing" for room, others in rules.TIES.items() if room != "__main__"}
    assert shown == ties, "\n".join(f"{room}: {others}" for room, others in ties.items())
    assert list(shown) == list(ties)


def test_the_files_of_a_run_are_those_of_its_layout() -> None:
    from teamtr_lora.runs.layout import OWN_NAMES

    section = prose("getting_started").partition("## What a run leaves behind")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.M)
    names = {name.partition("/")[0] for cell in cells for name in re.findall(r"`(.*?)`", cell)}
    assert len(names) >= 7 and names <= OWN_NAMES


def test_every_recipe_is_in_the_table_of_recipes() -> None:
    named = {code.removeprefix("recipes/").strip("/") for page, code in of(r"recipes/[\w.]+/?$") if page == "recipes"}
    assert {path.name for path in (ROOT / "recipes").iterdir()} <= named


def test_the_tools_that_measure_are_listed() -> None:
    section = prose("results").partition("## Tools that measure")[2]
    there = {path.name for path in (ROOT / "tools").glob("*.py") if re.match(r"bench|measure|claims|compare|study", path.name)}
    assert there <= set(re.findall(r"tools/(\w+\.py)", section))


def test_the_readme_is_short() -> None:
    lines = PAGES["README"].read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 140
