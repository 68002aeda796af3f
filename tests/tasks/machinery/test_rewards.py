"""Reward functions as TRL calls them, and reward functions that misbehave."""

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.common.program import in_a_script
from teamtr_lora.tasks import Item, RewardError, Rewards
from teamtr_lora.team import Episode, Message


def episode(n: int, *texts: str, prompt: Any = None, **columns: Any) -> Episode:
    item = Item(f"item-{n}", f"p{n}", {"prompt": f"p{n}" if prompt is None else prompt, **columns})
    messages = [Message(f"a{t}", t, [], [t, 7], [], "", "stop", text) for t, text in enumerate(texts)]
    return Episode(item.id, n, item.prompt, 0, item, messages)


EPISODES = [episode(n, "first", f"last {n}", answer=n) for n in range(3)]


def test_trl_arguments_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [1.0, 2.0, 3.0]

    assert Rewards([reward])(EPISODES) == [1.0, 2.0, 3.0]
    assert seen["prompts"] == ["p0", "p1", "p2"]
    assert seen["completions"] == ["last 0", "last 1", "last 2"], "a string prompt gives string completions"
    assert seen["completion_ids"] == [[1, 7]] * 3
    assert seen["answer"] == [0, 1, 2]
    assert [m["name"] for m in seen["messages"][0]] == ["a0", "a1"]
    assert [m["content"] for m in seen["messages"][2]] == ["first", "last 2"]
    assert seen["episodes"] == EPISODES


def test_a_column_called_messages_is_not_the_transcript() -> None:
    asked = [episode(0, "said", messages=[{"role": "assistant", "content": "gold"}], episodes="column")]
    assert Rewards([lambda messages, episodes, **_: [float(messages[0][-1]["content"] == "gold")]])(asked) == [0.0]
    assert Rewards([lambda episodes, **_: [float(episodes == asked)]])(asked) == [1.0]


def test_a_function_without_kwargs_gets_the_arguments_it_names() -> None:
    def named(completions: list[str], answer: list[int]) -> list[float]:
        return [float(text.endswith(str(n))) for text, n in zip(completions, answer, strict=True)]

    assert Rewards([named])(EPISODES) == [1.0, 1.0, 1.0]
    assert Rewards([lambda completion_ids: [len(ids) for ids in completion_ids]])(EPISODES) == [2.0, 2.0, 2.0]


def test_a_callable_object() -> None:
    class Reward:
        def __call__(self, prompts: list[str], **_: Any) -> list[float]:
            return [0.5] * len(prompts)

    assert Rewards([Reward()])(EPISODES) == [0.5] * 3


async def _later(prompts: list[str], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(p[1:]) for p in prompts]


def test_an_async_function() -> None:
    assert Rewards([_later])(EPISODES) == [0.0, 1.0, 2.0]


def test_an_async_function_in_a_notebook_where_a_loop_runs_already() -> None:
    async def cell() -> list[float]:
        return Rewards([_later])(EPISODES)

    assert asyncio.run(cell()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [torch.tensor([1.0, 2.0, 3.0]), np.array([1, 2, 3]), (1, 2, 3), [True, 2, np.float32(3)], [torch.tensor(1.0), 2.0, 3.0]],
    ids=["tensor", "numpy", "tuple", "mixed", "tensors"],
)
def test_what_counts_as_numbers(values: Any) -> None:
    expected = [1.0, 2.0, 3.0]
    assert Rewards([lambda **_: values])(EPISODES) == expected


def test_functions_are_summed_and_none_is_no_opinion() -> None:
    rewards = Rewards([lambda **_: [1.0, None, 3.0], lambda **_: [None, 20.0, 30.0]])
    assert rewards(EPISODES) == [1.0, 20.0, 33.0]
    with pytest.raises(RewardError, match="item-1"):
        Rewards([lambda **_: [1.0, None, 3.0]])(EPISODES)
    assert Rewards([lambda **_: [1.0, None, 3.0]], "zero")(EPISODES) == [1.0, 0.0, 3.0]


def test_no_episodes_no_call() -> None:
    assert Rewards([lambda **_: 1 / 0])([]) == []


def test_an_episode_without_messages_has_an_empty_completion() -> None:
    assert Rewards([lambda completions, completion_ids: [len(completions[0]) + len(completion_ids[0])]])([episode(0)]) == [0.0]


def test_trl_rewards_work_as_they_are() -> None:
    rewards = pytest.importorskip("trl.rewards")
    chat = [{"role": "user", "content": "q"}]
    episodes = [episode(0, "<think>\nhm\n</think>\nyes", prompt=chat), episode(1, "yes", prompt=chat)]
    assert Rewards([rewards.think_format_reward])(episodes) == [1.0, 0.0]
    punish = rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=3)
    assert Rewards([punish])(EPISODES) == punish(completion_ids=[[1, 7]] * 3)
    assert Rewards([punish])(EPISODES) == pytest.approx([-1 / 3] * 3)


def test_columns_of_rows_that_differ() -> None:
    mixed = [episode(0, "x", answer=1), episode(1, "x", level=2)]
    assert Rewards([lambda answer, level: [n or 0 for n in answer]])(mixed) == [1.0, 0.0]


def raises(prompts: list[str], **_: Any) -> list[float]:
    return [float(1 / (int(p[1:]) - 1)) for p in prompts]


BAD: list[tuple[str, Callable[..., Any], str]] = [
    ("raises", raises, "item-1"),
    ("nan", lambda **_: [0.0, math.nan, 1.0], "item-1"),
    ("text", lambda **_: [0.0, "1", 1.0], "item-1"),
    ("infinite", lambda **_: [0.0, math.inf, 1.0], "item-1"),
    ("immense", lambda **_: [0.0, 1e300, 1.0], "item-1"),
    ("text", lambda **_: [0.0, "high", 1.0], "item-1"),
    ("huge", lambda **_: [0.0, 10**400, 1.0], "item-1"),
    ("nested", lambda **_: [0.0, [1.0], 1.0], "item-1"),
    ("short", lambda **_: [0.0, 1.0], "item-0"),
    ("long", lambda **_: [0.0] * 4, "item-0"),
    ("scalar", lambda **_: 1.0, "item-0"),
    ("nothing", lambda **_: None, "item-0"),
    ("dict", lambda **_: {"a": 1, "b": 2, "c": 3}, "item-0"),
    ("string", lambda **_: "abc", "item-0"),
    ("zero-d", lambda **_: torch.tensor(1.0), "item-0"),
    ("missing argument", lambda nonsense: [0.0] * 3, "item-0"),
]


@pytest.mark.parametrize(("function", "item"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_reward_stops_the_run_and_names_the_item(function: Callable[..., Any], item: str) -> None:
    with pytest.raises(RewardError, match=item) as caught:
        Rewards([function])(EPISODES)
    assert "task.on_reward_error=zero" in str(caught.value), "and says how to go on"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [case[1] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_reward_counts_as_zero_on_request(function: Callable[..., Any]) -> None:
    values = Rewards([function], "zero")(EPISODES)
    assert len(values) == 3 and all(math.isfinite(v) for v in values)
    assert values[1] == 0.0


def test_only_the_bad_one_becomes_zero() -> None:
    assert Rewards([raises], "zero")(EPISODES) == [-1.0, 0.0, 1.0]
    assert Rewards([lambda **_: [5.0, math.nan, 6.0]], "zero")(EPISODES) == [5.0, 0.0, 6.0]
    assert Rewards([raises, lambda **_: [10.0] * 3], "zero")(EPISODES) == [9.0, 10.0, 11.0]


def test_an_error_message_of_several_lines_stays_one_line() -> None:
    def chatty(**_: Any) -> list[float]:
        raise ValueError("first\nsecond")

    with pytest.raises(RewardError) as caught:
        Rewards([chatty])(EPISODES)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError), "the traceback is there under --debug"


@pytest.mark.parametrize("code", [None, 0, 3, "bye"])
@pytest.mark.parametrize("awaited", [False, True])
def test_an_exit_is_an_error_like_any_other(code: Any, awaited: bool) -> None:
    """A command would end there, with the exit code of a success."""

    def leaves(prompts: list[str], **_: Any) -> list[float]:
        if "p1" in prompts:
            sys.exit(code)
        return [1.0] * len(prompts)

    async def leaves_later(prompts: list[str], **_: Any) -> list[float]:
        return leaves(prompts)

    function = leaves_later if awaited else leaves
    with pytest.raises(RewardError, match=r"raised RuntimeError: it called sys.exit\(.*\) for item 'item-1'"):
        Rewards([function])(EPISODES)
    assert Rewards([function], "zero")(EPISODES) == [1.0, 0.0, 1.0]


def test_what_a_reward_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout may be one JSON object."""

    def chatty(prompts: list[str], **_: Any) -> list[float]:
        print(prompts[0])
        return [1.0] * len(prompts)

    assert Rewards([chatty])(EPISODES) == [1.0] * 3
    print("after")
    assert capsys.readouterr() == ("after\n", "p0\n")


def test_columns_that_functions_cannot_do_without() -> None:
    def one(prompts: list[str], level: list[int], other: int = 1, *, trainer_state: Any, **_: Any) -> list[float]:
        return [0.0] * len(prompts)

    def two(completions: list[str], *, solution: list[str]) -> list[float]:
        return [0.0] * len(solution)

    assert Rewards([one, two]).needed_columns() == {"level": "one", "solution": "two"}


def test_what_trl_passes_beside_the_columns_is_there() -> None:
    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):  # noqa: ANN001
        log_extra("note", completions)
        log_metric("length", 1.0)
        return [0.5 for _ in completions]

    assert Rewards([reward])(EPISODES) == [0.5] * len(EPISODES)


CHATS = [episode(n, f"last {n}", prompt=[{"role": "user", "content": f"p{n}"}]) for n in range(2)]


def test_trls_own_rewards_work_whatever_the_prompts_are() -> None:
    """They read completions as lists of messages, also where prompts are texts."""
    from trl.rewards import think_format_reward

    said = "<think>\nwhy\n</think>\nbecause"
    for prompt in ("text", [{"role": "user", "content": "text"}]):
        assert Rewards([think_format_reward])([episode(0, said, prompt=prompt), episode(1, "no", prompt=prompt)]) == [1.0, 0.0]


def test_a_reward_on_texts_works_with_conversations_and_the_reverse() -> None:
    calls: list[Any] = []

    def on_text(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        calls.append(completions)
        return [float(prompt.upper() == f"P{text.strip()[-1]}") for prompt, text in zip(prompts, completions, strict=True)]

    def on_messages(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(c[0]["content"][-1] == p[-1]["content"][-1]) for p, c in zip(prompts, completions, strict=True)]

    def mixed(prompts: Any, completions: Any, **_: Any) -> list[float]:
        return [float(c[0]["content"][-1] == p.strip()[-1]) for p, c in zip(prompts, completions, strict=True)]

    for episodes in (EPISODES, CHATS):
        assert Rewards([on_text])(episodes) == [1.0] * len(episodes)
        assert Rewards([on_messages])(episodes) == [1.0] * len(episodes)
    assert Rewards([mixed])(EPISODES) == [1.0] * 3
    calls.clear()
    rewards = Rewards([on_text])
    rewards(CHATS), rewards(CHATS)
    assert calls[-1] == ["last 0", "last 1"] and len(calls) == 4  # two forms were tried in vain, once


def test_what_is_wrong_in_the_form_that_a_reward_reads_is_what_is_told() -> None:
    """It reads messages, so texts are another form to it; its own mistake comes after that."""

    def sums(completions: Any, **_: Any) -> list[float]:
        return [float(int(c[0]["content"])) for c in completions]

    with pytest.raises(RewardError, match="invalid literal for int.*'last"):
        Rewards([sums])(EPISODES)


def test_a_form_that_was_read_once_is_never_changed() -> None:
    """A mistake in a later batch is the function's own, not a matter of the form."""
    seen: list[type] = []

    def reward(completions: Any, **_: Any) -> list[float]:
        seen.append(type(completions[0]))
        if len(seen) > 1:
            raise TypeError("oops")
        return [0.0] * len(completions)

    rewards = Rewards([reward])
    rewards(EPISODES)
    with pytest.raises(RewardError, match="raised TypeError: oops"):
        rewards(EPISODES)
    assert set(seen) == {str}


def test_a_reward_that_reads_no_form_is_named_with_its_line_and_cause() -> None:
    def reward(completions: Any, **_: Any) -> list[float]:
        return [c.nothing for c in completions]

    with pytest.raises(RewardError, match=r"reward reward raised AttributeError: 'str' object .* \(test_rewards.py line \d+\)"):
        Rewards([reward])(EPISODES)


def test_advice_is_written_as_in_a_recipe_or_as_in_a_script() -> None:
    broken = lambda completions, **_: [math.nan] * len(completions)  # noqa: E731
    with pytest.raises(RewardError, match="set task.on_reward_error=zero to count"):
        Rewards([broken])(EPISODES)
    with pytest.raises(RewardError, match="set on_reward_error='zero' to count"):
        Rewards([broken], written=in_a_script)(EPISODES)
