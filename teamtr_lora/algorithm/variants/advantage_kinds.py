"""What is made of a return minus its group's mean (eq:group_adv): divided by the group's spread, clipped, both, or neither."""

from __future__ import annotations

from typing import Any, ClassVar


class GroupNormalised:
    """The paper's: divided by the group's standard deviation, and clipped."""

    words: ClassVar[str] = "normalised by the group's standard deviation and clipped"
    clipped: ClassVar[bool] = True

    def scaled(self, centred_E: Any, deviation_E: Any, size_E: Any) -> Any:
        """From the centred return of an episode, the standard deviation in its group, and how many episodes that has."""
        return centred_E / deviation_E


class NoNorm(GroupNormalised):
    words = "not normalised"

    def scaled(self, centred_E: Any, deviation_E: Any, size_E: Any) -> Any:
        return centred_E


class NoClip(GroupNormalised):
    words = "not clipped"
    clipped = False


class LeaveOneOut(GroupNormalised):
    """R minus the mean of the group's others, neither divided nor clipped."""

    words = "reward minus the mean of the group's others"
    clipped = False

    def scaled(self, centred_E: Any, deviation_E: Any, size_E: Any) -> Any:
        return centred_E * (size_E / (size_E - 1).clamp(min=1))


ADVANTAGES: dict[str, type[GroupNormalised]] = {
    "group": GroupNormalised,
    "no_norm": NoNorm,
    "no_clip": NoClip,
    "leave_one_out": LeaveOneOut,
}
