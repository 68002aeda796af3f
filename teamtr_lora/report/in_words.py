"""The summary at the head of a page: what happened, for a reader who has never seen the method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from teamtr_lora.common.paired import PairedTest
from teamtr_lora.common.quantities import duration, short
from teamtr_lora.report.reasons import kind_of_reason
from teamtr_lora.report.run_data import RunData
from teamtr_lora.report.seeds import Kind, counted, differences, gain_of, over_seeds

ARROW = "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW}\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Tile:
    """A number that is seen first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Gain:
    """Accuracy after less before; `test`: item by item, where the run wrote its items down."""

    before: float
    after: float
    items: int
    test: PairedTest | None

    @property
    def interval(self) -> tuple[float, float] | None:
        test = self.test
        return None if test is None or test.low is None or test.high is None else (test.low, test.high)

    @property
    def verdict(self) -> str:
        if self.test is None:
            return "The team was measured"
        clear = self.test.p_value < 0.05 if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]
        if not clear:
            return "No clear change"
        return "The team got better" if self.test.difference > 0 else "The team got worse"


def headline(run: RunData) -> str:
    gain = measured_gain(run)
    if gain:
        return f"{gain.verdict}: {percent(gain.before)}{ARROW}{percent(gain.after)} right on held-out items."
    if run.ends:
        return f"Before training the team is right on {percent(_accuracy(run, 0))} of the held-out items."
    return "The run has just begun."


def summary(run: RunData) -> list[str]:
    """Sentences, a paragraph each."""
    return [text for text in (_trained(run), _gained(run), _updates(run), _safety(run), _swaps(run), _cost(run)) if text]


def tiles(run: RunData) -> list[Tile]:
    done, stages = run.stages[-1].stage if run.stages else 0, run.stored.recipe.training.stages
    found = [Tile("stage", f"{done} of {stages}")]
    gain = measured_gain(run)
    if run.ends:
        found.insert(0, Tile("held-out accuracy", percent(_accuracy(run, -1)), f"{percent(_accuracy(run, 0))} before training"))
    if gain:
        interval = f"95%: {_signed(gain.interval[0])} to {_signed(gain.interval[1])}" if gain.interval else ""
        found.insert(1, Tile("change, in points", _signed(gain.after - gain.before), interval))
    if run.updates:
        taken = sum(row.alpha is not None for row in run.updates)
        shrunk = sum(row.decision == "shrunk" for row in run.updates)
        found.append(Tile("updates accepted", f"{taken} of {len(run.updates)}", f"{shrunk} of them shrunk" if shrunk else ""))
    if run.stages:
        last = run.stages[-1]
        since = [row for row in run.updates if row.time > last.time]  # of the stage that is in progress
        found.append(Tile("tokens sampled", short(last.sampled_tokens + sum(row.sampled_tokens for row in since))))
        found.append(Tile("time", duration(last.seconds + sum(sum(row.seconds.values()) for row in since))))
    return found


def measured_gain(run: RunData) -> Gain | None:
    if len(run.ends) < 2:
        return None
    before, after = run.ends
    return Gain(before["avg_at_k"], after["avg_at_k"], items=after["items"], test=gain_of(run))


def compared_in_words(kinds: Sequence[Kind]) -> list[str]:
    """Of several runs: what they reached, and which differences are more than luck."""
    said = []
    for kind in kinds:
        reached = [own for seed in kind.by_seed if (own := [_accuracy(run, -1) for run in seed if run.ends])]
        if reached:
            said.append(f"{kind.label}: {_reached(reached)}.")
    for each in differences(kinds):
        test = each.test
        sure = "more than luck" if test.p_value < 0.05 else "may be luck"
        said.append(
            f"{each.second} against {each.first}: {_signed(test.difference)} points on the same items, {sure} "
            f"(p = {test.p_value:.2g}; better on {test.better} items, worse on {test.worse}"
            f"{f'; no interval, as {test.no_interval}' if test.no_interval else ''})."
        )
    return said


def _reached(by_seed: Sequence[Sequence[float]]) -> str:
    mean, half = over_seeds(by_seed)
    said, values = f"{percent(mean)} of held-out items right at the end", [value for own in by_seed for value in own]
    if len(values) == 1:
        return said
    each = f" ({_list([percent(value) for value in values])})" if len(values) <= 5 else ""
    said += f", the mean of {counted(len(values), len(by_seed))}{each}"
    if half is None:
        few = "one seed does" if len(by_seed) == 1 else "seeds that end alike do"
        return f"{said}; no interval, as {few} not show how far seeds differ"
    return f"{said}; 95% interval {percent(max(0.0, mean - half))} to {percent(min(1.0, mean + half))}"


def _trained(run: RunData) -> str:
    names, recipe = run.agents, run.stored.recipe
    count = f"{_count(len(names))} agents ({_list(names)}) work" if len(names) > 1 else f"One agent ({names[0]}) works"
    text = f"{count} on the task {recipe.task.name}, each a small adapter on the frozen model {recipe.base.source}."
    if run.stored.baseline:
        return f"{text} One of them was trained by TRL, for comparison."
    return f"{text} TeamTR updates one agent at a time, each by a small step, and keeps a step only if held-out episodes agree."


def _gained(run: RunData) -> str:
    gain = measured_gain(run)
    if gain is None:
        return "Its accuracy will be known after the next evaluation." if run.updates else ""
    change = gain.after - gain.before
    ends = f"from {percent(gain.before)} to {percent(gain.after)}"
    text = f"Accuracy on {gain.items} held-out items went {ends}: {_signed(change)} points"
    if gain.interval is None:
        why = gain.test.no_interval if gain.test else "the items before and after are not known to be the same"
        return f"{text}; no interval, as {why}. {_reward(run)}"
    low, high = gain.interval
    text += f", with 95% confidence between {_signed(low)} and {_signed(high)} (the same items before and after)."
    if low <= 0 <= high:
        text += " That interval contains zero, so it may be luck: more stages or more evaluation items would tell."
    return f"{text} {_reward(run)}"


def _reward(run: RunData) -> str:
    first, last = (evaluation["mean_reward"] for evaluation in run.ends)
    return f"The mean reward there went from {first:.3f} to {last:.3f}."


def _updates(run: RunData) -> str:
    if not run.updates:
        return "No update has been made yet."
    counts: Counter[str] = Counter(row.decision for row in run.updates)
    words = {"accepted": "accepted whole", "shrunk": "shrunk", "rejected": "rejected", "skipped": "skipped"}
    parts = [f"{counts[decision]} {text}" for decision, text in words.items() if counts[decision]]
    made = _list([f"{part.partition(' ')[0]} {'was' if part[:2] == '1 ' else 'were'} {part.partition(' ')[2]}" for part in parts])
    total = len(run.updates)
    text = f"Of {total} update{'s' if total > 1 else ''}, {made}."
    why = Counter((row.decision, kind_of_reason(row)) for row in run.updates if row.decision != "accepted")
    if why:
        causes = [f"{n} {words[decision]} ({cause})" for (decision, cause), n in why.most_common(6)]
        text += f" Why: {', '.join(causes)}."
    return text


def _safety(run: RunData) -> str:
    if run.stored.baseline or not any(row.alpha is not None for row in run.updates):
        return ""
    outside = sum(row.out_of_region for row in run.updates)
    if outside:
        return f"{outside} accepted updates moved their agent further than the trust region allows (KL bound above delta)."
    return "By its own bounds no accepted update moved its agent further than the trust region allows."


def _swaps(run: RunData) -> str:
    made = [f"{row.agent} after stage {row.stage} ({'undone' if row.how == 'undo' else row.how})" for row in run.swaps]
    return f"Agents were replaced: {_list(made)}." if made else ""


def _cost(run: RunData) -> str:
    if not run.stages:
        return ""
    last = run.stages[-1]
    return f"That took {duration(last.seconds)} and {short(last.sampled_tokens)} sampled tokens."


def _accuracy(run: RunData, place: int) -> float:
    return float(run.ends[place]["avg_at_k"])


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _signed(points: float) -> str:
    """A difference of shares in points, with a real minus sign."""
    return f"{100 * points:+.1f}".replace("-", "\N{MINUS SIGN}")


def _count(number: int) -> str:
    names = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return names[number] if number < len(names) else str(number)


def _list(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
