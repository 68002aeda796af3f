"""What the adapters cost in a base's linear layers: milliseconds of all of them for one engine step, by how it is computed.

    python tools/bench_lora.py                       # the layers of Qwen3-1.7B, three agents and a spare slot, rank 16
    python tools/bench_lora.py --layers 2 --tokens 4,64      # something a CPU can do

`base`: no adapter. `apart`: the layer's product, then A, mask and B. `joined`: A below the layer's weight, and (on a GPU) the
kernel that adds the chosen B. Times are the best of several; on a GPU the steps are replayed as CUDA graphs, as vLLM does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot

from teamtr_lora.rollout.vllm.patches.lora_layers import add_lora, lay_side_by_side, linear_with_lora

WIDTH, MIDDLE = 2048, 6144
SHAPES = (
    (WIDTH, (2048, 1024, 1024)),
    (2048, (WIDTH,)),
    (WIDTH, (MIDDLE, MIDDLE)),
    (MIDDLE, (WIDTH,)),
)  # qkv, o, gate and up, down


@dataclass
class Layer:
    weight: Tensor
    a: list[Tensor]
    b: list[Tensor]
    joined: Tensor
    b_O_C: Tensor
    outs: list[int]


def make_layer(width: int, outs: tuple[int, ...], slots: int, rank: int, device: str, dtype: torch.dtype) -> Layer:
    above, below = sum(outs), len(outs) * slots * rank
    joined = torch.randn(above + below, width, device=device, dtype=dtype) * 0.02
    a = tuple(torch.zeros(slots, 1, rank, width, device=device, dtype=dtype) for _ in outs)
    b = tuple(torch.zeros(slots, 1, out, rank, device=device, dtype=dtype) for out in outs)
    laid = lay_side_by_side(a, b, joined[above:])
    for tensor in (*laid.a, *laid.b):
        tensor.normal_(std=0.02)
    return Layer(joined[:above], list(laid.a), list(laid.b), joined, laid.b_O_C, list(outs))


def base(layer: Layer, x: Tensor, chosen: Tensor) -> Tensor:
    return linear(x, layer.weight)


def apart(layer: Layer, x: Tensor, chosen: Tensor) -> Tensor:
    y = linear(x, layer.weight)
    add_lora(y, x, layer.a, layer.b, chosen)
    return y


def joined(layer: Layer, x: Tensor, chosen: Tensor) -> Tensor:
    return linear_with_lora(x, layer.joined, None, layer.b_O_C, chosen, layer.outs)


def step(way: Callable[[Layer, Tensor, Tensor], Tensor], layers: list[Layer], inputs: dict[int, Tensor], chosen: Tensor) -> None:
    for layer in layers:
        way(layer, inputs[layer.weight.shape[1]], chosen)


def milliseconds(run: Callable[[], None], device: str, repeats: int = 5) -> float:
    run()  # compiles
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", default="16,64,256,512,1024,2048,4096,16384")
    args = parser.parse_args()
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    layers = [make_layer(w, outs, args.slots, args.rank, device, dtype) for _ in range(args.layers) for w, outs in SHAPES]
    print("tokens      base     apart    joined   (ms, all layers)")
    for tokens in map(int, args.tokens.split(",")):
        chosen = one_hot(torch.arange(tokens, device=device) % args.slots, args.slots).bool()
        inputs = {width: torch.randn(tokens, width, device=device, dtype=dtype) for width in (WIDTH, MIDDLE)}
        spent = [milliseconds(partial(step, way, layers, inputs, chosen), device) for way in (base, apart, joined)]
        print(f"{tokens:6d}" + "".join(f"{ms:10.3f}" for ms in spent), flush=True)


if __name__ == "__main__":
    main()
