"""Attention over sequences that lie end to end, against each sequence alone in float64."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.base import segment_attention
from teamtr_lora.base.segment_attention import NAME, Segments, _OverSegments, attending_over_segments, takes_segments

KINDS: dict[str, Any] = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
OPENINGS, LONE, RESTS = [5, 7], [9], [[3, 6, 2], [4, 1]]


def laid_out() -> tuple[Segments, list[list[int]]]:
    """The segments, and for every sequence where its tokens lie."""
    parts = [*OPENINGS, *LONE, *(length for rests in RESTS for length in rests)]
    ends = list(accumulate(parts, initial=0))
    at = [list(range(*pair)) for pair in pairwise(ends)]
    opening = [(0, 0)] * 3 + [(0, 5)] * 3 + [(5, 12)] * 2
    return Segments.of(opening, parts), [at[2], *(at[0] + at[i] for i in (3, 4, 5)), *(at[1] + at[i] for i in (6, 7))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_and_gradients_are_those_of_each_sequence_alone(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("the flash kernels need a GPU")
    dtype, close = (torch.float64, 1e-12) if device == "cpu" else (torch.float16, 4e-3)
    segments, sequences = laid_out()
    assert (segments.longest, segments.longest_keys, segments.openings) == (9, 7 + 4, 12)
    torch.manual_seed(0)
    tokens = int(segments.part_S[-1])
    drawn = [torch.randn(tokens, heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2, 4)]  # and an output's gradient
    q, k, v = (each.requires_grad_() for each in drawn[:3])
    out = _OverSegments.apply(q, k, v, 0.25, *segments.to(torch.device(device)))
    found = torch.autograd.grad(out, (q, k, v), drawn[3])

    exact = [each.detach().double().requires_grad_() for each in drawn[:3]]
    wanted = torch.zeros(tokens, 4, 16, dtype=torch.float64, device=device)
    weighted = torch.zeros((), dtype=torch.float64, device=device)
    for number, places in enumerate(sequences):
        rows = [each[places].transpose(0, 1) for each in exact]
        keys, values = (each.repeat_interleave(2, 0) for each in rows[1:])
        alone = torch.nn.functional.scaled_dot_product_attention(rows[0], keys, values, is_causal=True, scale=0.25)
        alone = alone.transpose(0, 1)
        # the tokens of an opening are in several sequences, and count in the first of them
        new = [i for i, place in enumerate(places) if not any(place in other for other in sequences[:number])]
        wanted[[places[i] for i in new]] = alone.detach()[new]
        weighted = weighted + (alone[new] * drawn[3].double()[[places[i] for i in new]]).sum()
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)
    for got, right in zip(found, torch.autograd.grad(weighted, exact), strict=True):
        assert float((got.double() - right).norm() / right.norm()) < close


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_every_sequence_the_hidden_states_that_it_has_alone(kind: str) -> None:
    config_of, model_of = KINDS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(1)
    model = model_of(config_of(vocab_size=300, num_hidden_layers=2, attn_implementation="sdpa", **sizes)).double().eval()
    segments, sequences = laid_out()
    tokens = int(segments.part_S[-1])
    ids_T, position_T = torch.randint(0, 300, (tokens,)), torch.zeros(tokens, dtype=torch.long)
    for places in sequences:
        position_T[places] = torch.arange(len(places))
    with torch.no_grad(), attending_over_segments(model):
        assert model.config._attn_implementation == NAME
        hidden_T_D = model.model(input_ids=ids_T[None], position_ids=position_T[None], segments=segments).last_hidden_state[0]
        padded = model.model(input_ids=ids_T[None, sequences[1]]).last_hidden_state[0]  # without segments: as ever
    with torch.no_grad():
        for places in sequences:
            alone = model.model(input_ids=ids_T[None, places]).last_hidden_state[0]
            torch.testing.assert_close(hidden_T_D[places], alone, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded, hidden_T_D[sequences[1]], rtol=1e-6, atol=1e-6)
    assert model.config._attn_implementation == "sdpa" and not takes_segments(model)


def test_kernels_that_do_not_fit_are_found_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trial = segment_attention._kernels_fit.__wrapped__
    here, half, right = torch.device("cpu"), torch.float16, segment_attention._attend_backward
    assert trial(here, half, 2, 16) and trial(here, torch.bfloat16, 1, 16) and not caplog.messages

    def another_signature(*_: Any) -> Any:
        raise TypeError("takes 15 arguments, 16 were given")

    def wrong_keys(*given: Any) -> Any:
        dq, dk, dv = right(*given)
        return dq, dk * (1.5 if dq.dtype == half else 1.0), dv

    for broken, told in ((another_signature, "takes 15 arguments"), (wrong_keys, "0.5 off")):
        monkeypatch.setattr(segment_attention, "_attend_backward", broken)
        assert not trial(here, half, 2, 16)
        assert told in caplog.messages[-1] and "padded" in caplog.messages[-1]
