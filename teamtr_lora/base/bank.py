"""AdapterBank: every agent's LoRA adapter on the one frozen base, with explicit ownership of parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from teamtr_lora.base.frozen_base import linear_shapes
from teamtr_lora.base.fused_lora import can_fuse, can_widen, fused, takes_float32_sum
from teamtr_lora.base.lora_config import misfit
from teamtr_lora.base.precision import float32_products
from teamtr_lora.base.versions import AdapterVersion, content_hash
from teamtr_lora.common.errors import UserError

if TYPE_CHECKING:  # peft takes seconds to import, and commands that only read files come by here
    from peft import LoraConfig, PeftModel

Snapshot = dict[str, Tensor]


class LoraSpec(Protocol):
    """What the recipe says of one adapter."""

    rank: int
    alpha: float
    targets: Any
    rslora: bool
    dora: bool


def _peft_name(agent: str) -> str:
    # PEFT keeps adapters in module dictionaries by name, where an agent called "train" or "items" would hide a method
    return f"agent_{agent}"


class AdapterBank:
    """Owns the parameter list of each agent (never "whatever requires grad") and its current version.

    All adapters sit on one PEFT model. Weights are float32 whatever the base's precision is. Nothing here writes to disk.
    """

    def __init__(self, model: nn.Module, specs: Mapping[str, LoraSpec], *, base_name: str, seed: int) -> None:
        from peft import get_peft_model

        self.base_name, self.specs = base_name, dict(specs)
        self._configs = {agent: lora_config(spec) for agent, spec in specs.items()}
        for agent, spec in specs.items():
            if wrong := misfit(spec.rank, spec.targets, linear_shapes(model)):
                raise UserError(f"team.agents.{agent}.lora.{wrong[0]}: {wrong[1]}")
        peft_model: PeftModel | None = None
        for agent, config in self._configs.items():
            with _seeded(f"{seed}/lora/{agent}"):  # the same start for the same recipe, whatever was drawn before
                if peft_model is None:
                    peft_model = get_peft_model(model, config, adapter_name=_peft_name(agent))
                else:
                    peft_model.add_adapter(_peft_name(agent), config)
        assert peft_model is not None  # a team has an agent
        self.model = peft_model.eval()
        self._owned = {agent: self._collect(agent) for agent in specs}
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self._active = ""
        self._widens: dict[str, bool] = {}
        self._checkpointing = False
        self._versions = {agent: self._version(agent, 0) for agent in specs}

    @property
    def agents(self) -> list[str]:
        return list(self._owned)

    @property
    def decoder(self) -> nn.Module:
        """The transformer without its head: hidden states out."""
        decoder = self.model.get_base_model().base_model
        assert isinstance(decoder, nn.Module)
        return decoder

    def parameters(self, agent: str) -> dict[str, nn.Parameter]:
        """The tensors `agent` owns, by their exported PEFT name."""
        return self._owned[agent]

    def version(self, agent: str) -> AdapterVersion:
        return self._versions[agent]

    def config(self, agent: str) -> dict[str, Any]:
        """PEFT's adapter_config.json, with nothing of this machine in it."""
        return exported_config(self._configs[agent], self.base_name)

    def scaling(self, agent: str) -> float:
        """What B A is multiplied by."""
        config = self._configs[agent]
        return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)

    def activate(self, agent: str) -> None:
        """Makes `agent` the one whose adapter the model applies."""
        if self._active != agent:
            self.model.set_adapter(_peft_name(agent), inference_mode=True)
            self._active = agent

    def enable_gradient_checkpointing(self) -> None:
        """Layers are computed again in the backward pass instead of keeping their activations."""
        causal_lm: Any = self.model.get_base_model()
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._checkpointing = True

    @contextmanager
    def training(self, agent: str, *, compiled: bool = False, float32_sum: bool = False) -> Iterator[list[nn.Parameter]]:
        """`agent` is active and its own parameters, and no others, require gradients. On a GPU in half precision its layers are
        fused ones meanwhile, and run compiled where `compiled` says so. `float32_sum`: what they add up is float32."""
        self.activate(agent)
        parameters = list(self._owned[agent].values())
        for parameter in parameters:
            parameter.requires_grad_(True)
        fusing = can_fuse(self.model, _peft_name(agent))
        try:
            layers = fused(self.model, _peft_name(agent), compiled=compiled, float32_sum=float32_sum) if fusing else nullcontext()
            with layers:
                self.model.train(self._checkpointing)  # checkpointing acts in training mode only
                yield parameters
        finally:
            self.model.eval()
            for parameter in parameters:
                parameter.requires_grad_(False)
                parameter.grad = None

    def takes_float32_sum(self, agent: str) -> bool:
        """Whether training passes of `agent` may be `float32_sum`."""
        return can_fuse(self.model, _peft_name(agent)) and takes_float32_sum(self.model)

    @property
    def can_widen(self) -> bool:
        """Whether the active agent's policy has the quick passes of `wide`."""
        if self._active not in self._widens:  # looking at every module takes longer than a layer's pass
            self._widens[self._active] = bool(self._active) and can_widen(self.model, _peft_name(self._active))
        return self._widens[self._active]

    @contextmanager
    def wide(self, *, compiled: bool) -> Iterator[None]:
        """Passes of the active agent without gradients, in float32 but for the inputs of products."""
        layers = fused(self.model, _peft_name(self._active), compiled=compiled, wide=True)
        with torch.no_grad(), float32_products(tf32=True), layers:
            yield

    @property
    def can_mix(self) -> bool:
        """Whether rows of several agents can share a forward: PEFT cannot do that with DoRA."""
        return not any(config.use_dora for config in self._configs.values())

    def mixed_names(self, agents: list[str]) -> list[str]:
        """What a mixed-batch forward takes as `adapter_names`, one a row."""
        return [_peft_name(agent) for agent in agents]

    def snapshot(self, agent: str) -> Snapshot:
        return {name: parameter.detach().clone() for name, parameter in self._owned[agent].items()}

    @torch.no_grad()
    def restore(self, agent: str, snapshot: Mapping[str, Tensor]) -> None:
        owned = self._owned[agent]
        if snapshot.keys() != owned.keys():
            odd = sorted(snapshot.keys() ^ owned.keys())[:1]
            raise UserError(f"adapter of agent {agent!r} does not fit its recipe: tensor {odd[0]} is on one side only")
        for name, parameter in owned.items():
            if snapshot[name].shape != parameter.shape:
                raise UserError(
                    f"adapter of agent {agent!r}: {name} has shape {tuple(snapshot[name].shape)}, the recipe makes "
                    f"{tuple(parameter.shape)}; check lora.rank"
                )
        for name, parameter in owned.items():
            parameter.copy_(snapshot[name])

    @torch.no_grad()
    def interpolate(self, agent: str, current: Snapshot, candidate: Snapshot, alpha: float) -> None:
        """candidate(alpha) = current + alpha (candidate - current) on the adapter factors."""
        for name, parameter in self._owned[agent].items():
            if alpha in (0.0, 1.0):  # copied, since the formula below would round
                parameter.copy_(candidate[name] if alpha else current[name])
            else:
                parameter.copy_(current[name] + alpha * (candidate[name] - current[name]))

    def tensors(self, agent: str) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._owned[agent].items()}

    def commit(self, agent: str) -> AdapterVersion:
        """The weights as they are now become the agent's next version."""
        self._versions[agent] = self._version(agent, self._versions[agent].number + 1)
        return self._versions[agent]

    def load(self, version: AdapterVersion, tensors: Mapping[str, Tensor]) -> None:
        """Puts a stored version in place, bit for bit."""
        self.restore(version.agent, tensors)
        self._versions[version.agent] = version

    def _version(self, agent: str, number: int) -> AdapterVersion:
        return AdapterVersion(agent, number, content_hash(self.tensors(agent), self.config(agent)))

    def _collect(self, agent: str) -> dict[str, nn.Parameter]:
        infix = f".{_peft_name(agent)}."
        owned = {n.replace(infix, "."): p for n, p in self.model.named_parameters() if infix in n}
        # PEFT's files call DoRA's magnitudes by the name of their module, without `.weight`
        return dict(sorted((n.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"), p) for n, p in owned.items()))


def exported_config(config: LoraConfig, base_name: str) -> dict[str, Any]:
    """PEFT's adapter_config.json of this config, with nothing of this machine in it."""
    data = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    data.update(base_model_name_or_path=base_name, inference_mode=True, revision=None)
    for key in ("peft_type", "task_type"):
        data[key] = getattr(data[key], "value", data[key])
    return data


def lora_config(spec: LoraSpec) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # type: ignore[arg-type]
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        use_rslora=spec.rslora,
        use_dora=spec.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
        yield
