"""autologi: open puzzles, right when the format check and every constraint accept the answer.

Items in AutoLogi's format: a prompt, and two programs, one that defines `inputs_check(inputs)` and one that defines
`constraint_list`, functions of the inputs. The programs run in the sandbox, whoever wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from teamtr_lora.tasks.autologi_maker import LogicItems
from teamtr_lora.tasks.bench import BenchTask, field
from teamtr_lora.tasks.sandbox import Limits, run_checks
from teamtr_lora.tasks.task import Item, Split, item_of
from teamtr_lora.team import Episode, Message

FENCE = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
LONGEST = 20_000  # characters of an answer worth checking
CHECK, CONSTRAINTS = "inputs_check", "constraint_list"
PROCESSES = 2


def answer_in(text: str) -> str | None:
    """The last fenced block, or else the last outermost {...} or [...]; without an `inputs =` before it."""
    fenced = FENCE.findall(text[-4 * LONGEST :])
    found = fenced[-1] if fenced else _last_braces(text[-4 * LONGEST :])
    if found is None:
        return None
    found = re.sub(r"^\s*[A-Za-z_]+\s*=\s*", "", found).strip()
    return found if 0 < len(found) <= LONGEST else None


def _last_braces(text: str) -> str | None:
    end = max(text.rfind("}"), text.rfind("]"))
    if end < 0:
        return None
    closing = text[end]
    opening, depth = ("{", 0) if closing == "}" else ("[", 0)
    for place in range(end, -1, -1):
        depth += (text[place] == closing) - (text[place] == opening)
        if depth == 0:
            return text[place : end + 1]
    return None


class AutoLogi(BenchTask):
    name = "autologi"

    def __init__(self, size: int = 4, check_seconds: float = 5.0) -> None:
        self._size = size
        self._limits = Limits(wall_seconds=check_seconds, cpu_seconds=max(1, round(check_seconds)))

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        prompt, code = field(row, name, ["prompt", "question"]), field(row, name, ["code"], Mapping)
        check, constraints = (field(code, name, [key]) for key in ("inputs_check_code", "constraint_list_code"))
        return Item(name, prompt, {"check": check, "constraints": constraints})

    def generated(self, split: Split) -> LogicItems:
        return LogicItems(self._size, split)

    def verdict(self, item: Item, text: str) -> float:
        answer = answer_in(text)
        if answer is None:
            return 0.0
        source = f"{item.data['check']}\n\n{item.data['constraints']}\n"
        return float(run_checks(source, [CHECK, CONSTRAINTS], answer, self._limits).accepted)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """Each check is a process of its own; a few run at once."""
        texts = [episode.messages[-1].text if episode.messages else "" for episode in episodes]
        with ThreadPoolExecutor(PROCESSES) as threads:
            return list(threads.map(self.verdict, map(item_of, episodes), texts))

    def answer(self, text: str) -> str | None:
        return answer_in(text)

    def message_correct(self, item: Item, message: Message) -> bool:
        return bool(self.verdict(item, message.text))
