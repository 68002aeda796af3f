"""What `certify` compares its bounds with: the discounted return J of a measured team."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from teamtr_lora.evaluation.evaluate import Evaluation
from teamtr_lora.evaluation.statistics import standard_error
from teamtr_lora.team import Episode


def with_return(evaluation: Evaluation, episodes: Sequence[Episode], discount: float) -> dict[str, Any]:
    """The evaluation and its episodes' mean discounted return, each reward at the turn that earned it.

    The mean reward cannot be discounted afterwards: episodes end at different turns, and some tasks reward early ones.
    """
    by_item: dict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        by_item[episode.group].append(episode.discounted_return(discount))
    means = [sum(returns) / len(returns) for returns in by_item.values()]
    found = {"mean_return": sum(means) / len(means), "mean_return_standard_error": standard_error(means)}
    return evaluation.as_dict() | found
