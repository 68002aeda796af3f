"""What transcripts say of single tokens is what the sampler and two float64 models say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.algorithm.trust_region import StepDecision
from teamtr_lora.runs.transcripts import read_transcripts, transcript_files
from teamtr_lora.team import Episode
from teamtr_lora.training import token_marks
from teamtr_lora.training.stage import train
from teamtr_lora.training.token_marks import episode_marks
from teamtr_lora.training.update import AgentUpdater
from teamtr_lora.training.window import Material, PlayedEpisodes


@pytest.mark.parametrize("reduction", ["message_sum", "token_mean"])
def test_marks_are_the_log_probabilities_before_and_their_change(
    make_team: Any, config: Any, accelerator: Any, twins: list[Episode], double_logp: Callable[..., Any], reduction: str
) -> None:
    playable = make_team()
    updater = AgentUpdater(playable, config(reduction=reduction, delta=0.2))
    _, before = double_logp(playable, "left")
    outcome = updater.update("left", Material(newest=PlayedEpisodes(twins)), 0)
    _, after = double_logp(playable, "left")
    assert outcome.accepted and outcome.judging is not None
    marks = episode_marks(twins, outcome, playable.base.tokenizer, reduction=reduction)
    assert [mark.advantage for mark in marks] == pytest.approx(outcome.advantages.clipped_E.tolist(), abs=1e-4)
    measured = 0
    for place, (episode, mark) in enumerate(zip(twins, marks, strict=True)):
        for turn, message in enumerate(episode.messages):
            shown = mark.tokens[turn]
            assert shown.logprobs == pytest.approx(message.sampler_logprobs, abs=6e-4)
            if message.agent != "left" or not outcome.judging.read_E[place]:
                assert shown.change is None
                continue
            ids = range(len(message.token_ids))
            exact = [float((after(message) - before(message))[i, message.token_ids[i]].detach()) for i in ids]
            assert shown.change == pytest.approx(exact, abs=2e-3)
            measured += any(abs(change) > 0.01 for change in exact)
    assert measured


def test_a_rejected_update_has_changed_nothing(make_team: Any, config: Any, accelerator: Any, twins: list[Episode]) -> None:
    playable = make_team()
    outcome = AgentUpdater(playable, config()).update("left", Material(newest=PlayedEpisodes(twins)), 0)
    outcome = replace(outcome, decision="rejected", step=StepDecision(None, outcome.step.readings))
    marks = episode_marks(twins, outcome, playable.base.tokenizer, reduction="message_sum")
    assert all(shown.change is None for mark in marks for shown in mark.tokens.values()) and marks[0].tokens


def test_the_sample_is_bounded_and_begins_with_what_judged_the_update(
    make_team: Any, config: Any, accelerator: Any, twins: list[Episode], monkeypatch: Any
) -> None:
    playable = make_team()
    outcome = AgentUpdater(playable, config()).update("left", Material(newest=PlayedEpisodes(twins)), 0)
    assert outcome.judging is not None
    monkeypatch.setattr(token_marks, "TOKENS", sum(e.tokens for e in twins[:3]))
    marks = episode_marks(twins, outcome, playable.base.tokenizer, reduction="message_sum")
    chosen = [episode for episode, mark in zip(twins, marks, strict=True) if mark.tokens]
    assert chosen and {episode.group for episode in chosen} <= outcome.judging.groups
    assert sum(episode.tokens for episode in chosen) <= token_marks.TOKENS


def test_a_character_of_several_tokens_stands_with_the_last_of_them() -> None:
    texts = {(): "", (1,): "a", (2,): "\ufffd", (1, 2): "a\ufffd", (1, 2, 3): "aé", (3,): "\ufffd", (2, 3): "é", (2, 3, 4): "é!"}
    assert token_marks._pieces(lambda ids: texts[ids], [1, 2, 3, 4]) == ["a", "", "é", "!"]


def test_marks_are_written_and_read(start: Any, tmp_path: Path) -> None:
    train(start(tmp_path, stop_after=2))
    files = transcript_files(tmp_path)
    assert [(file.stage, file.update, file.agent) for file in files] == [(1, 1, "one"), (1, 2, "two")]
    for record in read_transcripts(tmp_path, files[0].name):
        assert json.dumps(record) and isinstance(record["advantage"], float)
        for message in record["messages"]:
            assert len(message["pieces"]) == len(message["logprobs"]) == message["tokens"]
