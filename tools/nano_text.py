"""The text that the embedded base learns from (tools/make_nano_base.py): what teams of agents say, all of it generated.

An episode is a column addition, a short question or a free choice among options. Names, roles and system texts are drawn from
words, pieces of the tokenizer's vocabulary and random letters, so that which column is whose can only be read off the turns.
The authors are careless at known rates, as those of real text are: the base imitates their mistakes, and a team has something to
learn. Sums and questions are those of the tasks' training split, so that held-out items are new to the base too.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.generated.countdown import Countdown
from teamtr_lora.tasks.generated.small import GENERATORS, SmallTask
from teamtr_lora.tasks.machinery.task import Item

# How often an author errs in one message: forgets a carry that is due, misreads a digit from the neighbouring column, slips by
# one in the total, or gets the answer to a short question wrong.
CARELESS = {"forgets_carry": 0.22, "misreads_digit": 0.06, "slips_by_one": 0.10, "answers_wrong": 0.20}
SHARES = {"columns": 0.62, "question": 0.23, "choice": 0.15}
COLUMN_NAMES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions")
COLUMN_ROLES = ("the {}", "{} column", "adds the {}", "Add the {}.", "You add the {} digits.", "Your column: {}")
DIGITS_WEIGHTS = (6, 14, 38, 14, 8, 6, 6, 8)  # of sums with 1 to 8 digits
REFERENCE_NAMES = ("planner", "solver", "checker", "writer", "critic", "judge", "helper", "coder")
KNOWN_NAMES = (*REFERENCE_NAMES, "proposer", "reviewer", *(f"agent{i}" for i in range(1, 9)))
COLUMN_SYSTEMS = ("Add the numbers column by column.", "Work as a team.", "Each agent adds one column.")
WORD_QUESTIONS = ("Repeat the word {}.", "How many letters has {}?")
CHOICES = (
    "Pick one of {}.", "Pick one of {}", "Pick one: {}", "Choose one of {}.", "Choose one: {}", "Options: {}. Choose one.",
    "Choose one of the options: {}.", "Choose from {}.", "Which one: {}?", "Say one of {}.", "Select one.\n{}", "{}\nPick one.",
)  # fmt: skip
RANGES = ("Pick a digit from {} to {}.", "Choose a number from {} to {}.", "Say a number between {} and {}.")
CHOICE_RULES = (
    "Everybody must pick another one.", "All must pick the same.", "Do not pick what another has picked.", "Agree on one option.",
    "No two agents may say the same.", "You do not see what the others say.", "Answer with the option alone.",
)  # fmt: skip
WORDS = tuple(  # as text, since a list of them would be a page long
    """the a an and or of to in on with for by from as is are was be have has can must may will not no all any each every one two
    three four five some many most more less first second third last next other another same new old good right wrong true false
    you your we our they their it its this that who what which when where why how if then else so but because before after
    agent team work worker task problem answer question number numbers digit digits sum total column columns carry add adds adder
    count counts read reads write writes say says tell tells ask asks give gives take takes make makes find finds pick choose
    solve solves plan plans check checks review reviews help helps think thinks try tries keep keeps use uses know knows look
    careful short long small large big left right top end start step part whole word words letter letters list line name
    alice bob carol dave eve frank grace heidi ivan judy mallory oscar peggy trent victor walter anna ben clara david emma felix
    red green blue yellow orange black white pink north south east west cat dog bird fish lion tree river stone star moon sun
    apple pear plum bread milk tea house road city day night time year man woman child king queen doctor teacher student expert
    leader manager reviewer proposer builder tester editor reader speaker listener scout guard pilot driver player coach boss
    senior junior main alpha beta gamma delta node unit model bot actor worker hand mind voice chief guide friend math logic code
    please only just also never always again together alone careful quickly clearly exactly do does done say see go come
    let""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Scene:
    """One episode as it is told: who is there, what is asked, and what everybody says in turn."""

    roles: dict[str, str]
    system: str | None  # None: the chat template gets no system turn
    prompt: str
    said: list[tuple[str, str]]
    view: Literal["shared", "per_agent"]
    blind: bool = False  # a round's messages are heard when it is over
    feedback: list[str] = field(default_factory=list)  # what the environment answers to each message; empty: nothing


class Author:
    """Draws scenes. `pieces` are the vocabulary's texts that names may be put together from; without any (there is no vocabulary
    yet) nothing is spelled at random, so that no merges are spent on it. `usual` is the share of sums that are added by a team
    with the names, roles and system text of the quickstart."""

    def __init__(self, rng: random.Random, pieces: Sequence[str] = (), usual: float = 0.15) -> None:
        self._rng, self._pieces, self._usual = rng, [p for p in pieces if re.fullmatch("[a-z0-9_-]+", p)], usual

    def scene(self) -> Scene:
        kind = self._rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        return {"columns": self.columns, "question": self.question, "choice": self.choice}[kind]()

    # --- names and texts

    def name(self) -> str:
        """Any name that a recipe allows; a third of them are words."""
        rng, kind = self._rng, self._rng.random()
        if not self._pieces or kind < 0.25:
            made = rng.choice(WORDS)
            if rng.random() < 0.3:
                made += rng.choice(["", "_", "-"]) + rng.choice([rng.choice(WORDS), str(rng.randint(0, 99))])
        elif kind < 0.32:
            made = rng.choice(KNOWN_NAMES)
        elif kind < 0.75:
            made = "".join(rng.choices(self._pieces, k=rng.randint(1, 3)))
        else:
            made = "".join(rng.choices(string.ascii_lowercase + rng.choice(["", "0123456789_-"]), k=rng.randint(1, 10)))
        return re.sub("^[^a-z]+", "", made)[:32] or rng.choice(string.ascii_lowercase)

    def names(self, count: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.name()] = None
        return list(found)

    def text(self) -> str:
        """A few words, as a sentence or not; now and then with a number or a word that nobody knows."""
        rng = self._rng
        words = rng.choices(WORDS, k=rng.choice([1, 1, 2, 3, 4, 5, 6, 8, 12]))
        if self._pieces and rng.random() < 0.25:
            words[rng.randrange(len(words))] = rng.choice([str(rng.randint(0, 999)), self._letters(1, 9), self.name()])
        text = " ".join(words)
        return text if rng.random() < 0.5 else text[0].upper() + text[1:] + rng.choice([".", ".", ".", "!", ""])

    def _letters(self, low: int, high: int) -> str:
        return "".join(self._rng.choices(string.ascii_lowercase, k=self._rng.randint(low, high)))

    def _one_of(self, usual: str, share: float, *others: str) -> str:
        """`usual` that often; else nothing, one of the others, or any text."""
        return usual if self._rng.random() < share else self._rng.choice(["", *others, self.text(), self.text()])

    # --- sums

    def columns(self) -> Scene:
        """A sum by columns: mostly an agent for each, else fewer who take turns or more who begin again."""
        rng = self._rng
        digits = rng.choices(range(1, 9), weights=DIGITS_WEIGHTS)[0]
        prompt = ColumnSum(digits).items("train")[rng.randrange(2**40)].prompt
        first, second = map(int, prompt.split("+"))
        if digits > 1 and rng.random() < 0.06:
            second = rng.randrange(10 ** rng.randint(1, digits - 1))
            prompt = f"{first}+{second}"
        if rng.random() < self._usual:
            names = REFERENCE_NAMES[:digits]
            said = self._added(first, second, digits, names)
            return Scene(dict(zip(names, COLUMN_NAMES, strict=False)), "Add by columns.", prompt, said, view="shared")
        agents, turns = digits, digits
        if rng.random() < 0.15:
            agents = rng.randint(1, 4)
            turns = agents * rng.randint(1, max(1, 9 // agents))
        names = self.names(agents)
        speakers = [names[turn % agents] for turn in range(turns)]
        said = self._added(first, second, digits, speakers)
        per_agent = rng.random() < 0.25
        return Scene(
            roles=self._column_roles(names, digits),
            system=None if rng.random() < 0.05 else self._one_of("Add by columns.", 0.55, *COLUMN_SYSTEMS),
            prompt=prompt,
            said=said,
            view="per_agent" if per_agent else "shared",
            blind=per_agent and digits == 1 and rng.random() < 0.5,
            feedback=[rng.choice(["open", "closed", "click", "ok", self.text()]) for _ in said] if rng.random() < 0.06 else [],
        )

    def _added(self, first: int, second: int, digits: int, speakers: Sequence[str]) -> list[tuple[str, str]]:
        said, carry = [], 0
        for turn, name in enumerate(speakers):
            text, carry = self._column(first, second, turn % digits, carry if turn % digits else 0)
            said.append((name, text))
        return said

    def _column(self, first: int, second: int, column: int, carry: int) -> tuple[str, int]:
        """One agent's message for a column as a fallible author puts it, and the carry a reader takes from it."""
        rng = self._rng
        misread = column + rng.choice([-1, 1]) if rng.random() < CARELESS["misreads_digit"] else column
        x, y = first // 10 ** max(misread, 0) % 10, second // 10**column % 10
        c = 0 if carry and rng.random() < CARELESS["forgets_carry"] else carry
        total = x + y + c
        if rng.random() < CARELESS["slips_by_one"]:
            total = max(0, total + rng.choice([-1, 1]))
        return f"{x}+{y}+{c}={total}", total // 10

    def _column_roles(self, names: list[str], digits: int) -> dict[str, str]:
        rng, kind = self._rng, self._rng.random()
        columns = list(COLUMN_NAMES[:digits]) if len(names) == digits else ["; ".join(COLUMN_NAMES[:digits])] * len(names)
        if kind < 0.45:
            return dict(zip(names, columns, strict=True))
        if kind < 0.55:
            form = rng.choice(COLUMN_ROLES)
            return {name: form.format(column) for name, column in zip(names, columns, strict=True)}
        if kind < 0.70:
            return dict.fromkeys(names, "")
        return {name: self._one_of(column, 0.15) for name, column in zip(names, columns, strict=True)}

    # --- short questions and free choices

    def question(self) -> Scene:
        """A question to one agent or to several, each of whom answers it."""
        prompt, answer = self._asked()
        return self._asked_of_all("Answer with one word.", "answers", prompt, lambda: self._answered(answer))

    def choice(self) -> Scene:
        """Options to choose from. Everybody chooses at random, whatever the others have said."""
        rng = self._rng
        options = self._options()
        asked = rng.choice(CHOICES).format(rng.choice([" ", ", ", ", ", " or ", " / ", "\n"]).join(options))
        if rng.random() < 0.15:
            low = rng.randint(0, 5)
            high = rng.randint(low + 1, 9)
            options, asked = [str(digit) for digit in range(low, high + 1)], rng.choice(RANGES).format(low, high)
        if rng.random() < 0.4:
            around = rng.choice([*CHOICE_RULES, *CHOICE_RULES, self.text()])
            asked = rng.choice(["{1} {0}", "{0} {1}", "{1}\n{0}", "{0}\n{1}"]).format(asked, around)
        return self._asked_of_all("Answer with one word.", "answers", asked, lambda: rng.choice(options))

    def _asked_of_all(self, system: str, role: str, prompt: str, says: Callable[[], str]) -> Scene:
        rng = self._rng
        names = self.names(rng.choices([1, 2, 3, 4, 5, 6], weights=[4, 3, 4, 1, 1, 1])[0])
        same_role = rng.choice(["", role, self.text(), None])
        per_agent = rng.random() < 0.5
        return Scene(
            roles={name: self._one_of("", 0.2) if same_role is None else same_role for name in names},
            system=None if rng.random() < 0.1 else self._one_of(system, 0.3),
            prompt=prompt,
            said=[(name, says()) for _ in range(rng.choice([1, 1, 1, 2])) for name in names],
            view="per_agent" if per_agent else "shared",
            blind=per_agent and rng.random() < 0.4,
        )

    def _asked(self) -> tuple[str, str]:
        """One of the generated tasks with some of its examples, or a question in words."""
        rng = self._rng
        kind = rng.choice([*GENERATORS, "countdown", "plus", "times", "largest in words", "word", "word"])
        if kind == "letter_count" and not self._pieces:
            return "How many in:", "0"
        a, b, position = rng.randint(0, 9), rng.randint(0, 9), rng.randrange(2**40)
        if kind == "plus":
            return f"What is {a} plus {b}?", str(a + b)
        if kind == "times":
            return f"What is {a} times {b}?", str(a * b)
        if kind == "largest in words":
            numbers = [rng.randint(0, 99) for _ in range(4)]
            return f"Which is the largest: {', '.join(map(str, numbers))}?", str(max(numbers))
        if kind == "word":
            word = "".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) if self._pieces else rng.choice(WORDS)
            asked = rng.choice(WORD_QUESTIONS)
            return asked.format(word), word if asked == WORD_QUESTIONS[0] else str(len(word))
        shots = rng.choice([0, 1, 2, 4, 4])
        if kind == "countdown":
            item: Item = Countdown(2, min(shots, 2)).items("train")[position]
            return item.prompt, item.data["solution"]
        item = SmallTask(kind, shots).items("train")[position]
        return item.prompt, item.data["answer"]

    def _answered(self, right: str) -> str:
        rng = self._rng
        if rng.random() >= CARELESS["answers_wrong"]:
            return right
        if right.isdigit():
            return str(max(0, int(right) + rng.choice([-10, -2, -1, 1, 2, 10])))
        return re.sub(r"[-+*]", lambda _: rng.choice("+-*"), right)

    def _options(self) -> list[str]:
        rng, count = self._rng, self._rng.randint(2, 8)
        kind = rng.choice(["letters", "digits", "words", "numbers", "spelled"] if self._pieces else ["words"])
        if kind == "letters":
            letters = rng.choice([string.ascii_uppercase, string.ascii_lowercase])
            start = rng.choice([0, 0, rng.randrange(26 - count)])
            return rng.choice([list(letters[start : start + count]), rng.sample(letters, count)])
        if kind == "digits":
            start = rng.choice([0, 1])
            return rng.choice([[str(digit) for digit in range(start, start + count)], rng.sample(string.digits, count)])
        if kind == "words":
            return rng.sample(sorted(set(WORDS)), count)
        if kind == "numbers":
            return [str(number) for number in rng.sample(range(10, 100), count)]
        return list(dict.fromkeys(self._letters(1, 5) for _ in range(count)))
