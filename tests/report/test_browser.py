"""What a reader's browser makes of the pages: a real Chromium opens them, and nothing may go wrong on its console."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from forked import ForkedPython
from headless_browser import Tab, open_tab
from made_up_run import MARKUP, make_run

from teamtr_lora.report.figures import FIGURES
from teamtr_lora.report.figures.comparison import COMPARING
from teamtr_lora.report.page import report_page
from teamtr_lora.report.run_data import read_named_runs
from teamtr_lora.report.view_server import open_server

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
SMALL = ["training.stages=1", "rollout.items_per_stage=6", "rollout.episodes_per_item=4", "training.inner_epochs=1",
         "evaluation.items=8", "evaluation.every_stages=1", "diagnostics.probe_every_stages=1", "diagnostics.probe_items=2",
         "diagnostics.probe_episodes_per_item=2"]  # fmt: skip
# marks that a reader can see: points, bars, and lines or areas of some length
MARKS = """Object.fromEntries([...document.querySelectorAll('.card')].map(card => [card.id.slice(7),
  [...card.querySelectorAll('.points path, .bars path, .lines path, .js-fill, .js-line')]
    .filter(mark => { const box = mark.getBoundingClientRect(); return box.width + box.height > 0; }).length]))"""


def written(folder: Path, *runs: Path) -> str:
    out = folder / "report.html"
    out.write_bytes(report_page(read_named_runs(runs)))
    return out.as_uri()


def choose(tab: Tab, name: str, value: str) -> None:
    code = f"const field = document.querySelector('.filters [name={name}]'); field.value = {json.dumps(value)};"
    tab.run(f"(() => {{ {code} for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind)); }})()")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_every_figure_is_drawn_with_data_in_it(tab: Tab, full: Path, tmp_path: Path, width: int, dark: bool) -> None:
    tab.show(width, dark=dark)
    tab.open(written(tmp_path, full))
    tab.draw_all()
    marks = tab.run(MARKS)
    assert set(marks) == set(FIGURES) and all(count > 0 for count in marks.values()), marks
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the side"
    light = tab.run("parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]) > 128")
    assert light is not dark and not tab.problems
    assert {address.split(":")[0] for address in tab.requests} <= {"file", "blob", "data"}, "nothing is fetched"
    if not dark:
        check_downloads(tab, full)
        check_transcripts(tab)


def check_print(tab: Tab) -> None:
    """All figures of the dark page, also those that nobody has scrolled to, on white."""
    tab.run("scrollTo(0, 0)")
    tab.wait("document.querySelector('.plot .main-svg') !== null")
    every = "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))"
    assert not tab.run(every)
    tab.run("dispatchEvent(new Event('beforeprint'))")
    assert tab.run(every)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 249)"


def check_downloads(tab: Tab, full: Path) -> None:
    """They hold the figure and its numbers."""
    figure = "[...drawn].find(([place, figure]) => figure.name === 'accuracy')"
    lines = tab.run(f"csv({figure}[1])").splitlines()
    rows = read_named_runs([full])[0].evaluated
    assert lines[0] == '"series","stage","quantity","value","error","note"'
    assert [float(line.split(",")[3]) for line in lines if line.startswith('"team"')] == pytest.approx(
        [row.evaluation["avg_at_k"] for row in rows if row.evaluation], rel=1e-4
    )
    svg, png = (tab.run(f"Plotly.toImage({figure}[0], {{format: '{kind}', ...SVG_SIZE}})") for kind in ("svg", "png"))
    assert svg.startswith("data:image/svg+xml") and png.startswith("data:image/png") and not tab.problems


def test_markup_in_transcripts_shows_as_text(tab: Tab, tmp_path: Path) -> None:
    tab.show(dark=True)
    tab.open(written(tmp_path, make_run(tmp_path / "<img src=x onerror=alert(3)>", 3, say=MARKUP)))
    tab.run("document.querySelector('#transcripts').scrollIntoView()")
    tab.wait("document.querySelector('.group') !== null")
    assert MARKUP in tab.run("document.querySelector('.message .text').textContent")
    assert tab.run("document.querySelectorAll('main img, main script').length") == 0 and not tab.problems
    voted = "{answer_turn: 0, messages: [{reward: 0, pieces: []}, {reward: 0, pieces: []}, {reward: 1, pieces: []}]}"
    shown = f"[0, 1, 2].map(place => messageBox({voted}.messages[place], place, {voted}, {{}}, 'none').textContent)"
    first, *others = tab.run(shown)
    assert "the team's answer" in first and "reward 1" in first, "the reward stands at the message that answers"
    assert all("reward 0" in other and "answer" not in other for other in others)
    check_print(tab)


def check_transcripts(tab: Tab) -> None:
    """They are filtered and shaded."""
    tab.run("document.querySelector('#transcripts').scrollIntoView()")
    tab.wait("document.querySelector('.group') !== null")
    groups = "document.querySelectorAll('.group').length"
    heads = "[...document.querySelectorAll('.group .item')].map(item => item.textContent)"
    assert "stage 4" in tab.run(heads)[0], "the newest stage comes first"
    choose(tab, "stage", "1")
    tab.wait(f"{heads}.every(text => text.includes('stage 1'))")
    agent = tab.run("document.querySelectorAll('.filters [name=agent] option')[1].value")
    choose(tab, "agent", agent)
    tab.wait(f'{heads}.length && {heads}.every(text => text.includes("before {agent}\'s update"))')
    item = tab.run("document.querySelector('.group .prompt').textContent")
    choose(tab, "item", item)
    tab.wait(f"{groups} === 1")
    assert tab.run("[...document.querySelectorAll('.episode header b')].map(b => b.textContent)")[:2] == ["reward 1", "reward 0"]
    choose(tab, "item", "nowhere")
    tab.wait(f"{groups} === 0")
    choose(tab, "item", "")
    choose(tab, "shade", "probability")
    tab.wait("[...document.querySelectorAll('.text span')].some(s => s.style.background.includes('rgba(213, 94, 0'))")
    choose(tab, "agent", "")
    choose(tab, "shade", "change")
    for colour in ("213, 94, 0", "0, 114, 178"):  # less likely, likelier
        tab.wait(f"[...document.querySelectorAll('.updated .text span')].some(s => s.style.background.includes('rgba({colour}'))")
    assert "probability" in tab.run("document.querySelector('.text span').title") and not tab.problems
    for kind, shown in ((".message .who", ("tokens", "stop", "reward ")), (".message.updated .who", ("advantage ",))):
        text = tab.run(f"document.querySelector('{kind}').textContent")
        assert all(word in text for word in shown), text


def test_a_thousand_updates_open_as_quickly_as_a_dozen(browser: str, full: Path, long: Path, tmp_path: Path) -> None:
    """In processor time of the page itself, and relative to a short run: processors differ by a factor of two."""
    spent = []
    for run in (full, long):
        with open_tab(browser) as tab:
            tab.show()
            tab.open(written(tmp_path, run))
            tab.wait("document.querySelector('.plot .main-svg') !== null")
            spent.append(tab.main_thread_seconds())
            assert not tab.problems
    assert spent[1] < 2 * spent[0]


def test_several_runs_are_compared(tab: Tab, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{seed}", 6, seed=seed) for seed in range(2)]
    tab.open(written(tmp_path, *runs, make_run(tmp_path / "other", 6, delta=0.05)))
    tab.draw_all()
    marks = tab.run(MARKS)
    assert all(marks[name] > 0 for name in COMPARING)
    tab.run("const pick = document.querySelector('h2 + .filters select'); pick.value = '2'")
    tab.run("pick.dispatchEvent(new Event('change'))")
    tab.wait("document.querySelectorAll('.headline').length === 2")
    assert not tab.problems


def test_a_run_that_is_not_there_yet_is_waited_for(tab: Tab, tmp_path: Path) -> None:
    make_run(tmp_path / "one", 3)
    server, address = open_server(tmp_path, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        for name, asked in (("two", "run=two"), ("three", "compare=one&compare=three")):
            tab.open(f"{address}#{asked}")
            tab.wait(f"document.querySelector('.problem')?.textContent.startsWith(\"there is no run '{name}'\")")
            make_run(tmp_path / name, 3, seed=1)
            tab.wait("document.querySelector('.headline') && !document.querySelector('.problem')")
        assert not tab.problems
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_run_is_watched_while_it_trains_and_reported_when_it_is_done(tab: Tab, tmp_path: Path) -> None:
    run, words = tmp_path / "runs" / "now", [sys.executable, "-m", "teamtr_lora", "train", str(RECIPE), *SMALL]
    run.parent.mkdir()
    training = ForkedPython([*words, "--run-dir", str(run), "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server, address = open_server(tmp_path / "runs", "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        tab.open(address)
        tab.wait("document.querySelector('tr[data-run=now] .mark.training') !== null", 120)
        tab.run("document.querySelector('tr[data-run=now]').click()")
        rows = "(document.querySelector('#all-updates summary')?.textContent || '').match(/\\d+/)?.[0]"
        tab.wait(f"{rows} >= 1", 120)
        seen = int(tab.run(rows))
        tab.wait(f"{rows} > {seen}", 120)
        tab.wait("document.querySelector('.status').textContent === 'finished'", 180)
        tab.wait(f"{rows} == 3")
        tab.draw_all()
        live = tab.run(MARKS)
        assert training.wait(60) == 0 and not tab.problems
    finally:
        training.terminate()
        server.shutdown()
        thread.join()
        server.server_close()
    tab.open(written(tmp_path, run))
    tab.draw_all()
    marks = tab.run(MARKS)
    unmeasured = {"alignment", "shock"}  # nobody was replaced
    assert set(marks) == set(live) and set(FIGURES) - set(marks) <= unmeasured | {"token_shift"} and not tab.problems
    assert all(count > 0 for name, count in marks.items()), marks
    spent = [row.seconds["transcripts"] / sum(row.seconds.values()) for row in read_named_runs([run])[0].updates]
    assert min(spent) < 0.02, "what transcripts cost"
