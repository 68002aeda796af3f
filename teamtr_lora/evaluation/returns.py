"""What an evaluation in a run's log has beside its measures: the discounted return J, and every item's own result."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

from teamtr_lora.evaluation.evaluate import summarise
from teamtr_lora.evaluation.outcome import problem_digest
from teamtr_lora.evaluation.statistics import standard_error
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.tasks import Task
from teamtr_lora.tasks.machinery.task import item_of
from teamtr_lora.team import Episode


def recorded(episodes: list[Episode], task: Task, plan: PlayPlan, discount: float) -> dict[str, Any]:
    """The evaluation that played `plan`, its mean discounted return, each reward at the turn that earned it, and each item's
    accuracy.

    The mean reward cannot be discounted afterwards: episodes end at different turns, and some tasks reward early ones. Two teams
    with one `items_digest` were measured on the same problems, so that their accuracies can be compared item by item.
    """
    by_item: dict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_item[episode.group].append(episode)
    means = [sum(e.discounted_return(discount) for e in group) / len(group) for group in by_item.values()]
    problems = "".join(problem_digest(item_of(group[0])) for group in by_item.values())
    return summarise(episodes, task, plan).as_dict() | {
        "mean_return": sum(means) / len(means),
        "mean_return_standard_error": standard_error(means),
        "by_item": [sum(e.success for e in group) / len(group) for group in by_item.values()],
        "items_digest": hashlib.sha256(problems.encode()).hexdigest()[:16],
    }
