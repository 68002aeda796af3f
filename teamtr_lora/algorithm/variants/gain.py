"""What the trust region asks of a step's surrogate gain (eq:ppo_obj), beside its KL.

On held-out episodes the standard error of the gain is about as large as the gain itself, so asking for a positive one there
rejects good steps by chance. TRPO's line search asks for improvement in-sample; only the KL needs held-out data.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

ROUNDING = 1e-6  # of a gain in float32, in units of the advantage: what says nothing either way


class Measured(Protocol):
    """A mean over held-out episodes, and its upper confidence bound."""

    @property
    def mean(self) -> float: ...
    @property
    def bound(self) -> float: ...


class GainRule:
    """Asks nothing; what the rules below have in common."""

    words: ClassVar[str] = "the gain is measured and decides nothing"
    shortens: ClassVar[bool] = False  # a step in region whose gain is not allowed is tried again shorter, instead of rejected
    in_sample: ClassVar[bool] = False  # a step has to improve the surrogate on the episodes that it was fitted to

    def allows(self, gain: Measured) -> bool:
        """Whether the surrogate gain on held-out episodes speaks for a step."""
        return True


class Veto(GainRule):
    """A step improves the surrogate in-sample, and held-out episodes do not show that it harms."""

    words = "it must be positive in-sample, and its upper confidence bound on held-out episodes at least 0, or there is harm"
    in_sample = True

    def allows(self, gain: Measured) -> bool:
        return not gain.bound < -ROUNDING


class Positive(GainRule):
    """A step gains on held-out episodes; one that does not is shortened, where clipping may have eaten the gain."""

    words = "it must be positive on held-out episodes"
    shortens = True

    def allows(self, gain: Measured) -> bool:
        return gain.mean > 0


GAINS: dict[str, type[GainRule]] = {"veto": Veto, "positive": Positive, "none": GainRule}
