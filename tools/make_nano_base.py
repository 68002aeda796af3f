"""Makes the embedded base `nano`: a small Qwen3 with its own tokenizer, trained from scratch on generated text.

    python tools/make_nano_base.py [--out teamtr_lora/base/nano] [--seed 0] [--steps 1500] [--hidden 128]

Training data, all generated here: column additions written by teams of 1 to 8 agents in the shared protocol, plus short
single-agent skills (sums, products, largest number, copying, counting). The writers are careless at known rates (CARELESS), as
authors of real text are, so the base is able and imperfect: it imitates the mistakes too, and a team has something to learn.
The seed fixes data, initialisation and order; on one machine type the result is reproducible.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from teamtr_lora.team import TeamProtocol  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 512
CONTEXT = 1024
# How often a writer of the training text errs in one message: forgets a carry that is due, misreads a digit from the
# neighbouring column, or slips by one in the total.
CARELESS = {"forgets_carry": 0.22, "misreads_digit": 0.06, "slips_by_one": 0.10}
COLUMN_NAMES = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions"]
AGENT_NAMES = ["planner", "solver", "checker", "writer", "critic", "judge", "helper", "coder"] + [
    f"agent{i}" for i in range(1, 9)
]
SYSTEMS = ["Add by columns.", "Add the numbers column by column.", "Work as a team.", "Each agent adds one column.", ""]


def careless_column(rng: random.Random, first: int, second: int, column: int, carry: int) -> tuple[str, int]:
    """One agent's message for a column as a fallible writer puts it, and the carry a reader takes from it."""
    digit = lambda number, at: number // 10**at % 10  # noqa: E731
    misread = column + rng.choice([-1, 1]) if rng.random() < CARELESS["misreads_digit"] else column
    x, y = digit(first, max(misread, 0)), digit(second, column)
    c = 0 if carry and rng.random() < CARELESS["forgets_carry"] else carry
    total = x + y + c
    if rng.random() < CARELESS["slips_by_one"]:
        total = max(0, total + rng.choice([-1, 1]))
    return f"{x}+{y}+{c}={total}", total // 10


def column_team(rng: random.Random) -> tuple[dict[str, str], str, str, list[tuple[str, str]]]:
    """roles, system text, prompt and messages of one team episode."""
    digits = rng.choices(range(1, 9), weights=[3, 12, 60, 12, 4, 3, 3, 3])[0]
    names = ["planner", "solver", "checker"] if digits == 3 and rng.random() < 0.6 else rng.sample(AGENT_NAMES, digits)
    low, high = 10 ** (digits - 1), 10**digits - 1
    first, second = rng.randint(low, high), rng.randint(low, high)
    roles = {name: COLUMN_NAMES[i] if rng.random() < 0.95 else "" for i, name in enumerate(names)}
    messages, carry = [], 0
    for column, name in enumerate(names):
        text, carry = careless_column(rng, first, second, column, carry)
        messages.append((name, text))
    return roles, rng.choices(SYSTEMS, weights=[8, 1, 1, 1, 1])[0], f"{first}+{second}", messages


def small_skill(rng: random.Random) -> tuple[dict[str, str], str, str, list[tuple[str, str]]]:
    """One question to one agent: the abilities other small tasks build on."""
    name = rng.choice(AGENT_NAMES)
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    word = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 5)))
    numbers = [rng.randint(0, 99) for _ in range(4)]
    prompt, answer = rng.choice(
        [
            (f"What is {a} plus {b}?", f"{a + b}"),
            (f"What is {a} times {b}?", f"{a * b}"),
            (f"Which is the largest: {', '.join(map(str, numbers))}?", f"{max(numbers)}"),
            (f"Repeat the word {word}.", word),
            (f"How many letters has {word}?", f"{len(word)}"),
        ]
    )
    return {name: "answers"}, "Answer with one word.", prompt, [(name, answer)]


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a sample of the corpus; digits are never merged, so a column is always a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(4000):
        roles, system, prompt, messages = column_team(rng) if rng.random() < 0.6 else small_skill(rng)
        parts = [f"system\n{system}", "user\n" + prompt, "assistant\n", *(f"{n}: {r}\n" for n, r in roles.items())]
        texts.append("\n".join(parts + [f"{n}:\n{text}" for n, text in messages]))
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


def make_example(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[bool]]:
    """Token ids of one transcript and which of them the loss counts (the agents' messages with their end tokens)."""
    roles, system, prompt, messages = column_team(rng) if rng.random() < 0.88 else small_skill(rng)
    protocol = TeamProtocol(tokenizer, roles, view="shared" if rng.random() < 0.85 else "per_agent", system=system)
    transcript = protocol.begin(prompt)
    only = rng.randrange(len(messages)) if protocol.view == "per_agent" else None  # views differ: learn one of them
    ids: list[int] = []
    counted: list[bool] = []
    for turn, (name, text) in enumerate(messages):
        view = transcript.prompt_for(name)
        message = protocol.chat.encode(text) + protocol.end_ids[:1]
        if only is None or only == turn:
            counted += [False] * (len(view) - len(counted)) + [True] * len(message)
            ids = view + message
        transcript.add_message(name, message)
    return ids, counted


def make_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    examples = [make_example(rng, tokenizer) for _ in range(size)]
    width = max(len(ids) for ids, _ in examples)
    ids_B_T = torch.full((size, width), tokenizer.pad_token_id)
    labels_B_T = torch.full((size, width), -100)
    for row, (ids, counted) in enumerate(examples):
        ids_B_T[row, : len(ids)] = torch.tensor(ids)
        labels_B_T[row, : len(ids)] = torch.where(torch.tensor(counted), torch.tensor(ids), torch.tensor(-100))
    return ids_B_T, labels_B_T


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, steps: int, batch: int, rate: float
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps))) + 0.02)
    )
    started = time.monotonic()
    for step in range(1, steps + 1):
        ids_B_T, labels_B_T = make_batch(rng, tokenizer, batch)
        loss = model(input_ids=ids_B_T, labels=labels_B_T).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "teamtr_lora/base/nano")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=32, help="transcripts per step")
    parser.add_argument("--hidden", type=int, default=128, help="model width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(rng)
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
    model = Qwen3ForCausalLM(config)
    print(f"nano: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, vocabulary {len(tokenizer)}")
    train(model, tokenizer, rng, args.steps, args.batch, args.learning_rate)
    model.eval().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir()) / 1e6
    print(f"{args.out}: {size:.2f} MB")


if __name__ == "__main__":
    main()
