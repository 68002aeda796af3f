"""The unit of the importance ratio in the surrogate (eq:ppo_obj): what is clipped, and what is multiplied by the advantage.

Methods take and return tensors: M has a value a message, N a value a token.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MessageRatio:
    """The product over a message's tokens, as the paper has it."""

    words: ClassVar[str] = "one ratio a message, the product over its tokens"

    def ratios(self, log_N: Any, message_N: Any, log_M: Any, length_M: Any) -> tuple[Any, Any | None]:
        """The logs of the ratios, and the message that each belongs to (None: there is one a message, in their order).

        `log_N`: the tokens' own log-ratios; `log_M`: their sums by message; `length_M`: tokens of a message."""
        return log_M, None


class SequenceMean(MessageRatio):
    """The geometric mean of the token ratios (GSPO's): a long message is clipped no sooner than a short one."""

    words = "one ratio a message, the geometric mean over its tokens"

    def ratios(self, log_N: Any, message_N: Any, log_M: Any, length_M: Any) -> tuple[Any, Any | None]:
        return log_M / length_M, None


class TokenRatio(MessageRatio):
    """Every token's own ratio (PPO's and GRPO's), averaged over the message."""

    words = "one ratio a token, averaged over the message"

    def ratios(self, log_N: Any, message_N: Any, log_M: Any, length_M: Any) -> tuple[Any, Any | None]:
        return log_N, message_N


RATIOS: dict[str, type[MessageRatio]] = {"message": MessageRatio, "token": TokenRatio, "sequence_mean": SequenceMean}
