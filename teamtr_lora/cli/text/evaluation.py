"""What `eval` prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape

from teamtr_lora.cli.text.tables import known, print_table, table_of
from teamtr_lora.common.consoles import Console
from teamtr_lora.common.paired import PairedTest
from teamtr_lora.common.visible import visible_line
from teamtr_lora.evaluation.compare import Comparison
from teamtr_lora.evaluation.evaluate import Measure
from teamtr_lora.evaluation.result import Estimate, EvaluationResult

BASELINES = {"cot": "chain of thought", "self_consistency": "self-consistency", "tree_of_thoughts": "tree of thoughts"}


def print_evaluation(result: EvaluationResult) -> None:
    console, evaluation = Console(), result.evaluation
    title = f"{evaluation.items} {evaluation.split} items, k = {evaluation.k}, temperature {evaluation.temperature:g}"
    policy = result.settings["policy"]
    if policy["kind"] != "team":
        title = f"{BASELINES[policy['kind']]} by {policy['agent'] or 'the base alone'}: {title}"
    table = table_of(escape(title), "measure", "value", "95% interval", "standard error")
    same = _same_as_avg(evaluation.k, result.measures)
    for name, estimate in result.measures.items():
        if name not in same:
            table.add_row(name, *_cells(name, estimate))
    judged = evaluation.coordination is not None
    if policy["kind"] == "team" and judged:  # of one model these are its accuracy once more
        rows = {f"{agent}'s own answer right": measure for agent, measure in evaluation.agents.items()}
        rows["all agents right together"] = evaluation.coordination
        rows["... given that the team is right"] = evaluation.coordination_given_success
        for name, measure in rows.items():
            table.add_row(escape(name), *_measure_cells(measure))
    print_table(console, table)
    _print_same(console, evaluation.k, same)
    if not judged and (policy["kind"] == "team" or evaluation.k > 1):
        console.print(
            "single messages are not judged: the task scores several together, or does not say how to read an answer (for a "
            "dataset: task.answer)"
        )
    _print_categories(console, result, same)
    if evaluation.items > 1 and result.measures[f"avg@{evaluation.k}"].low is None:
        most = min(100, 300 / evaluation.items)  # the rule of three
        console.print(f"every item went alike, so resampling shows no spread; up to {most:.3g}% of unseen items may still differ")
    console.print(f"{evaluation.episodes} episodes, {evaluation.sampled_tokens:,} sampled tokens")
    console.print(f"written to {escape(result.folder)}", soft_wrap=True)


def _same_as_avg(k: int, measures: Mapping[str, Estimate | PairedTest]) -> list[str]:
    """The measures that say what avg@k says: those of one sample by definition, a reward that is 1 for right and else 0."""
    names = ["mean reward", *(["pass@1", "pass^1", "maj@1"] if k == 1 else [])]
    return [name for name, found in measures.items() if name in names and found == measures[f"avg@{k}"]]


def _print_same(console: Console, k: int, same: list[str]) -> None:
    if same:
        console.print(f"the same as avg@{k} here, and left out: {', '.join(same)}")


def _print_categories(console: Console, result: EvaluationResult, same: list[str]) -> None:
    shown = [n for n in result.measures if n.startswith(("avg@", "maj@")) or n == f"pass@{result.evaluation.k}"]
    shown = [name for name in shown if name not in same]
    for column, values in result.categories.items():
        table = table_of(f"by {escape(column)}", column, "items", *(f"{name} (95% interval)" for name in shown))
        for value, (items, measures) in values.items():
            cells = [" ".join(_cells(name, measures[name])[:2]) for name in shown]
            table.add_row(escape(visible_line(value)), str(items), *cells)
        print_table(console, table)


def print_comparison(comparison: Comparison) -> None:
    console = Console()
    title = f"{comparison.items} items, k = {comparison.k}: B minus A, paired by item"
    exact = any(test.mcnemar_p_value is not None for test in comparison.tests.values())
    columns = ["measure", "A", "B", "difference", "95% interval", "p", *(["McNemar p"] if exact else []), "better / worse"]
    table = table_of(title, *columns)
    same = _same_as_avg(comparison.k, comparison.tests)
    for name, test in comparison.tests.items():
        if name in same:
            continue
        places = 1 if "tokens" in name else 4
        interval = "-" if test.low is None or test.high is None else f"[{test.low:+.{places}f}, {test.high:+.{places}f}]"
        exactly = [known(test.mcnemar_p_value)] if exact else []
        values = [f"{test.first:.{places}f}", f"{test.second:.{places}f}", f"{test.difference:+.{places}f}"]
        table.add_row(name, *values, escape(interval), f"{test.p_value:.4f}", *exactly, f"{test.better} / {test.worse}")
    print_table(console, table)
    _print_same(console, comparison.k, same)
    reasons: dict[str, list[str]] = {}
    for name, test in comparison.tests.items():
        if test.no_interval and name not in same:
            reasons.setdefault(test.no_interval, []).append(name)
    for reason, names in reasons.items():
        console.print(f"no interval for {', '.join(names)}: {reason}")
    for letter, name, temperature in zip("AB", (comparison.first, comparison.second), comparison.temperatures, strict=True):
        console.print(f"{letter}: {escape(name)} at temperature {temperature:g}", soft_wrap=True)
    console.print("intervals: bootstrap over items; p: sign flips of the items' differences, two-sided")


def _cells(name: str, estimate: Estimate) -> list[str]:
    places = 1 if "tokens" in name else 4
    both = estimate.low is not None and estimate.high is not None
    interval = f"[{estimate.low:.{places}f}, {estimate.high:.{places}f}]" if both else "-"
    return [f"{estimate.value:.{places}f}", escape(interval), known(estimate.standard_error, f".{places}f")]


def _measure_cells(found: Measure | None) -> list[str]:
    if found is None:
        return ["-", "", ""]
    error = found.standard_error
    spread = 1.96 * error if error is not None else None
    interval = "-" if not spread else f"[{max(0.0, found.value - spread):.4f}, {min(1.0, found.value + spread):.4f}]"
    return [f"{found.value:.4f}", escape(interval), known(error)]
