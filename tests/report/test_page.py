"""The page is one file that needs no network, and text from outside stays text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_up_run import MARKUP, make_run

import teamtr_lora
from teamtr_lora.report.page import as_json, embedded, html_page, plotly_script, report_page, utf8
from teamtr_lora.report.run_data import read_named_runs
from teamtr_lora.report.sample import groups_of, sampled_transcripts, spread
from teamtr_lora.runs.transcripts import TranscriptFile


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a run whose agents talk in markup."""
    folder = tmp_path_factory.mktemp("page")
    return report_page(read_named_runs([make_run(folder / "<b>run", 3, say=MARKUP)])).decode()


def content_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_markup_in_a_transcript_is_data(page: str) -> None:
    outside = page.replace(plotly_script(), "")
    assert MARKUP not in outside and "<b>run" not in outside
    assert outside.lower().count("</script") == 3, "the content, plotly and the page's own script end where they should"
    messages = [m for f in content_of(page)["runs"][0]["transcripts"]["files"] for g in f["groups"] for e in g["episodes"]
                for m in e["messages"]]  # fmt: skip
    assert messages and all(MARKUP in message["text"] for message in messages), "and nothing of it is lost"


def test_the_policy_allows_the_pages_own_script_and_no_network(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(script) == 1
    own = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{own}' blob:"
    assert rules["default-src"] == rules["connect-src"] == "'none'" and "http" not in policy[1]


def test_the_server_behind_a_live_page_is_the_only_one_it_may_ask() -> None:
    text = html_page("runs", {"mode": "view"}).decode()
    assert "connect-src 'self'" in text and "blob:;" not in text.partition("img-src")[0] and len(text) < 100_000


def test_half_a_surrogate_pair_survives() -> None:
    text = "a\udc80b</script>"
    assert json.loads(utf8(embedded({"x": text})).decode()) == {"x": text}


def test_no_javascript_of_others_is_in_the_repository() -> None:
    package = Path(teamtr_lora.__file__).parent
    assert [file.name for file in package.rglob("*.js")] == ["page.js"] and (package / "report/page.js").stat().st_size < 50_000


def test_json_has_no_infinity() -> None:
    assert json.loads(as_json({"x": [float("inf"), float("nan"), 1 / 3]})) == {"x": [None, None, 0.33333]}


def test_the_report_of_a_thousand_updates_is_under_12_megabytes(long: Path) -> None:
    assert len(report_page(read_named_runs([long]))) < 12e6


def test_a_report_takes_the_first_the_last_and_some_between() -> None:
    files = [TranscriptFile(stage, 1, "a", f"s{stage}") for stage in range(100)]
    chosen = spread(files, 5)
    assert [file.stage for file in chosen] == [0, 25, 50, 74, 99] and spread(files[:3], 5) == files[:3]


def test_transcripts_stay_within_their_limit(full: Path) -> None:
    everything = sampled_transcripts(full, 10**9)
    some = sampled_transcripts(full, 60_000)
    sizes = [sum(len(json.dumps(group)) for file in found["files"] for group in file["groups"]) for found in (everything, some)]
    assert sizes[0] > 60_000 >= sizes[1] > 20_000
    assert all(file["groups"] for file in some["files"]), "every update that is shown has something to show"


def test_the_best_and_the_worst_episode_of_a_group_come_first() -> None:
    episodes = [{"group": 0, "item": "i", "prompt": "p", "reward": r, "messages": []} for r in (0.5, 0.0, 1.0, 0.7)]
    assert [e["reward"] for e in groups_of(episodes)[0]["episodes"]] == [1.0, 0.0, 0.7, 0.5]


def test_only_rewards_that_differ_are_called_best_and_worst() -> None:
    def ranks(*rewards: float | None) -> list[str | None]:
        episodes = [{"group": 0, "item": "i", "prompt": "p", "reward": r, "messages": []} for r in rewards]
        return [e.get("rank") for e in groups_of(episodes)[0]["episodes"]]

    assert ranks(1.0) == [None] and ranks(0.5, 0.5, 0.5) == [None] * 3 == ranks(0.0, None, 0.0)
    assert ranks(0.0, 1.0, 0.5) == ["best", "worst", None]
    assert ranks(1.0, 0.0, 1.0, 0.0) == ["best", "worst", "best", "worst"], "equals are called alike"
