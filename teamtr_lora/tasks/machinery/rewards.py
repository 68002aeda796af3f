"""Reward functions with TRL's signature, over whole batches of finished episodes, and what happens when one misbehaves."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from teamtr_lora.common.code_paths import raised, user_code
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.program import in_a_recipe
from teamtr_lora.tasks.machinery.task import item_of, settled
from teamtr_lora.team import Episode

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
Form = Callable[[dict[str, Any]], dict[str, Any]]  # columns of a batch as a function wants to read them
LARGEST = 1e100  # sums of squares of larger ones are infinite

# What TRL also passes; a run's own log is metrics.jsonl, so these take what they are given and keep nothing.
TRL_EXTRAS: dict[str, Any] = {"trainer_state": None, "log_extra": lambda *_, **__: None, "log_metric": lambda *_, **__: None}
OURS = frozenset({"prompt", "prompts", "completions", "completion_ids", "messages", "episodes", *TRL_EXTRAS})


class RewardError(UserError):
    """A reward function raised, returned a wrong length, or returned something that is no finite number."""


class Rewards:
    """Sums reward functions `f(prompts, completions, completion_ids, **columns) -> list[float | None]` (None: no opinion).

    As in TRL, a string prompt gives string completions (the message that is the team's answer) and a conversational one gives
    lists of messages. A function that cannot read them so is called with the other form, once it has raised on the first batch:
    it works as it is, whatever the dataset's prompts are. `messages` holds the whole transcript as it was spoken, `episodes` the
    Episode objects, for rewards that look at the team.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        on_error: Literal["stop", "zero"] = "stop",
        written: Callable[..., str] = in_a_recipe,
    ) -> None:
        """`written`: how those who gave the functions write settings, for advice."""
        self._functions, self._on_error, self.written = list(functions), on_error, written
        self._forms: dict[int, Form] = {}  # by the function's place: the form that it was seen to read

    def needed_columns(self) -> dict[str, str]:
        """Columns of the dataset that a function cannot be called without, and which function that is."""
        found: dict[str, str] = {}
        for function in self._functions:
            try:
                parameters = inspect.signature(function).parameters
            except (TypeError, ValueError):  # it says nothing of its arguments: calling it will show
                continue
            for p in parameters.values():
                if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in OURS:
                    found[p.name] = _name(function)
        return found

    def __call__(self, episodes: Sequence[Episode]) -> list[float]:
        if not episodes:
            return []
        columns = _columns(episodes)
        totals: list[list[float]] = [[] for _ in episodes]
        for place, function in enumerate(self._functions):
            for index, value in enumerate(self._call(place, function, columns, episodes)):
                if value is not None:
                    totals[index].append(value)
        silent = next((i for i, values in enumerate(totals) if not values), None)
        if silent is not None:
            self._fail(f"every reward function returned None for item {episodes[silent].item_id!r}")
        return [sum(values) for values in totals]

    def _call(
        self, place: int, function: RewardFunction, columns: dict[str, Any], episodes: Sequence[Episode]
    ) -> list[float | None]:
        name = _name(function)
        try:
            values = self._values(place, function, columns)
        except Exception as error:
            form = self._forms.get(place, _as_given)
            return self._one_by_one(name, function, form(columns), episodes, error)
        if not isinstance(values, (list, tuple)) and hasattr(values, "tolist"):
            values = values.tolist()  # a tensor or array is fine as long as its length is
        if not isinstance(values, (list, tuple)) or len(values) != len(episodes):
            got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
            expected = f"{len(episodes)} episodes (items {episodes[0].item_id!r} ...): return a list with a number for each"
            self._fail(f"reward {name} returned {got} for {expected}")
            return [0.0] * len(episodes)
        return [self._number(name, value, episode) for value, episode in zip(values, episodes, strict=True)]

    def _values(self, place: int, function: RewardFunction, columns: dict[str, Any]) -> Any:
        """What the function returns for the form of prompts and completions that it reads. Until it has read one: for the given
        form, and where it raises on that as code does that wants another, for the others."""
        known = self._forms.get(place)
        raised_first: Exception | None = None
        for form in FORMS if known is None else (known,):
            try:
                values = _called(function, form(columns))
            except MISREAD as error:
                raised_first = raised_first or error
                continue
            except Exception:  # it read this form, and failed later: what it says then is what is wrong
                self._forms[place] = form
                raise
            self._forms[place] = form
            return values
        assert raised_first is not None
        raise raised_first

    def _one_by_one(
        self, name: str, function: RewardFunction, columns: dict[str, Any], episodes: Sequence[Episode], first: Exception
    ) -> list[float | None]:
        """After a failure: finds the episode that fails on its own. Under `zero` only such episodes get 0."""
        values: list[float | None] = []
        for index, episode in enumerate(episodes):
            row = {key: [column[index]] for key, column in columns.items()}
            try:
                values.append(self._number(name, _called(function, row)[0], episode))
            except RewardError:
                raise
            except Exception as error:
                self._fail(f"reward {name} {raised(error)} for item {episode.item_id!r}", error)
                values.append(0.0)
        if self._on_error == "stop":  # it fails on the whole batch only
            self._fail(f"reward {name} {raised(first)} (first item of the batch: {episodes[0].item_id!r})", first)
        return values

    def _number(self, name: str, value: Any, episode: Episode) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST:  # also where it is no number
            self._fail(
                f"reward {name} returned {value!r} for item {episode.item_id!r}; a reward is a finite number, at most {LARGEST:g}"
            )
            return 0.0
        return number

    def _fail(self, line: str, error: Exception | None = None) -> None:
        if self._on_error == "stop":
            zero = self.written("task.on_reward_error", "zero")
            raise RewardError(f"{line}; fix the reward, or set {zero} to count such episodes as 0") from error
        logger.warning("%s; counted as 0 (%s)", line, self.written("task.on_reward_error", "zero"))


def _as_given(columns: dict[str, Any]) -> dict[str, Any]:
    return columns


def _flipped(*names: str) -> Form:
    """The columns with texts as lists of messages, and the other way round."""

    def other(value: Any, role: str) -> Any:
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        return "\n\n".join(str(turn.get("content", "")) for turn in value) if isinstance(value, list) else value

    roles = {"prompts": "user", "completions": "assistant"}
    return lambda columns: {**columns, **{name: [other(v, roles[name]) for v in columns[name]] for name in names}}


MISREAD = (TypeError, AttributeError, LookupError)  # what code raises on a text that it takes for messages, or the reverse
FORMS = (_as_given, _flipped("completions"), _flipped("prompts", "completions"))


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _called(function: RewardFunction, columns: dict[str, Any]) -> Any:
    with user_code():
        return settled(function(**_accepted(function, columns)))


def _columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """TRL's arguments, one entry an episode; dataset columns come along under their own names."""
    items = [item_of(episode) for episode in episodes]
    names = list(dict.fromkeys(key for item in items for key in item.data))
    columns: dict[str, Any] = {name: [item.data.get(name) for item in items] for name in names}
    prompts = [item.data.get("prompt", item.prompt) for item in items]
    answers = [episode.answer_message for episode in episodes]
    texts = [episode.answer_text for episode in episodes]
    columns["prompts"] = prompts
    columns["completions"] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns["completion_ids"] = [answer.token_ids if answer else [] for answer in answers]
    columns["messages"] = [  # also where the dataset has a column of that name, as those of chats do
        [{"role": "assistant", "name": m.agent, "content": m.text} for m in episode.messages] for episode in episodes
    ]
    columns["episodes"] = list(episodes)
    return columns


def _accepted(function: RewardFunction, columns: dict[str, Any]) -> dict[str, Any]:
    """All columns for a function that takes **kwargs (TRL's habit); else only the arguments it names."""
    parameters = inspect.signature(function).parameters
    columns = {**TRL_EXTRAS, **columns}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return columns
    return {key: value for key, value in columns.items() if key in parameters}
