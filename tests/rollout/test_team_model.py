"""The team as a model of a server, without the server: what it asks for, when, and what a client hears."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.base.source import resolve
from teamtr_lora.recipe import Recipe
from teamtr_lora.rollout.team_model import TeamModel, served_team

AGENTS = ("helper", "checker", "judge")


class Server:
    """Answers completions by the agent's name, a letter a piece. `together`: nobody is answered before so many have asked.
    `refuses`: this agent; those after it are never answered."""

    def __init__(self, together: int, refuses: str | None = None) -> None:
        self.together, self.refuses = together, refuses
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.all_there = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/v1/completions"
        agent = json.loads((await receive())["body"])["model"]
        self.asked.append(agent)
        if len(self.asked) % self.together == 0:
            self.all_there.set()
        try:
            await self.all_there.wait()
            if self.refuses and AGENTS.index(agent) > AGENTS.index(self.refuses):
                await asyncio.Event().wait()
            status = 400 if agent == self.refuses else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            if status != 200:
                await send({"type": "http.response.body", "body": b'{"error": "no"}'})
            for at, letter in enumerate(agent if status == 200 else ""):
                choice = {"text": letter, "token_ids": [60 + at], "finish_reason": None}
                await send({"type": "http.response.body", "body": f"data: {json.dumps({'choices': [choice]})}\n\n".encode()})
                await asyncio.sleep(0)
            if self.together == 1:
                self.all_there.clear()
        finally:
            self.ended.append(agent)


def made(server: Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> TeamModel:
    team = {"agents": [{"name": name} for name in AGENTS], "router": {"kind": kind}, "protocol": {"view": "per_agent"}}
    recipe = Recipe.model_validate({"base": {"source": "nano"}, "team": team}).placed_in(Path())
    for name, value in served_team(recipe, resolve("nano"), "nano", context_tokens=512, end_ids=(0,)).items():
        monkeypatch.setenv(name, value)
    return TeamModel(server)


def asked(model: TeamModel, *, leaves: bool = False) -> tuple[int, dict[str, Any]]:
    """Status and body of one chat request; with `leaves` the client goes as soon as all agents were asked."""
    body = json.dumps({"model": "team", "messages": [{"role": "user", "content": "1+2"}], "seed": 1}).encode()
    sent: list[Any] = []

    async def ask() -> None:
        waiting = [{"type": "http.disconnect"}] if leaves else []
        waiting.append({"type": "http.request", "body": body})

        async def receive() -> Any:
            while leaves and len(waiting) == 1 and len(model.app.asked) < len(AGENTS):  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            if not waiting:
                await asyncio.sleep(60)
            return waiting.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        model._ready()  # what it loads on its first request takes its time
        started = time.monotonic()
        await asyncio.wait_for(model(scope, receive, send), 10)
        assert time.monotonic() - started < 9, "it ended because it was made to"
        await asyncio.sleep(0.01)
        assert sorted(model.app.ended) == sorted(AGENTS), "before the loop ends, which would end them all"  # type: ignore[attr-defined]

    asyncio.run(ask())
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else (0, {})


@pytest.mark.parametrize(("kind", "together"), [("round_robin", 1), ("blind", 3)])
def test_a_blind_round_is_asked_at_once_and_heard_in_order(monkeypatch: pytest.MonkeyPatch, kind: str, together: int) -> None:
    """The server waits for all of a blind round: asked one by one, they would wait for ever."""
    server = Server(together)
    status, body = asked(made(server, kind, monkeypatch))
    assert status == 200 and server.asked == list(AGENTS)
    message = body["choices"][0]["message"]
    assert message["reasoning"] == "\n\n".join(f"{name}: {name}" for name in AGENTS)
    assert body["usage"]["completion_tokens"] == sum(map(len, AGENTS))


@pytest.mark.parametrize("refuses", AGENTS)
def test_a_refusal_in_a_blind_round_is_the_answer_and_ends_the_others(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    assert asked(made(Server(3, refuses), "blind", monkeypatch)) == (400, {"error": "no"})


def test_nobody_is_sampled_for_a_client_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(4)  # of whom the fourth never comes
    asked(made(server, "blind", monkeypatch), leaves=True)
    assert server.asked == list(AGENTS)
