"""Evaluation of a team on held-out items."""

from teamtr_lora.evaluation.evaluate import Evaluation, evaluate
from teamtr_lora.evaluation.statistics import avg_at_k, pass_at_k, standard_error

__all__ = ["Evaluation", "avg_at_k", "evaluate", "pass_at_k", "standard_error"]
