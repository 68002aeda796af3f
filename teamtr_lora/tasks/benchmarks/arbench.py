"""arbench_dc, arbench_sp: find the murderer by questioning suspects, find the story behind a situation by yes-or-no questions.

As in AR-Bench: 25 turns and then one answer; suspects and referee are played by the responder. A message is a turn: where the
official code asks for a suspect and then for a question, a message here says both. With `answer_early`, a message that gives the
final answer ends the episode at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery.bench import field
from teamtr_lora.tasks.machinery.forms import Form
from teamtr_lora.tasks.machinery.responder import ConversationSettings, ConversationTask, Responder, Turn, build_responder, tidy
from teamtr_lora.tasks.machinery.task import Feedback, Interaction, Item, item_of
from teamtr_lora.team import Episode, Message

LETTERS = "ABCDE"
LONGEST_QUESTION = 2000  # characters of a question that the responder is given
LONGEST_READ = 20_000  # characters of a message in which a question is looked for
F1 = Literal["characters", "words"]
VICTIM = ("name", "introduction", "cause_of_death", "murder_weapon")

DETECTIVE = """You are a detective who must find the murderer in this case by questioning the suspects. There are {turns} turns;
in each you name one suspect and ask them one single question, in this format:
Suspect: [the whole name]
Question: [your question]
{ending}

The case:
{case}"""
WHEN_DONE = "After the last turn you are asked who the murderer is."
WHEN_SURE = "After the last turn, or as soon as you are sure, say who the murderer is, in this format:\n{format}"
ANSWER_FORMAT = "Reason: [your inference, step by step]\nAnswer: [{letters}]"
NO_QUESTION = (
    "That was no question to one suspect in the format Suspect: [the whole name], Question: [your question]; the turn is lost."
)
WHO = "All turns are over. Who is most likely the murderer: {choices}? Answer in this format:\n" + ANSWER_FORMAT
SUSPECT = """You play a suspect who is questioned by a detective. Answer each question in one sentence, as your task and your
story tell you.

Your name: {name}
Your task: {task}
Your story: {story}"""

PUZZLE = """This is a situation puzzle: behind what you read there is a story that you must find. There are {turns} turns; in
each you ask me one yes-or-no question, which I answer with Yes, No or Unknown, in this format:
Q: [your question]
{ending}

The puzzle: {surface}"""
STORY_WHEN_DONE = "After the last turn you are asked for the story; do not tell it before."
STORY_WHEN_SURE = "After the last turn, or as soon as you are sure, tell the whole story, in this format:\nA: [your answer]"
TELL = "All turns are over. Tell the whole story behind the puzzle, in this format:\nA: [your answer]"
REFEREE = """You are the referee of a situation puzzle. Players know the surface only; you know the bottom, the whole story.
Judge each question by both, and answer with one of these and nothing else:
Yes: it agrees with the story.
No: it contradicts the story.
Unknown: it can neither be found in the story nor be inferred from it.
This is not a question: the player asks for the solution, or asks no yes-or-no question about the puzzle.

Surface: {surface}

Bottom: {bottom}"""
NOT_A_QUESTION = "This is not a question, please propose your next question."


def choice_in(text: str) -> int | None:
    """The index of the suspect that a final message accuses; the official rule: the last of A to E on the first Answer: line.

    One that stands alone goes before the first letters of a name that is given beside it.
    """
    line = re.search(r"Answer[*]*:[\s*]*(.*)", text)
    letters = (re.findall(rf"\b[{LETTERS}]\b", line[1]) or re.findall(f"[{LETTERS}]", line[1])) if line else []
    return LETTERS.index(letters[-1]) if letters else None


def question_in(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """The suspect and the question of a message; None where it does not name exactly one suspect, or asks nothing."""
    text = text[:LONGEST_READ]
    line = re.search(r"suspect[ \t*]*:(.*)", text, re.IGNORECASE)
    opening = re.match(r"[\W_]{0,20}(?:question\s+(?:for|to)\s+)?([^:\n]{1,100}):", text, re.IGNORECASE)
    anywhere = text if line is None and "?" in text else ""
    for part in (line[1] if line else "", opening[1] if opening else "", anywhere):
        named = [name for name in names if name.casefold() in part.casefold()]
        # of two names where one is a part of the other, the longer one was meant
        named = [name for name in named if not any(name != other and name.casefold() in other.casefold() for other in named)]
        if len(named) == 1:
            break
    else:
        return None
    asked = re.search(r"question[^:\n]{0,100}:(.*)", text, re.IGNORECASE | re.DOTALL)
    rest = asked[1] if asked else text[line.end() :] if line else text[opening.end() :] if opening else text
    question = tidy(rest, LONGEST_QUESTION).strip("*[] \n")
    return (named[0], question) if question else None


def f1(said: Sequence[str], true: Sequence[str]) -> float:
    """AR-Bench's: of the multisets, without any normalisation."""
    common = (Counter(said) & Counter(true)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(true)
    return 2 * precision * recall / (precision + recall)


class ArBenchTask(ConversationTask):
    def __init__(self, responder: Responder, turns: int = 25, answer_early: bool = True) -> None:
        super().__init__(responder)
        self.turns, self.answer_early = turns, answer_early

    def last_text(self, episode: Episode) -> str:
        """What counts as the final answer: the last message, and nothing after the turns and the one answer."""
        said = episode.messages[: self.turns + 1]
        return said[-1].text if said else ""

    def score(self, episodes: Any) -> list[float]:
        return [self.verdict(item_of(episode), self.last_text(episode)) for episode in episodes]


class Suspect(Form):
    name: str
    task: str
    story: str


class DetectiveData(Form):
    label: int
    names: Annotated[list[str], Field(min_length=1, max_length=len(LETTERS))]
    cast: dict[str, Suspect]
    letters: str

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if not 0 <= self.label < len(self.names) or set(self.cast) != set(self.names):
            raise ValueError("label, names and cast do not go together")
        return self


class DetectiveTask(ArBenchTask):
    name = "arbench_dc"
    data_form = DetectiveData

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        known, label = field(row, name, ["initial_information"], dict), field(row, name, ["label"], int)
        listed, players = known.get("suspect"), field(row, name, ["suspects"], list)
        try:
            names = [str(suspect["name"]) for suspect in listed]
            cast = {str(p["name"]): {key: str(p[key]) for key in ("name", "task", "story")} for p in players}
            case = _case(known)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"item {name}: initial_information or suspects is not as in AR-Bench ({error!r})") from error
        if not 0 <= label < len(names) <= len(LETTERS) or set(cast) != set(names):
            raise UserError(f"item {name}: label = {label} and its suspects do not go together; AR-Bench has five, from 0 to 4")
        letters = f"{', '.join(LETTERS[: len(names) - 1])} or {LETTERS[len(names) - 1]}"
        ending = WHEN_SURE.format(format=ANSWER_FORMAT.format(letters=letters)) if self.answer_early else WHEN_DONE
        choices = _choices(names)
        prompt = DETECTIVE.format(turns=self.turns, ending=ending, case=f"{case}\n\nThe suspects by letter: {choices}")
        return Item(name, f"{prompt}\n\nTurn 1:", {"label": label, "names": names, "cast": cast, "letters": letters})

    def text(self, item: Item) -> str:
        return item.prompt.partition("The case:")[2]

    def open(self, item: Item) -> Interrogation:
        return Interrogation(item, self)

    def verdict(self, item: Item, text: str) -> float:
        return float(choice_in(text) == item.data["label"])

    def answer(self, text: str) -> str | None:
        choice = choice_in(text)
        return None if choice is None else LETTERS[choice]

    def message_correct(self, item: Item, message: Message) -> bool | None:
        choice = choice_in(message.text)
        return None if choice is None else choice == item.data["label"]


class Interrogation(Interaction):
    """Every suspect remembers what they were asked and said, and nothing of the others."""

    def __init__(self, item: Item, task: DetectiveTask) -> None:
        super().__init__(item)
        self._task, self._played = task, 0
        self._memory: dict[str, list[Turn]] = {
            name: [{"role": "system", "content": SUSPECT.format(**part)}] for name, part in item.data["cast"].items()
        }

    def feed(self, message: Message) -> Feedback | Future[Feedback]:
        self._played += 1
        task, text = self._task, message.text
        answers = choice_in(text) is not None and not re.search(r"question[ \t*]*:", text[:LONGEST_READ], re.IGNORECASE)
        if self._played > task.turns or (task.answer_early and answers):
            return Feedback(done=True)
        asked = question_in(text, self.item.data["names"])
        if asked is None:
            return Feedback(f"{NO_QUESTION}\n{self._next()}")
        name, question = asked
        memory = self._memory[name]
        memory.append({"role": "user", "content": question})

        def answered(reply: str) -> Feedback:
            reply = reply or "..."
            memory.append({"role": "assistant", "content": reply})
            return Feedback(f"{name}: {reply}\n{self._next()}")

        return task.responder.ask(memory, answered)

    def _next(self) -> str:
        if self._played < self._task.turns:
            return f"Turn {self._played + 1}:"
        return WHO.format(choices=_choices(self.item.data["names"]), letters=self.item.data["letters"])


class SituationData(Form):
    surface: str
    bottom: str


class SituationTask(ArBenchTask):
    name = "arbench_sp"
    data_form = SituationData

    def __init__(self, responder: Responder, turns: int = 25, answer_early: bool = True, reward: F1 = "characters") -> None:
        super().__init__(responder, turns, answer_early)
        self._reward = reward

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        surface, bottom = (field(row, name, [key]) for key in ("surface", "bottom"))
        ending = STORY_WHEN_SURE if self.answer_early else STORY_WHEN_DONE
        prompt = PUZZLE.format(turns=self.turns, ending=ending, surface=surface)
        return Item(name, f"{prompt}\n\nTurn 1:", {"surface": surface, "bottom": bottom})

    def text(self, item: Item) -> str:
        return str(item.data["surface"])

    def open(self, item: Item) -> Situation:
        return Situation(item, self)

    def f1s(self, item: Item, text: str) -> dict[str, float]:
        bottom = item.data["bottom"]
        return {"characters": f1(text, bottom), "words": f1(text.split(), bottom.split())}

    def verdict(self, item: Item, text: str) -> float:
        return self.f1s(item, text)[self._reward]

    def measures(self, episode: Episode) -> dict[str, float]:
        return self.f1s(item_of(episode), self.last_text(episode))


class Situation(Interaction):
    """The referee judges every question anew, as in the official code."""

    def __init__(self, item: Item, task: SituationTask) -> None:
        super().__init__(item)
        self._task, self._played = task, 0

    def feed(self, message: Message) -> Feedback | Future[Feedback]:
        self._played += 1
        text = message.text[:LONGEST_READ]
        if self._played > self._task.turns or (self._task.answer_early and re.match(r"[\s*]*(A|Answer)[*]*:", text)):
            return Feedback(done=True)
        question = tidy(text, LONGEST_QUESTION)
        if not question:
            return self._answered(NOT_A_QUESTION)
        referee = {"role": "system", "content": REFEREE.format(**self.item.data)}
        return self._task.responder.ask([referee, {"role": "user", "content": question}], self._answered)

    def _answered(self, reply: str) -> Feedback:
        last = self._played == self._task.turns
        return Feedback(f"{ruling(reply)}\n{TELL if last else f'Turn {self._played + 1}:'}")


def ruling(reply: str) -> str:
    """The referee's word. Whatever else it says is dropped: a talkative one would tell the story."""
    word = re.match(r"\W*(yes|no|unknown)\b", reply, re.IGNORECASE)
    if word:
        return word[1].capitalize()
    return NOT_A_QUESTION if "not a question" in reply.lower() else "Unknown"


def _choices(names: Sequence[str]) -> str:
    return ", ".join(f"{letter}. {name}" for letter, name in zip(LETTERS, names, strict=False))


def _case(known: Mapping[str, Any]) -> str:
    victim = known["victim"]
    lines = [
        f"time: {known['time']}",
        f"location: {known['location']}",
        *(f"victim's {key.replace('_', ' ')}: {victim[key]}" for key in VICTIM),
        "suspects, one of whom is the murderer:",
        *(f"- {suspect['name']}: {suspect['introduction']}" for suspect in known["suspect"]),
    ]
    return "\n".join(lines)


class ArBenchSettings(ConversationSettings):
    paper_samples: ClassVar[Mapping[str, int]] = {"arbench_dc": 25, "arbench_sp": 25}
    turns: int = Field(default=25, ge=1, description="Questions; one answer follows. A message is a turn.")
    answer_early: bool = Field(
        default=True, description="An answer before the last turn ends the episode; false plays all turns, as AR-Bench does."
    )


class DetectiveSettings(ArBenchSettings):
    """Find the murderer by questioning suspects, whom the responder plays; AR-Bench's detective cases, scored by index."""

    name: Literal["arbench_dc"] = Field(description="Rows need initial_information, suspects and label. A message is a turn.")

    def make(self, folder: Path) -> DetectiveTask:
        return DetectiveTask(build_responder(self.responder, folder), self.turns, self.answer_early)


class SituationSettings(ArBenchSettings):
    """Find the story behind a situation by yes-or-no questions to a referee, the responder; AR-Bench's situation puzzles."""

    name: Literal["arbench_sp"] = Field(description="Rows need surface and bottom. A message is a turn.")
    reward: Literal["characters", "words"] = Field(
        default="characters", description="F1 of the story told and the true one, over characters or over words."
    )

    def make(self, folder: Path) -> SituationTask:
        return SituationTask(build_responder(self.responder, folder), self.turns, self.answer_early, self.reward)
