"""Tokenizers built on the spot: bytes, chosen merges, chosen special tokens, any chat template."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """`merges` join neighbouring bytes; `split` keeps words apart as GPT-2's pattern does; `added` are special unnamed tokens."""

    def make(
        template: str = CHATML,
        *,
        merges: tuple[tuple[str, str], ...] = (),
        split: bool = True,
        eos: str | None = "<|im_end|>",
        bos: str | None = None,
        special: tuple[str, ...] = ("<|im_start|>",),
        added: tuple[str, ...] = (),
    ) -> Any:
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=eos,
            bos_token=bos,
            additional_special_tokens=list(special),
            chat_template=template,
            clean_up_tokenization_spaces=False,
        )

    return make
