"""How much of a gradient is signal, and how much is the noise of few messages, from the gradients of its parts."""

from __future__ import annotations

import math


def signal_share(whole: float, parts: float, shares: float) -> float | None:
    """Of the squared length `whole` of a gradient that is a sum over parts: the share that other messages would give too.

    `parts`: the sum of the parts' squared lengths. `shares`: that of the squared shares that the parts have of the messages. The
    parts are independent, and part k is its share w_k of the true gradient G, on average, plus noise. So on average

        whole = |G|^2 + noise    and    parts = shares |G|^2 + noise,

    which gives |G|^2. By chance it may come out below 0. None where a single part tells nothing.
    """
    if not 0 < whole < math.inf or not shares < 1:
        return None
    return (whole - parts) / (1 - shares) / whole
