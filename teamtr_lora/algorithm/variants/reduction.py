"""How the KL of a message is counted from that of its tokens: their sum (eq:emp_tok_kl), or their mean."""

from __future__ import annotations

from typing import Any, ClassVar


class Reduction:
    """`message_sum`: the KL between the distributions of the message as a whole."""

    words: ClassVar[str] = "summed over each message's tokens"
    whole: ClassVar[bool] = True  # the KL of whole messages, which is what the paper's bounds take

    def of_message(self, total: Any, tokens: Any) -> Any:
        """From the sum over a message's tokens and their number, arrays by message or plain numbers alike."""
        return total


class TokenMean(Reduction):
    words = "averaged over each message's tokens"
    whole = False

    def of_message(self, total: Any, tokens: Any) -> Any:
        return total / tokens


REDUCTIONS: dict[str, Reduction] = {"message_sum": Reduction(), "token_mean": TokenMean()}
