"""What `diagnose` prints."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.text.tables import known, print_table, table_of
from teamtr_lora.common.consoles import Console, print_hanging
from teamtr_lora.common.flat import flat
from teamtr_lora.study.diagnose import RunDiagnosis

TITLES = {
    "staleness": "stale surrogates and drifted contexts, by probed stage (excess: less the split-half null)",
    "staleness_by_update": "the same by place in the stage's order, means",
    "context_drift": "drift of contexts in the training rollouts, by place",
    "importance": "weights that would carry stage-start episodes to the current team, by place",
    "kl_estimators": "KL estimators on the same held-out messages, means over updates",
    "monitors": "KL monitors on random parts of the token positions (|deviation| / delta)",
    "zeta": "zeta proxies",
    "local_gain": "the largest gain in the trust region (thm:info-lower-stage)",
}


# One sentence for each table and line: what its words mean.
MEANINGS = {
    "staleness": "Delta_stale: how much estimated gains change when the stage's first episodes replace fresh ones. "
    "D_occ: how much contexts differ. null: what noise alone shows; excess: what is left.",
    "context_drift": "How far contexts have moved since the stage began; only the excess over the null is signal.",
    "importance": "ess: the share of old episodes that would still count; below a half, more than half is wasted.",
    "kl_estimators": "exact sums over the vocabulary, k3 and k1 use the sampled token only: do they agree?",
    "monitors": "How far off the KL is when it is read from a part of the tokens; above 1, more messages are needed.",
    "zeta": "How large the estimation error is that the certificate does not charge.",
    "local_gain": "The largest gain that the trust region allows, estimated from gradients.",
    "kl_spread": "is the KL in a few messages? quantiles are means over updates",
    "clipping": "how often ratios and advantages are clipped; overflow: what that took away",
    "gradient": "how much of it is signal, by what its micro-batches agree on; the rest is noise, which more items lower",
    "stability": "does accuracy go up and down more than chance, the floor, explains?",
    "coordination": "how often all agents are right together",
    "order": "does the order of updates matter? a small p value says yes; null: what chance shows",
}

# in the JSON only: what is shown is the excess and the null
LEFT_OUT = {"delta_stale value", "d_occ value", "mean_standard_error", "smallest_eigenvalue", "damping"}


def print_diagnosis(found: RunDiagnosis) -> None:
    console = Console()
    for sentence in found.verdict:
        console.print(f"[bold]{escape(sentence)}[/]")
    for name, title in TITLES.items():
        rows = getattr(found, name)
        if rows:
            print_table(console, _table(title, [_readings(row) for row in rows]))
            if name in MEANINGS:
                print_hanging(console, escape(f"  {MEANINGS[name]}"), indent=2)
    if found.token_shift:
        print_table(console, _token_shift(found.token_shift))
    for name in ("kl_spread", "clipping", "gradient", "stability", "coordination", "order", "cost"):
        values = getattr(found, name)
        if values:
            readings = _readings(values).items()
            shown = {key: value for key, value in readings if name != "cost" or value}  # what was never done costs 0
            words = ", ".join(f"{escape(key.replace('_', ' '))} {_shown(value)}" for key, value in shown.items())
            note = f" ({MEANINGS[name]})" if name in MEANINGS else ""
            print_hanging(console, f"[bold]{name.replace('_', ' ')}[/]{note}: {words}")
    for name, reason in found.missing.items():
        print_hanging(console, escape(f"{name.replace('_', ' ')}: {reason}"))


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    names = [name for name in rows[0] if name not in LEFT_OUT]
    shown = [name.replace("_", " ") for name in names]
    table = table_of(title, *shown, left=0, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(_shown(row[name]) for name in names))
    return table


def _token_shift(shift: dict[str, Any]) -> Table:
    kinds = [name for name in ("in_region", "out_of_region") if name in shift]
    steps = ", ".join(
        f"{name.replace('_', ' ')}: {shift[name]['step']:.1f} times the step, most probable token changed at "
        f"{shift[name]['flip_rate']:.1%} of positions"
        for name in kinds
    )
    title = f"token probabilities by rank before the update ({escape(shift['agent'])}, stage {shift['stage']}; {steps})"
    columns = [f"{name.replace('_', ' ')}: {what}" for name in kinds for what in ("after", "moved")]
    table = table_of(title, "rank", "before", *columns, left=0, box=box.SIMPLE)
    before = shift[kinds[0]]["before"]
    for rank in range(len(before)):
        label = "rest" if rank + 1 == len(before) else str(rank + 1)
        numbers = [shift[name][what][rank] for name in kinds for what in ("after", "moved")]
        table.add_row(label, _shown(before[rank]), *(_shown(number) for number in numbers))
    return table


def _readings(row: dict[str, Any]) -> dict[str, Any]:
    """Nested ones as columns of their own; lists stay out of tables."""
    return {name: value for name, value in flat(row, " ").items() if not isinstance(value, (list, dict))}


def _shown(value: Any) -> str:
    return known(value, ".3g") if value is None or isinstance(value, float) else escape(str(value))
