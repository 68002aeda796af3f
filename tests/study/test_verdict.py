"""What is said first about a run is true of it, and says what to do next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from teamtr_lora import TeamTRConfig
from teamtr_lora.cli.text.tables import print_table, table_of
from teamtr_lora.study.diagnose import PROBE, UPDATES
from teamtr_lora.study.verdict import certify_verdict, diagnose_verdict


def stage(number: int, bound: float, *, improvement: float | None = 0.1, vacuous: bool = False) -> Any:
    certificate = SimpleNamespace(bound=bound, vacuous=vacuous)
    return SimpleNamespace(stage=number, by_turns=certificate, high_probability=certificate, improvement=improvement)


def run(*stages: Any, below: float = 0.0, violated: float = 0.0) -> Any:
    calibration = SimpleNamespace(violation_rate=max(below, violated), significant_violation_rate=violated)
    return SimpleNamespace(
        stages=list(stages), confidence=0.95, end_discount=0.5, by_turns_calibration=calibration, calibration=calibration
    )


def test_a_positive_bound_is_a_proof_and_others_are_not() -> None:
    words = certify_verdict(run(stage(1, 0.02), stage(2, -0.1)), 32)
    got_better = "By its bounds, at 95% confidence each, the team got better in 1 of 2 stages (stage 1; by the bound by turns)."
    assert words[0] == got_better
    assert "changed by +0.200 in all those stages; no stage came out below its bound" in words[1] and words[-1].startswith(
        "Next: nothing"
    )
    words = certify_verdict(run(stage(1, -0.05), stage(2, -0.1), violated=0.5), 32)
    assert (
        words[0].startswith("By its bounds nothing is sure")
        and "cost more than 0.100" in words[0]
        and "below its bound, beyond" in words[1]
    )
    assert "raise rollout.items_per_stage (now 32)" in words[-1]
    within = certify_verdict(run(stage(1, -0.05), below=1.0), 32)
    assert "some stage came out below its bound, within the noise" in within[1]
    undone = run(stage(1, -0.05))  # a stage that was measured and then undone is compared with no bound
    undone.by_turns_calibration = undone.calibration = None
    assert certify_verdict(undone, 32)[1] == "Measured on held-out items, mean reward changed by +0.100 in all those stages."
    assert "nothing is excluded" in certify_verdict(run(stage(1, -2, vacuous=True)), 32)[0]
    assert "evaluation.every_stages=1" in certify_verdict(run(stage(1, -0.1, improvement=None)), 32)[-1]


def test_what_a_stage_can_have_cost_is_in_mean_reward_and_of_stages_whose_bounds_say_something() -> None:
    stages = [stage(1, -0.1), stage(2, -0.2), stage(3, -2, vacuous=True)]
    assert "in the other 2 stages none can have cost more than 0.200 of mean reward (by" in certify_verdict(run(*stages), 32)[0]
    for each in stages:
        each.by_turns = None
    assert "none can have cost more than 0.400 of mean reward." in certify_verdict(run(*stages), 32)[0], "all count a half"
    various = run(*stages[:2])
    various.end_discount = None
    assert "no stage can have cost more than 0.200 of discounted return." in certify_verdict(various, 32)[0]


def row(
    decision: str, reason: str = "", steps: int = 4, ended: int = 0, cut: int = 0, wide: float | None = 1.5, delta: float = 0.02
) -> Any:
    lost = {"episodes": 20, "overflowed_episodes": ended, "truncated_messages": cut, "delta": delta}
    kl = {"exact": SimpleNamespace(mean=0.01, bound=None if wide is None else 0.01 * wide)}
    return SimpleNamespace(decision=decision, reason=reason, optimizer_steps=steps, kl=kl, **lost)


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        ([row("skipped", "nothing to learn from: x")] * 3, "check the reward"),
        ([row("rejected", "out of region: KL bound 1 above 0.1")] * 2 + [row("accepted")], "trust_region.delta"),
        ([row("rejected", "no gain: -0.1")] * 2 + [row("accepted")], "gained nothing: raise rollout.items_per_stage"),
        ([row("shrunk", "the whole step was out of region: x")] * 2 + [row("accepted")], "were cut"),
        ([row("accepted")] * 3, "nothing stands out"),
        ([row("accepted", ended=2, cut=2)] * 3, "nothing stands out"),
        ([row("skipped", ended=3)] * 3, "9 of 60 episodes ended early because the context was full"),
        ([row("accepted", cut=3)] * 3, "9 messages of 60 episodes were cut at their token limit"),
    ],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_the_next_step_follows_from_the_decisions(rows: list[Any], advice: str, fixed: bool) -> None:
    words = diagnose_verdict(rows, [], fixed_rate=fixed)
    far = "out of region" in rows[0].reason
    assert ("training.learning_rate=auto" in words[-1]) == (far and fixed), "what is set already is no advice"
    assert f"of {len(rows)} updates were accepted" in words[0] and words[-1].startswith("Next: ") and advice in words[-1]


@pytest.mark.parametrize(("before", "after", "told"), [(0.0, 0.0, True), (0.0, 0.1, False), (0.1, 0.0, False)])
def test_a_team_that_was_never_right_stands_out(before: float, after: float, told: bool) -> None:
    measured = [{"avg_at_k": value, "standard_error": 0.1} for value in (before, after)]
    said = diagnose_verdict([row("accepted")] * 3, measured, fixed_rate=False)[-1]
    assert ("no held-out episode was right" in said and "task.success_at_least" in said) == told
    assert ("nothing stands out" in said) == (not told)
    cut = diagnose_verdict([row("accepted", cut=3)] * 3, measured, fixed_rate=False)[-1]
    assert "were cut at their token limit" in cut, "a cause goes first"


def test_single_steps_are_not_to_be_fewer() -> None:
    cut = [row("shrunk", "the whole step was out of region: x", steps=1)] * 3
    assert "nothing stands out" in diagnose_verdict(cut, [], fixed_rate=False)[-1]
    assert "training.learning_rate=auto wastes" in diagnose_verdict(cut, [], fixed_rate=True)[-1]
    falls = diagnose_verdict(cut, [], fixed_rate=True, rate_falls=True)[-1]
    assert "training.learning_rate=auto training.schedule=constant wastes" in falls, "a found rate has no schedule"


@pytest.mark.parametrize("fixed", [True, False])
def test_steps_cut_for_a_wide_bound_want_more_items_and_not_shorter_steps(fixed: bool) -> None:
    reason = "the whole step was out of region: x"
    for widths, wide in (
        ((4.0, 3.5, 1.2), True),
        ((4.0, None, 1.2), False),
        ((2.9, 2.9, 9.0), False),
        ((None, None, None), False),
    ):
        said = diagnose_verdict([row("shrunk", reason, wide=width) for width in widths], [], fixed_rate=fixed)[-1]
        assert ("(3.5 times the KL itself)" in said and "raise rollout.items_per_stage" in said) == wide
        assert ("were longer than the region" in said) == (not wide)
    kept = [row("accepted", wide=9.0)] * 2 + [row("shrunk", reason, wide=9.0)]
    assert "nothing stands out" in diagnose_verdict(kept, [], fixed_rate=fixed)[-1], "few steps were cut"


def test_steps_that_hardly_move_an_agent_are_told_where_the_rate_is_fixed() -> None:
    short, few = row("accepted", delta=0.6), [row("accepted")] * 2  # a KL of 0.01
    for rows, fixed, told in (
        ([*few, short], True, "Next: 1 steps had a KL of less than 2% of the radius"),
        ([*few, short], False, "nothing stands out"),
        ([*few, *few, short], True, "nothing stands out"),
        ([*few, row("accepted", delta=0.4)], True, "nothing stands out"),
        ([*few, row("rejected", delta=0.6)], True, "nothing stands out"),
    ):
        assert told in diagnose_verdict(rows, [], fixed_rate=fixed)[-1]


def test_a_rise_is_one_only_beyond_the_noise() -> None:
    def evaluated(accuracy: float) -> Any:
        return {"avg_at_k": accuracy, "standard_error": 0.05}

    for after, kind in ((0.9, "a rise"), (0.55, "no more than the noise"), (0.1, "a fall")):
        assert kind in diagnose_verdict([row("accepted")], [evaluated(0.5), evaluated(after)], fixed_rate=False)[1]


def test_what_a_setting_leaves_unmeasured_is_said_before_the_run() -> None:
    """Every setting that `diagnose` names afterwards as the reason of an empty table is named by the settings themselves."""
    told = " ".join(TeamTRConfig(from_updates=False, every_stages=0, save_episodes="none").unmeasured())
    for after in (PROBE, UPDATES, "set evaluation.every_stages=1", "set diagnostics.fisher_messages"):
        assert f"({after.partition('set ')[2].rpartition('.')[2].partition('=')[0]})" in told
    assert TeamTRConfig(probe_every_stages=1, fisher_messages=8).unmeasured() == []


def test_a_table_that_is_too_wide_becomes_a_list_of_whole_words(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("numbers", *(f"column{n}" for n in range(9)), left=0)
    table.add_row(*(f"{n}.123456" for n in range(9)))
    print_table(Console(width=60), table)
    text = capsys.readouterr().out
    assert all(len(line) <= 60 for line in text.splitlines())
    assert {f"column{n}" for n in range(9)} | {f"{n}.123456," for n in range(8)} <= set(text.split())
    print_table(Console(width=200), table)
    assert "│" in capsys.readouterr().out
