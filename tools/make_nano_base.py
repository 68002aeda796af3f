"""Makes the embedded base `nano`: a small Qwen3 with its own tokenizer, trained from scratch on generated text.

    python tools/make_nano_base.py [--out teamtr_lora/base/nano] [--seed 0] [--steps 12000] [--device cuda]
    python tools/make_nano_base.py --check FOLDER [FOLDER ...] [--jobs 16] [--device cuda]

tools/nano_text.py writes the text: sums by columns of teams of 1 to 8 agents, short questions and free choices, by agents of any
names and roles. The seed fixes data, initialisation and order, whatever the number of workers; on one machine type the result is
reproducible. `--grow FOLDER --layers 6` goes on from a trained base, so that a larger one needs half an hour of a core. `--check`
prints untrained accuracies of bases beside each other instead (tools/nano_check.py).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from nano_text import KNOWN_NAMES, Author, Scene
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.team import TeamProtocol

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 512
CONTEXT = 1024
LONGEST = 512  # tokens of a training text: longer ones are drawn again
BUCKET = 64  # widths of batches are multiples of it, so that a GPU meets few shapes
IGNORED = -100


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a sample of the text; digits are never merged, so a column is always a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    author = Author(random.Random(f"{seed}/tokenizer"))
    texts = ["\n".join(f"{name}:" for name in KNOWN_NAMES)] * 400
    for _ in range(4000):
        scene = author.scene()
        parts = [
            f"system\n{scene.system or ''}",
            "user\n" + scene.prompt,
            "assistant\n",
            *(f"{n}: {r}" for n, r in scene.roles.items()),
        ]
        texts.append("\n".join(parts + [f"{name}:\n{text}" for name, text in scene.said]))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return chat_tokenizer(tokenizer, CONTEXT)


def chat_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """A tokenizer that has the SPECIAL tokens, with ChatML's template; the tests build theirs here too."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


class Batches(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batch `step` as (token ids, labels), drawn from the seed and the step alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, size: int, usual: float) -> None:
        self._tokenizer, self._seed, self._steps, self._size, self._usual = tokenizer, seed, steps, size, usual
        self._pieces = sorted(tokenizer.get_vocab())
        self._protocols: dict[bool, TeamProtocol] = {}

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self._seed}/batch/{step}")
        author = Author(rng, self._pieces, self._usual)
        examples: list[tuple[list[int], list[int]]] = []
        while len(examples) < self._size:
            ids, labels = self.example(author.scene(), rng)
            if len(ids) <= LONGEST:
                examples.append((ids, labels))
        width = math.ceil(max(len(ids) for ids, _ in examples) / BUCKET) * BUCKET
        fills = (self._tokenizer.pad_token_id, IGNORED)
        ids_B_T, labels_B_T = (
            torch.tensor([row[part] + [fill] * (width - len(row[part])) for row in examples]) for part, fill in enumerate(fills)
        )
        return ids_B_T, labels_B_T

    def example(self, scene: Scene, rng: random.Random) -> tuple[list[int], list[int]]:
        """Token ids of one transcript, and labels for the agents' messages with their end tokens. Where every agent has a view of
        its own, the view of one of them."""
        protocol = self._protocol(scene)
        transcript = protocol.begin(scene.prompt)
        reader = rng.choice(list(scene.roles)) if scene.view == "per_agent" else None
        ids: list[int] = []
        labels: list[int] = []
        for turn, (name, text) in enumerate(scene.said):
            message = protocol.chat.encode(text) + protocol.end_ids[:1]
            if reader in (None, name):
                ids = transcript.prompt_for(name)
                labels += [IGNORED] * (len(ids) - len(labels)) + message
                ids += message
            transcript.add_message(name, message)
            if scene.feedback:
                transcript.add_feedback(scene.feedback[turn])
        return ids, labels

    def _protocol(self, scene: Scene) -> TeamProtocol:
        """Taking a chat template apart is slow, so one protocol is made for scenes with a system turn and one for the others."""
        system_turn = scene.system is not None
        if system_turn not in self._protocols:
            self._protocols[system_turn] = TeamProtocol(
                self._tokenizer, {}, reasoning_tags="keep", tool_calls="as_written", system=scene.system
            )
        protocol = self._protocols[system_turn]
        protocol.roles, protocol.view, protocol.system = scene.roles, scene.view, scene.system or ""
        protocol.round_messages = len(scene.roles) if scene.blind else 1
        return protocol


def train(model: Qwen3ForCausalLM, batches: Batches, *, rate: float, workers: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    steps = len(batches)
    warmup = min(500, max(1, steps // 20))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps))) + 0.02)
    )
    ahead: dict[str, Any] = {"prefetch_factor": 8} if workers else {}
    loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=workers, **ahead)
    started = time.monotonic()
    for step, (ids_B_T, labels_B_T) in enumerate(loader, start=1):
        loss = model(input_ids=ids_B_T.to(model.device), labels=labels_B_T.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


@contextmanager
def reproducible(device: str) -> Iterator[None]:
    """The same sums in the same order every time; the quicker attention kernels of GPUs do not keep one in their gradients."""
    before, precision = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    torch.use_deterministic_algorithms(True, warn_only=True)  # an operation that cannot keep the order says so
    try:
        if device == "cpu":
            yield
        else:
            torch.set_float32_matmul_precision("high")  # TF32: enough to learn; the result is stored and used in float32
            with sdpa_kernel(SDPBackend.MATH):
                yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_float32_matmul_precision(precision)


def start_from(model: Qwen3ForCausalLM, folder: Path) -> None:
    """The smaller base's layers come first; those that follow add nothing until they are trained."""
    smaller = Qwen3ForCausalLM.from_pretrained(folder)
    missing, unexpected = model.load_state_dict(smaller.state_dict(), strict=False)
    more = model.model.layers[smaller.config.num_hidden_layers :]
    if unexpected or len(missing) != sum(len(layer.state_dict()) for layer in more):
        raise SystemExit(f"{folder} is no base of this width with at most as many layers")
    for layer in more:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)


def make(args: argparse.Namespace) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns about every worker
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = make_tokenizer(args.seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(args.device)
    if args.grow:
        start_from(model, args.grow)
    print(f"nano: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}", flush=True)
    batches = Batches(tokenizer, seed=args.seed, steps=args.steps, size=args.batch, usual=args.usual)
    with reproducible(args.device):
        train(model, batches, rate=args.learning_rate, workers=args.workers)
    model.cpu().eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir()) / 1e6
    print(f"{args.out}: {size:.2f} MB")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "teamtr_lora/base/nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--batch", type=int, default=64, help="transcripts per step")
    parser.add_argument("--hidden", type=int, default=128, help="model width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--grow", type=Path, metavar="FOLDER", help="go on from this base, which has no more layers")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--usual", type=float, default=0.15, help="share of sums by a team of the usual names and roles")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--workers", type=int, default=0, help="processes that write the text ahead of time")
    parser.add_argument("--check", type=Path, nargs="+", metavar="FOLDER", help="compare these bases and train nothing")
    parser.add_argument("--items", type=int, default=512, help="with --check: held-out items a team plays")
    parser.add_argument("--name-sets", type=int, default=20, help="with --check: teams of random names, each size")
    parser.add_argument("--jobs", type=int, default=1, help="with --check: processes, one thread each")
    args = parser.parse_args(arguments)
    if args.check:
        import nano_check  # not above: tests load this file for its tokenizer, and that one loads most of the package

        cells = nano_check.cells(args.check, items=args.items, name_sets=args.name_sets, seed=args.seed)
        print(nano_check.table(nano_check.play(cells, device=args.device, jobs=args.jobs), args.check))
    else:
        make(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
