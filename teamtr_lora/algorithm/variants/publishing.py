"""When an accepted update is played by the team: at once (alg:teamtr), or together with the stage's others."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol


class Publisher(Protocol):
    def publish(self, version: Any) -> None: ...
    def publish_all(self) -> None: ...


class Publishing:
    words: ClassVar[str]
    resampling: ClassVar[str | None] = None  # the only training.resampling that it works with; None: any

    def after_update(self, team: Publisher, version: Any) -> None:
        """An update was accepted as `version`."""

    def catch_up(self, team: Publisher) -> None:
        """From here on the team is played with all updates made so far: a stage has ended, or somebody measures the team."""


class Sequential(Publishing):
    """TeamTR: the next agent's episodes are played with this update."""

    words = "an agent's update is published before the next agent's"

    def after_update(self, team: Publisher, version: Any) -> None:
        team.publish(version)


class Joint(Publishing):
    """One batch for all agents, one step of the whole team (the simultaneous baseline)."""

    words = "all agents of a stage learn from one batch and are published together at its end (with resampling: never)"
    resampling = "never"

    def catch_up(self, team: Publisher) -> None:
        team.publish_all()


UPDATES: dict[str, type[Publishing]] = {"sequential": Sequential, "joint": Joint}
