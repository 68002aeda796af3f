"""Optimizers: what every one of them has to do for the passes that come after its step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from teamtr_lora.algorithm.variants.optimizer_kinds import OPTIMIZERS
from teamtr_lora.base.fused_lora import FusedLora, refresh
from teamtr_lora.recipe import TrainingSection
from teamtr_lora.training.optimizers import build_optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_layers_see_the_step_of_any_optimizer(kind: str) -> None:
    """They keep factors in half precision, made anew when torch has counted a change, which bitsandbytes does not let it do."""
    if "bitsandbytes" in OPTIMIZERS[kind].made_by:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (the extra `quant`)")
    torch.manual_seed(3)
    layer = nn.Linear(96, 80).bfloat16().requires_grad_(False)
    a, b = nn.Parameter(torch.randn(8, 96) / 10), nn.Parameter(torch.randn(80, 8) / 10)
    ours, x = FusedLora(layer, a, b, 2.0), torch.randn(40, 96).bfloat16()
    optimizer = build_optimizer(TrainingSection(optimizer=kind, learning_rate=0.1), [a, b])
    refresh([ours])
    before = ours(x)
    before.sum().backward()
    optimizer.step()
    refresh([ours])
    wanted = nn.functional.linear(x.float(), layer.weight.float() + 2.0 * b @ a, layer.bias.float()).detach()
    assert (before - wanted).abs().max() > 1
    torch.testing.assert_close(ours(x).float(), wanted, rtol=0.02, atol=0.2)
