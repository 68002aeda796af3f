"""A team of two on the tiny base, a reward anyone can recompute, and float64 arithmetic to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.recipe import BaseSection, RolloutSection, TeamSection, TeamTRConfig
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode
from teamtr_lora.training.events import Events
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.run_context import RunContext

AGENTS = [
    {"name": "left", "lora": {"rank": 4, "alpha": 8.0}},
    {"name": "right", "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj", "down_proj"]}},
]
TOKENS = 5  # most tokens in a message


class OddTokens(Task):
    """One point for every message that begins with an odd token id."""

    name = "odd"

    def items(self, split: str) -> Any:
        return _Items(split)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(sum(m.token_ids[0] % 2 for m in e.messages)) for e in episodes]


class _Items:
    size: int | None = None

    def __init__(self, split: str) -> None:
        self._split = split

    def __getitem__(self, position: int) -> Item:
        return Item(f"{self._split}-{position}", f"{self._split[0]}{position}")


@pytest.fixture
def odd_task() -> Task:
    return OddTokens()


@pytest.fixture(scope="session")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def make_team(tiny_base: Path) -> Callable[..., PlayableTeam]:
    """The same start every time: a fresh team has the policy that sampled `episodes`."""

    def make(*, precision: str = "fp32", agents: list[dict[str, Any]] | None = None, **team: Any) -> PlayableTeam:
        return open_team(
            BaseSection(source=str(tiny_base), precision=precision, device="cpu"),  # type: ignore[arg-type]
            TeamSection.model_validate({"agents": agents or AGENTS, **team}),
            RolloutSection(),
            seed=0,
            folder=Path("/"),
        )

    return make


@pytest.fixture(scope="session")
def play() -> Callable[..., list[Episode]]:
    def run(
        playable: PlayableTeam, *, items: int = 8, episodes: int = 4, temperature: float = 1.0, purpose: str = "test"
    ) -> list[Episode]:
        task = OddTokens()
        chosen = [task.items("train")[i] for i in range(items)]
        plan = PlayPlan(chosen, episodes, temperature, max_message_tokens=TOKENS, purpose=purpose)
        return playable.play(task, plan)

    return run


@pytest.fixture(scope="session")
def _played(make_team: Callable[..., PlayableTeam], play: Callable[..., list[Episode]]) -> list[Episode]:
    return play(make_team())


@pytest.fixture
def episodes(_played: list[Episode]) -> list[Episode]:
    """8 items x 4 episodes of a fresh team at T = 1, two messages each."""
    return copy.deepcopy(_played)


@pytest.fixture
def twins(episodes: list[Episode]) -> list[Episode]:
    """The same 8 groups of 4, but only two different ones in turn: what helps on some of them helps on the others too."""
    varied = [g for g in range(8) if len({e.reward for e in episodes if e.group == g}) > 1][:2]
    copies = []
    for group in range(8):
        for episode in (e for e in episodes if e.group == varied[group % 2]):
            copies.append(copy.deepcopy(episode))
            copies[-1].group, copies[-1].item_id = group, f"twin-{group}"
    return copies


@pytest.fixture(scope="session")
def config() -> Callable[..., TeamTRConfig]:
    def make(**values: Any) -> TeamTRConfig:
        defaults: dict[str, Any] = {
            "items_per_stage": 8,
            "episodes_per_item": 4,
            "max_message_tokens": TOKENS,
            "learning_rate": 5e-3,
            "inner_epochs": 2,
            "holdout": 0.25,
            "delta": 0.05,
            "tokens_per_microbatch": 400,
            "head_chunk_tokens": 16,
        }
        return TeamTRConfig(**(defaults | values))

    return make


@pytest.fixture(scope="session")
def move() -> Callable[..., None]:
    """Moves an adapter by a random step of a given size on every number."""

    def run(playable: PlayableTeam, agent: str, size: float, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        before = playable.bank.snapshot(agent)
        playable.bank.restore(agent, {n: t + size * torch.randn(t.shape, generator=generator) for n, t in before.items()})

    return run


@pytest.fixture(scope="session")
def state_of() -> Callable[[nn.Module], dict[str, bytes]]:
    """Every parameter and buffer of a model, as bytes."""

    def run(model: nn.Module) -> dict[str, bytes]:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {n: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in named}

    return run


def _exact_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.fixture(scope="session")
def double_logp() -> Callable[..., tuple[nn.Module, Callable[..., Tensor]]]:
    """A float64 copy of the team's model, and the full log-softmax at every token of a message computed on it alone.

    Nothing of the package is used: one forward a message, no padding, no chunks.
    """

    def run(playable: PlayableTeam, agent: str) -> tuple[nn.Module, Callable[..., Tensor]]:
        playable.bank.activate(agent)
        model = copy.deepcopy(playable.bank.model).double()
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":  # transformers computes it in float32 whatever the model's type is
                module.forward = _exact_norm(module)  # type: ignore[method-assign]

        def logp(message: Any, temperature: float = 1.0) -> Tensor:
            ids = message.prompt_ids + message.token_ids
            logits = model(input_ids=torch.tensor([ids])).logits[0, len(message.prompt_ids) - 1 : -1]
            assert logits.dtype == torch.float64
            return torch.log_softmax(logits / temperature, -1)

        return model, logp

    return run


class HighTokens(Task):
    """The higher the first token ids are modulo 4, the better; one item, so that what is learned holds for the gate too. A
    message's answer is its first character."""

    def items(self, split: str) -> Any:
        class Same:
            size = None

            def __getitem__(self, position: int) -> Item:
                return Item(f"{split}-{position}", split[0])

        return Same()

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [sum(m.token_ids[0] % 4 for m in e.messages) / 9 for e in episodes]

    def answer(self, text: str) -> str | None:
        return text[:1] or None


class _StopAfter(TrainerCallback):
    def __init__(self, updates: int) -> None:
        self.left = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left -= 1
        control.should_training_stop = self.left <= 0


@pytest.fixture(scope="session")
def high_tokens() -> Task:
    return HighTokens()


@pytest.fixture(scope="module")
def start(make_team: Any, config: Any, accelerator: Accelerator, high_tokens: Task) -> Callable[..., TrainingRun]:
    """A run of three agents, ready for `train`; `stop_after` ends it after so many updates, as an interrupt would."""

    def make(
        folder: Path,
        *,
        stop_after: int | None = None,
        resume: bool = False,
        task: Task = high_tokens,
        loras: Sequence[dict[str, Any]] = ({"rank": 2, "alpha": 4.0},) * 3,
        team: dict[str, Any] | None = None,
        **values: Any,
    ) -> TrainingRun:
        small = {"stages": 1, "items": 3, "items_per_stage": 6, "holdout": 0.34, "learning_rate": 2e-3, "delta": 0.1,
                 "every_stages": 0, "temperature": 0.3, "order": "fixed", "tokens_per_microbatch": 2000}  # fmt: skip
        settings = config(**(small | values))
        folder.mkdir(parents=True, exist_ok=True)
        three = [{"name": name, "lora": lora} for name, lora in zip(("one", "two", "three"), loras, strict=True)]
        context = RunContext(
            playable=make_team(agents=three, **(team or {})),
            task=task,
            config=settings,
            run_dir=RunDir(folder),
            accelerator=accelerator,
            events=Events([] if stop_after is None else [_StopAfter(stop_after)], settings, updates=3),
        )
        run = TrainingRun(context)
        if resume:
            run.resume()
        return run

    return make
