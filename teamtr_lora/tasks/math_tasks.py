"""gsm8k, math500, aime24, aime25, dapo_math: one answer, in a box or after the benchmark's own marker.

Plain numbers and equal texts are decided here; everything else by math-verify in other processes. Text outside a box or marker is
never looked at: a symbolic parser finds an answer in almost any prose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from teamtr_lora.tasks import math_answer
from teamtr_lora.tasks.bench import BenchTask, field
from teamtr_lora.tasks.math_pool import shared_pool
from teamtr_lora.tasks.task import Item, item_of
from teamtr_lora.team import Episode, Message

READERS: dict[str, tuple[math_answer.Reader, ...]] = {
    "gsm8k": (math_answer.last_box, math_answer.last_hashes),
    "math500": (math_answer.last_box,),
    "aime24": (math_answer.last_box,),
    "aime25": (math_answer.last_box,),
    "dapo_math": (math_answer.last_box, math_answer.last_answer_line),
}
INSTRUCTIONS = {
    "gsm8k": "Reason step by step, then put the final number in \\boxed{}.",
    "math500": "Reason step by step, then put the final answer in \\boxed{}.",
    "aime24": "Reason step by step, then put the final answer, an integer from 0 to 999, in \\boxed{}.",
    "aime25": "Reason step by step, then put the final answer, an integer from 0 to 999, in \\boxed{}.",
    "dapo_math": "Reason step by step. The last line of your response should be of the form Answer: $Answer.",
}
PROBLEM = ("problem", "question", "prompt")
ANSWER = ("answer", "ground_truth", "solution")


class MathTask(BenchTask):
    def __init__(self, name: str, instruction: str | None = None, answer_seconds: float = 3.0) -> None:
        self.name = name
        self._instruction = INSTRUCTIONS[name] if instruction is None else instruction
        self._pool = shared_pool(answer_seconds)

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        problem = field(row, name, PROBLEM, (str, list))
        if not isinstance(problem, str):  # DAPO's own file: a conversation that carries its instruction
            problem = "\n\n".join(str(turn.get("content", "")) for turn in problem if isinstance(turn, Mapping))
        gold = str(field({**row, **_reward_model(row)}, name, ANSWER, (str, int, float)))
        if "####" in gold and (marked := math_answer.last_hashes(gold)):
            gold = marked[1]
        prompt = f"{problem}\n\n{self._instruction}" if self._instruction else problem
        return Item(name, prompt, {"problem": problem, "answer": gold})

    def lost_answer(self, row: Mapping[str, Any]) -> bool:
        found = [value for key, value in {**row, **_reward_model(row)}.items() if str(key).lower() in ANSWER]
        return bool(found) and all(value is None or value == "" for value in found)

    def answer(self, text: str) -> str | None:
        return math_answer.stated(text, READERS[self.name])

    def vote(self, episode: Episode) -> str | None:
        stated = super().vote(episode)
        return None if stated is None else math_answer.canonical(stated)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        """All at once, so that the slow comparisons share the pool."""
        texts = [episode.messages[-1].text if episode.messages else "" for episode in episodes]
        golds = [str(item_of(episode).data["answer"]) for episode in episodes]
        return [float(right) for right in self._right(golds, texts)]

    def _right(self, golds: Sequence[str], texts: Sequence[str]) -> list[bool]:
        answers = [self.answer(text) for text in texts]
        if self.name.startswith("aime"):  # integers, and nothing that algebra could make of something else
            return [
                a is not None and math_answer.integer(a) == math_answer.integer(g) for g, a in zip(golds, answers, strict=True)
            ]
        verdicts = [False if a is None else math_answer.quick(g, a) for g, a in zip(golds, answers, strict=True)]
        open_pairs = [(i, (golds[i], answer)) for i, answer in enumerate(answers) if answer is not None and verdicts[i] is None]
        decided = self._pool.equal([pair for _, pair in open_pairs])
        for (i, _), verdict in zip(open_pairs, decided, strict=True):
            verdicts[i] = verdict
        return [bool(verdict) for verdict in verdicts]

    def message_correct(self, item: Item, message: Message) -> bool:
        return self._right([str(item.data["answer"])], [message.text])[0]


def _reward_model(row: Mapping[str, Any]) -> dict[str, Any]:
    """verl's layout keeps the answer one level down."""
    inner = row.get("reward_model")
    return {"ground_truth": inner.get("ground_truth")} if isinstance(inner, Mapping) else {}
