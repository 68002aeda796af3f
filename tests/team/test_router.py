"""Who speaks next."""

from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.team import Message, Router, build_router

AGENTS = ["a", "b", "c"]


def order(router: Router, texts: dict[int, str] | None = None) -> list[str]:
    """The speakers of an episode, as the collector would ask for them."""
    messages: list[Message] = []
    while (agent := router.next(messages)) is not None:
        assert len(messages) < 50, "the router never ends"
        messages.append(Message(agent, len(messages), [], [], [], "", "stop", (texts or {}).get(len(messages), "")))
    return [m.agent for m in messages]


def test_round_robin() -> None:
    router = build_router("round_robin", AGENTS, rounds=2)
    assert order(router) == ["a", "b", "c", "a", "b", "c"]
    assert router.max_messages == 6


def test_a_blind_round_is_everybody_once_and_all_messages_are_the_answer() -> None:
    router = build_router("blind", AGENTS, rounds=2)
    assert order(router) == ["a", "b", "c", "a", "b", "c"] and router.max_messages == 6
    assert router.round_messages == 3, "what is said is heard when everybody has spoken"
    assert not router.one_answer and not router.votes and router.decide is None
    said = [Message(agent, turn, [], [], [], "", "stop", "") for turn, agent in enumerate(order(router))]
    assert [router.together(said[:turn]) for turn in (0, 1, 3, 5, 6)] == [AGENTS, AGENTS[1:], AGENTS, AGENTS[2:], []]


def test_sequence_may_repeat_and_leave_out() -> None:
    router = build_router("sequence", AGENTS, rounds=2, sequence=["a", "c", "a"])
    assert order(router) == ["a", "c", "a", "a", "c", "a"]
    assert router.max_messages == 6


def test_until_done_stops_after_the_marker() -> None:
    router = build_router("until_done", AGENTS, rounds=2, done_marker="FINAL:")
    assert order(router) == ["a", "b", "c", "a", "b", "c"], "without a marker the rounds are the limit"
    assert order(router, {3: "so FINAL: 12"}) == ["a", "b", "c", "a"]
    assert order(router, {0: "FINAL:"}) == ["a"]
    assert order(router, {1: "final: lower case does not count"}) == ["a", "b", "c", "a", "b", "c"]


def test_custom_callable_chooses_and_ends() -> None:
    seen: list[int] = []

    def loudest_first(*, messages: list[Message], agents: list[str]) -> str | None:
        seen.append(len(messages))
        return None if len(messages) == 4 else agents[-1 - len(messages) % 2]

    router = build_router("custom", AGENTS, rounds=2, custom=loudest_first)
    assert order(router) == ["c", "b", "c", "b"]
    assert seen == [0, 1, 2, 3, 4]


def test_custom_callable_cannot_exceed_the_limit() -> None:
    assert order(build_router("custom", AGENTS, rounds=1, custom=lambda messages, agents: "a")) == ["a", "a", "a"]


def test_a_router_that_changes_its_arguments_changes_nothing() -> None:
    def vandal(messages: list[Message], agents: list[str]) -> str:
        messages.clear()
        agents.clear()
        return "a"

    router = build_router("custom", AGENTS, rounds=1, custom=vandal)
    assert order(router) == ["a", "a", "a"]


def test_custom_callable_that_exits_or_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A command would end there as if all were well; and its stdout may be one JSON object."""

    def leaves(messages: Any, agents: Any) -> str:
        print("leaving")
        raise SystemExit(0)

    with pytest.raises(UserError, match=r"team.router.callable raised RuntimeError after 0 messages: it called sys.exit\(0\)"):
        order(build_router("custom", AGENTS, custom=leaves))
    assert capsys.readouterr() == ("", "leaving\n")


def test_custom_callable_errors_are_the_users_to_fix() -> None:
    def broken(messages: list[Message], agents: list[str]) -> str:
        raise KeyError("who")

    with pytest.raises(UserError, match=r"team\.router\.callable raised KeyError after 0 messages"):
        order(build_router("custom", AGENTS, custom=broken))
    with pytest.raises(UserError, match=r"team\.router\.callable raised TypeError"):
        order(build_router("custom", AGENTS, custom=lambda: "a"))


@pytest.mark.parametrize("answer", ["d", "", 3, ["a"], True])
def test_an_unknown_agent_is_named(answer: Any) -> None:
    with pytest.raises(UserError, match=r"which is no agent; the agents are a, b, c"):
        order(build_router("custom", AGENTS, custom=lambda messages, agents: answer))
