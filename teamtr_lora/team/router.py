"""Who speaks next. A router is a pure function of the messages so far: it belongs to the environment, not to the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from teamtr_lora.errors import UserError
from teamtr_lora.team.episode import Message


@dataclass(frozen=True)
class Router:
    """`next(messages)` names the next speaker, or None to end the episode; never more than `max_messages` of them."""

    choose: Callable[[Sequence[Message]], str | None]
    max_messages: int

    def next(self, messages: Sequence[Message]) -> str | None:
        return None if len(messages) >= self.max_messages else self.choose(messages)


def build_router(
    kind: str,
    agents: Sequence[str],
    *,
    rounds: int = 1,
    sequence: Sequence[str] = (),
    done_marker: str = "",
    custom: Callable[..., str | None] | None = None,
) -> Router:
    speakers = list(sequence) if kind == "sequence" else list(agents)
    in_turn = lambda messages: speakers[len(messages) % len(speakers)]  # noqa: E731
    limit = rounds * len(speakers)
    if kind in ("round_robin", "sequence"):
        return Router(in_turn, limit)
    if kind == "until_done":
        return Router(lambda messages: None if messages and done_marker in messages[-1].text else in_turn(messages), limit)
    if kind == "custom" and custom is not None:
        return Router(_checked(custom, list(agents)), limit)
    raise UserError(f"team.router.kind = {kind!r}: unknown router; use round_robin, sequence, until_done or custom")


def _checked(custom: Callable[..., str | None], agents: list[str]) -> Callable[[Sequence[Message]], str | None]:
    def choose(messages: Sequence[Message]) -> str | None:
        try:
            name = custom(messages=list(messages), agents=list(agents))
        except Exception as error:
            raise UserError(
                f"team.router.callable raised {type(error).__name__} after {len(messages)} messages: {error}"
            ) from error
        if name is not None and name not in agents:
            raise UserError(f"team.router.callable returned {name!r}, which is no agent; the agents are {', '.join(agents)}")
        return name

    return choose
