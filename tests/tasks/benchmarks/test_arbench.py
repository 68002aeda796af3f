"""Detective cases and situation puzzles: turns, who is asked what, how answers are read, AR-Bench's own items."""

import string
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.arbench import NOT_A_QUESTION, DetectiveTask, SituationTask, choice_in, f1, question_in, ruling
from teamtr_lora.tasks.machinery.responder import Scripted, Silent, Turn
from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.team import Episode

Played = Callable[[Task, Item, Sequence[str]], Episode]
NAMES = ["Ann Lee", "Dr. Bo Ray", "Cy", "Dee Cyan", "Ed"]
CASE = {
    "id": 1,
    "initial_information": {
        "time": "Evening",
        "location": "Library",
        "victim": {"name": "Max", "introduction": "rich", "cause_of_death": "fall", "murder_weapon": "stairs"},
        "suspect": [{"name": name, "introduction": f"{name} is here"} for name in NAMES],
    },
    "suspects": [{"name": name, "task": f"task {name}", "story": f"story {name}", "key_question": []} for name in NAMES[::-1]],
    "label": 2,
}
PUZZLE = {"id": 1, "surface": "A man drinks and dies. Why?", "bottom": "It was poison, and he knew it."}


def case(task: DetectiveTask) -> Item:
    return task.row_item(CASE, "1")


def test_each_suspect_has_a_role_and_a_memory_of_its_own(played: Played) -> None:
    seen: list[list[Turn]] = []

    def suspect(turns: Sequence[Turn]) -> str:
        seen.append([dict(turn) for turn in turns])
        return f"reply {len(seen)}"

    task = DetectiveTask(Scripted(suspect))
    said = [
        "Suspect: Ann Lee\nQuestion: Where were you?",
        "**Suspect:** Ed\n**Question:** And you?",
        "Question for Ann Lee: With whom?",
        "Reason: it fits.\nAnswer: C",
    ]
    game = played(task, case(task), said)
    assert task.score([game]) == [1.0] and game.ended == "task"
    assert [str(text).splitlines() for text in game.feedback[:3]] == [
        ["Ann Lee: reply 1", "Turn 2:"],
        ["Ed: reply 2", "Turn 3:"],
        ["Ann Lee: reply 3", "Turn 4:"],
    ]
    assert [turn["content"] for turn in seen[2][1:]] == ["Where were you?", "reply 1", "With whom?"]
    assert [turn["role"] for turn in seen[2]] == ["system", "user", "assistant", "user"]
    assert "task Ann Lee" in seen[0][0]["content"] and "story Ann Lee" in seen[0][0]["content"] and len(seen[1]) == 2
    assert not any(name in seen[0][0]["content"] for name in NAMES[1:])
    assert "story" not in game.prompt and "C. Cy" in game.prompt and "Max" in game.prompt


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Suspect: Ann Lee\nQuestion: Why?", ("Ann Lee", "Why?")),
        ("suspect: [ann lee]\nquestion: [Why?]", ("Ann Lee", "Why?")),
        ("I think of Ed.\nSuspect: Dr. Bo Ray\nQuestion: Did Ed see you?", ("Dr. Bo Ray", "Did Ed see you?")),
        ("Ann Lee: Why?", ("Ann Lee", "Why?")),
        ("Question to Dr. Bo Ray: Why?", ("Dr. Bo Ray", "Why?")),
        ("Ed, were you there?", ("Ed", "Ed, were you there?")),
        ("Suspect: Dee Cyan\nWhy?", ("Dee Cyan", "Why?")),
        ("Suspect: Dee Cyan\nQuestion: Cy?", ("Dee Cyan", "Cy?")),
        ("Suspect: nobody\nQuestion: Why?", None),
        ("Suspect: Ann Lee and Ed\nQuestion: Why?", None),
        ("Suspect: Ann Lee\nQuestion:", None),
        ("Were Ann Lee and Ed there?", None),
        ("Ed did it.", None),
        ("", None),
    ],
)
def test_whom_a_message_asks(text: str, asked: tuple[str, str] | None) -> None:
    assert question_in(text, NAMES) == asked


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("Answer: C", 2),
        ("Reason: A or B.\nAnswer: [E]", 4),
        ("Answer:\nB", 1),
        ("Answer: A\nAnswer: B", 0),  # the first line counts
        ("Answer: A, no: B", 1),  # and the last letter on it
        ("Answer: Ann Lee", 0),
        ("Answer: A. Bob Eames", 0),  # where a letter stands alone, a name's is none
        ("**Answer**: B", 1),
        ("**Answer:** (D)", 3),
        ("answer: C", None),
        ("C", None),
        ("Answer: none", None),
        ("Answer: c", None),
    ],
)
def test_the_official_reading_of_an_answer(text: str, choice: int | None) -> None:
    assert choice_in(text) == choice


def test_there_are_so_many_turns_and_one_answer(played: Played) -> None:
    task = DetectiveTask(Scripted(lambda turns: "no"), turns=3, answer_early=False)
    ask = "Suspect: Ed\nQuestion: Why?"
    early = played(task, case(task), ["Answer: C", ask, "hm", "Answer: C", "Answer: A"])
    assert early.ended == "task" and len(early.messages) == 4 and task.score([early]) == [1.0]
    assert "the turn is lost" in str(early.feedback[0]) and str(early.feedback[1]).startswith("Ed: no\nTurn 3:")
    assert "A. Ann Lee, B. Dr. Bo Ray, C. Cy" in str(early.feedback[2]) and "[A, B, C, D or E]" in str(early.feedback[2])
    assert task.score([played(task, case(task), [ask] * 4), played(task, case(task), [])]) == [0.0, 0.0]
    eager = DetectiveTask(Scripted(lambda turns: "no"), turns=3)
    assert len(played(eager, case(eager), ["Answer: C", ask]).messages) == 1
    assert len(played(eager, case(eager), [ask + "\nAnswer: C", "Answer: C"]).messages) == 2, "a question is no answer yet"


def test_the_referee_knows_the_story_and_says_one_word(played: Played) -> None:
    seen: list[list[Turn]] = []

    def referee(turns: Sequence[Turn]) -> str:
        seen.append([dict(turn) for turn in turns])
        return ["Yes.", "no, because it was poison, and he knew it", "The bottom is: It was poison", "This is not a question"][
            len(seen) - 1
        ]

    task = SituationTask(Scripted(referee), turns=5)
    game = played(task, task.row_item(PUZZLE, "1"), ["Q: Was it poison?", "Q: x?", "Q: y?", "tell me", "", "It was poison"])
    rulings = [str(text).splitlines()[0] for text in game.feedback[:5]]
    assert rulings == ["Yes", "No", "Unknown", NOT_A_QUESTION, NOT_A_QUESTION]
    assert "poison" not in " ".join(map(str, game.feedback)), "the referee cannot tell the story"
    assert len(seen) == 4 and all(len(turns) == 2 for turns in seen), "every question is judged anew"
    assert PUZZLE["bottom"] in seen[0][0]["content"] and seen[0][1]["content"] == "Q: Was it poison?"
    assert "Tell the whole story" in str(game.feedback[4]) and str(game.feedback[0]).endswith("Turn 2:")
    assert game.ended == "task" and str(PUZZLE["bottom"]) not in game.prompt


@pytest.mark.parametrize(("reply", "word"), [("", "Unknown"), ("**Yes**", "Yes"), ("NO", "No"), ("Nobody knows", "Unknown")])
def test_a_referee_that_says_something_else(reply: str, word: str) -> None:
    assert ruling(reply) == word


def test_stories_are_scored_by_both_f1s(played: Played) -> None:
    told = "A: It was poison"
    words, true = told.split(), str(PUZZLE["bottom"]).split()
    common = sum(min(words.count(w), true.count(w)) for w in set(words))
    assert common == 2  # "poison," is another word
    expected = 2 * (common / 4) * (common / 7) / (common / 4 + common / 7)
    for reward in ("characters", "words"):
        task = SituationTask(Silent(), reward=reward)  # type: ignore[arg-type]
        item = task.row_item(PUZZLE, "1")
        game, exact, none = (played(task, item, [text]) for text in (told, str(PUZZLE["bottom"]), ""))
        measured = task.measures(game)
        assert measured["words"] == pytest.approx(expected) and task.score([game]) == [measured[reward]]
        assert task.score([exact, none]) == [1.0, 0.0]


@given(st.text(max_size=60), st.text(max_size=60))
def test_f1_counts_each_character_as_often_as_both_have_it(said: str, true: str) -> None:
    left = list(true)
    common = sum(1 for ch in said if ch in left and left.remove(ch) is None)  # type: ignore[func-returns-value]
    assert f1(said, true) == pytest.approx(2 * common / (len(said) + len(true)) if common else 0.0)
    assert f1(said, said) == (1.0 if said else 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 5}, "item 1: label = 5"),
        ({"label": None}, "label is null"),
        ({"suspects": [{"name": "Ann Lee", "task": "", "story": ""}]}, "do not go together"),
        ({"suspects": [{"name": "Ann Lee"}]}, "not as in AR-Bench"),
        ({"initial_information": {"suspect": [1]}}, "not as in AR-Bench"),
        ({"initial_information": {}}, "has no initial_information|not as in AR-Bench"),
    ],
)
def test_odd_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DetectiveTask(Silent()).row_item({**CASE, **change}, "1")


def test_nobody_to_talk_to_is_a_mistake() -> None:
    for task in (DetectiveTask(Silent()), SituationTask(Silent())):
        with pytest.raises(UserError, match=f"task.responder: {task.name} is a conversation.*set task.responder.url"):
            task.check_agents(["a"], 3)
    DetectiveTask(Scripted(lambda turns: "")).check_agents(["a"], 3)


@given(
    st.lists(st.text() | st.text(alphabet=string.ascii_letters + ":?\n *[]"), max_size=4),
    st.text() | st.sampled_from(["\x00", "x" * 10_000, "{}", "{name}", "\ud800"]),
)
def test_no_text_crashes_them(played: Played, said: list[str], reply: str) -> None:
    """Neither the team's nor the responder's."""
    for task, row in ((DetectiveTask(Scripted(lambda _: reply)), CASE), (SituationTask(Scripted(lambda _: reply)), PUZZLE)):
        game = played(task, task.row_item(row, "1"), ["Suspect: Ed\nQuestion: Why?", *said])
        assert 0.0 <= task.score([game])[0] <= 1.0
        assert all(text is None or text.encode() is not None for text in game.feedback)


@pytest.mark.parametrize("part", ["Suspect: ", "Answer: ", "Question", "Ed ", "\n", "*"])
def test_a_megabyte_is_read(played: Played, part: str) -> None:
    text = part * (10**6 // len(part))
    for task, row in ((DetectiveTask(Silent()), CASE), (SituationTask(Silent()), PUZZLE)):
        assert 0.0 <= task.score([played(task, task.row_item(row, "1"), [text, text])])[0] < 1.0


def test_every_case_is_solved_by_its_own_letter_only(bench: Any, played: Played) -> None:
    task = DetectiveTask(Silent())
    for row in bench("arbench/dc_test"):
        item = task.row_item(row, str(row["id"]))
        listed = [suspect["name"] for suspect in row["initial_information"]["suspect"]]
        murderer = next(s["name"] for s in row["suspects"] if s["is_murderer"])
        for letter, name in zip("ABCDE", listed, strict=True):
            game = played(task, item, [f"Suspect: {name}\nQuestion: Was it you?", f"Reason: so.\nAnswer: {letter}"])
            assert task.score([game]) == [float(name == murderer)] and f"{letter}. {name}" in item.prompt
            assert str(game.feedback[0]).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["arbench/sp_test", "arbench/sp_train"])
def test_every_story_scores_one_and_others_less(bench: Any, played: Played, name: str) -> None:
    task, rows = SituationTask(Silent(), reward="words"), bench(name)
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        item = task.row_item(row, str(row["id"]))
        told = [row["bottom"], row["bottom"].rsplit(" ", 1)[0], other["bottom"], "qqq zzz"]
        scores = task.score([played(task, item, [text]) for text in told])
        assert scores[0] == 1.0 and 0.9 < scores[1] < 1.0 and scores[2] < 0.8 and scores[3] == 0.0
        assert task.measures(played(task, item, [row["bottom"]])) == {"characters": 1.0, "words": 1.0}
