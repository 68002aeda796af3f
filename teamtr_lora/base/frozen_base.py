"""The frozen base: tokenizer and model of a local folder, and what can be said of it without its weights."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from teamtr_lora.base.precision import HALF_DTYPES, decoder_layers, keep_activations_unquantised
from teamtr_lora.base.sharding import split_layers
from teamtr_lora.base.source import known_sha256, one_line, quiet_transformers, resolve
from teamtr_lora.common.errors import UserError

if TYPE_CHECKING:  # transformers takes seconds to import, and commands that only read files come by here
    from transformers import BitsAndBytesConfig
    from transformers.configuration_utils import PretrainedConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

ATTENTION = "sdpa"
_NAMES_OTHERS = ("auto_map", "custom_pipelines", "transformers_weights")  # code, or other files than those that are hashed
_MOST_LAYERS = 1000  # building more, even without weights, takes for ever
PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# One of these holds the vocabulary; without it transformers may quietly build an empty tokenizer.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_TOKENIZER_FILES = (
    *_VOCABULARY_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_PROBE_TEXT = "The quick brown fox jumps over the lazy dog, 0123456789 times.\n"


@dataclass(frozen=True)
class FrozenBase:
    """A base ready to carry adapters: in eval mode, no parameter requires a gradient."""

    name: str  # the recipe's base.source
    folder: Path
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype  # of the parameters that are not quantised, and of the arithmetic
    quantization: str  # none, 4bit or 8bit, as it is in memory
    context_tokens: int
    vocab_size: int  # rows of the output head; at least the tokenizer's length
    eos_ids: tuple[int, ...]  # ids that end a message; the tokenizer's own comes first
    pad_id: int
    split: bool = False  # over processes: each pass is one of all of them


@dataclass(frozen=True)
class LinearShape:
    """A linear module that an adapter can be put on (the output head is not among them)."""

    name: str  # full name, as in model.named_modules()
    in_features: int
    out_features: int


@dataclass(frozen=True)
class BaseFacts:
    """What `plan` needs to know of a base, read without its weights."""

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norms: bool  # whether queries and keys are normalised, head by head
    vocab_size: int
    context_tokens: int
    parameters: int  # a tied head counts once
    stored_quantization: str  # none, or 4bit / 8bit when the files are quantised already
    linears: tuple[LinearShape, ...]


def load_base(
    source: str,
    *,
    precision: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    revision: str | None = None,
    split: bool = False,
) -> FrozenBase:
    """Fetch, load, freeze and check the base that a recipe names. `split`: over the processes of torch's default group."""
    place = resolve_device(device)
    dtype = resolve_dtype(precision, place)
    wanted = quantization_config(quantization, dtype)
    folder = resolve(source, revision)
    config = _read_config(folder, source)
    quantization = _merged_quantization(quantization, config, source)
    if getattr(config, "quantization_config", None):
        wanted = None  # the files say how they are quantised
    tokenizer = load_tokenizer(folder, source)
    vocab_size = _text(config).vocab_size
    if len(tokenizer) > vocab_size:
        raise UserError(f"base.source: the tokenizer of '{source}' has {len(tokenizer)} tokens, the model only {vocab_size}")
    if split:  # as it is stored, so that the RAM of a host has one copy, the files', for all its processes
        model = _load_model(folder, source, config, "auto", torch.device("cpu"), quantization, wanted)
        split_layers(model, place, dtype)
    else:
        model = _load_model(folder, source, config, dtype, place, quantization, wanted)
    eos_ids = _eos_ids(tokenizer, getattr(getattr(model, "generation_config", None), "eos_token_id", None), source)
    _check_finite(model, tokenizer, dtype)
    return FrozenBase(
        name=source, folder=folder, model=model, tokenizer=tokenizer, device=place, dtype=dtype,
        quantization=quantization, context_tokens=_context_tokens(config), vocab_size=vocab_size, eos_ids=eos_ids,
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id, split=split,
    )  # fmt: skip


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UserError(f"base.device: '{device}' is not one of auto, cpu, cuda, cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"base.device: '{device}' asked for, but torch sees no CUDA GPU; use base.device=cpu or auto")
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"base.device: '{device}' asked for, but there are {torch.cuda.device_count()} GPUs (from cuda:0)")
    return torch.device(device)


def resolve_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is fp32 on a CPU and fp16 on a GPU: as fast as bf16, with an eighth of its noise in the log-probabilities."""
    if precision == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    return PRECISIONS[precision]


def quantization_config(quantization: str, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """NF4 with quantised block scales (QLoRA), or int8 weights. The output head stays as it is."""
    if quantization == "none":
        return None
    _need_bitsandbytes(quantization)
    from transformers import BitsAndBytesConfig

    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a base folder; it must have a chat template, by which the team's messages are laid out."""
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES) and not any(folder.glob("*.tiktoken")):
        raise UserError(f"base.source: '{source}' has no tokenizer; put tokenizer.json and tokenizer_config.json in '{folder}'")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        tokenizer.decode(tokenizer.encode(_PROBE_TEXT))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust library, for a bad regex say, is no Exception
        raise UserError(f"base.source: the tokenizer of '{source}' cannot be loaded: {one_line(error)}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"base.source: the tokenizer of '{source}' has no chat template; use an instruct model, "
            f"or put a chat_template.jinja in '{folder}'"
        )
    return tokenizer


def base_facts(folder: Path) -> BaseFacts:
    """Shapes and sizes of a base from its config.json; the folder need not hold weights."""
    from transformers import AutoModelForCausalLM

    source = str(folder)
    config = _read_config(folder, source)
    with _loading(source):
        with torch.device("meta"):
            # The same code that builds the real model, so that no architecture's shapes are written down twice.
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.tie_weights()
        return _facts(model, config, source)


def _facts(model: Any, config: PretrainedConfig, source: str) -> BaseFacts:
    text = _text(config)
    heads = text.num_attention_heads
    return BaseFacts(
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        vocab_size=text.vocab_size,
        context_tokens=_context_tokens(config),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stored_quantization=_merged_quantization("none", config, source),
        linears=linear_shapes(model),
    )


def linear_shapes(model: Any) -> tuple[LinearShape, ...]:
    """Layers that bitsandbytes quantised are subclasses of nn.Linear."""
    head = model.get_output_embeddings()
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    return tuple(LinearShape(name, linear.in_features, linear.out_features) for name, linear in linears)


def base_identity(folder: Path) -> dict[str, str]:
    """What a base is, for adapters to say what they were trained on: equal hashes mean the same stored policy.

    Hashes are over (file name, content) in order of the names; a process reads each file once while it does not change.
    """
    tokenizer_files = [folder / name for name in _TOKENIZER_FILES] + list(folder.glob("*.tiktoken"))
    return {
        "weights_sha256": _hash_of_files(list(folder.glob("*.safetensors"))),
        "tokenizer_sha256": _hash_of_files([path for path in tokenizer_files if path.is_file()]),
    }


def _load_model(
    folder: Path, source: str, config: Any, dtype: torch.dtype | str, place: torch.device, quantization: str, wanted: Any
) -> Any:
    from transformers import AutoModelForCausalLM

    # Weights go straight to the device they are for, so that a base for a GPU needs no second copy in RAM.
    placed = quantization != "none" or place.type != "cpu"
    extra: dict[str, Any] = {"device_map": {"": str(place)}} if placed else {}
    if wanted is not None:
        extra["quantization_config"] = wanted
    with _loading(source):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False, use_safetensors=True,
            local_files_only=True, output_loading_info=True, **extra,
        )  # fmt: skip
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(f"base.source: '{source}' lacks weights, among them {sorted(info['missing_keys'])[0]}")
    _keep_4bit_unpacked(model)
    keep_activations_unquantised(model)
    _without_dropout(model)
    return model.eval().requires_grad_(False)


def _without_dropout(model: torch.nn.Module) -> None:
    """Switches dropout off for good: gradient checkpointing needs the base in training mode, where it would act."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """What other libraries raise for a bad folder, as one line."""
    try:
        with quiet_transformers():
            yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a stranger's config.json makes another library trip over
        raise UserError(f"base.source: '{source}' cannot be loaded: {one_line(error)}") from error


def _read_config(folder: Path, source: str) -> PretrainedConfig:
    from transformers import AutoConfig

    with _loading(source):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        _without_choices_of_code(config)
        layers = getattr(_text(config), "num_hidden_layers", None)
        if not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
            raise UserError(
                f"base.source: '{source}' has num_hidden_layers={layers!r} in its config.json; no such model is known"
            )
        return config


def _without_choices_of_code(config: PretrainedConfig) -> None:
    """Attention, experts and classes are ours to choose: a config.json can name kernels and classes of a hub repository, which
    would be fetched and run. So is what a pass returns."""
    for name in getattr(config, "sub_configs", {}):
        inner: Any = getattr(config, name, None)
        if hasattr(inner, "sub_configs"):
            _without_choices_of_code(inner)
    config._attn_implementation, config._experts_implementation, config.return_dict = ATTENTION, None, True
    for name in _NAMES_OTHERS:
        if hasattr(config, name):
            delattr(config, name)


def _text(config: PretrainedConfig) -> Any:
    """The part of a config that describes the language model."""
    return config.get_text_config(decoder=True)


def _context_tokens(config: PretrainedConfig) -> int:
    value = getattr(_text(config), "max_position_embeddings", None)
    if not isinstance(value, int) or value < 1:
        raise UserError(f"base.source: config.json has max_position_embeddings={value}; set it to the context length")
    return value


def _merged_quantization(wanted: str, config: PretrainedConfig, source: str) -> str:
    """The quantization of the base in memory: that of the files where they are quantised already, else what is wanted.

    Of stored formats only those of bitsandbytes are taken, since the gate must be able to read their weights in fp32.
    """
    stored = getattr(config, "quantization_config", None)
    if not stored:
        return wanted
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    found = "4bit" if stored.get("load_in_4bit") else "8bit" if stored.get("load_in_8bit") else None
    method = stored.get("quant_method") or ("bitsandbytes" if found else "an unknown method")
    method = str(getattr(method, "value", method))
    if found is None or method != "bitsandbytes":
        raise UserError(f"base.source: '{source}' is stored quantised by {method}; use the unquantised model")
    if wanted not in ("none", found):
        raise UserError(f"base.quantization: '{wanted}' asked for, but '{source}' is stored in {found}; use {found}")
    _need_bitsandbytes(found)
    return found


def _need_bitsandbytes(quantization: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"base.quantization: {quantization} needs bitsandbytes; pip install 'teamtr-lora[quant]', or use none")


def _keep_4bit_unpacked(model: nn.Module) -> None:
    """Keeps bitsandbytes from repacking 4-bit weights at the first forward, as it does on some CPUs: that rounds their scales,
    so that the base would no longer compute what its files say."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def stored_end_ids(folder: Path, tokenizer: PreTrainedTokenizerBase, source: str) -> tuple[int, ...]:
    """The ids that end a message, for those who do not load the model."""
    from transformers import GenerationConfig

    with _loading(source):
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:  # without the file, transformers takes them from the model's config too
            generation = GenerationConfig.from_model_config(_read_config(folder, source))
    return _eos_ids(tokenizer, generation.eos_token_id, source)


def _eos_ids(tokenizer: PreTrainedTokenizerBase, generation: Any, source: str) -> tuple[int, ...]:
    """`generation`: what generation stops at, one id or several."""
    others = generation if isinstance(generation, list) else [generation]
    ids = [token for token in (tokenizer.eos_token_id, *others) if token is not None]
    if not ids:
        raise UserError(f"base.source: the tokenizer of '{source}' has no eos_token; set it in tokenizer_config.json")
    if not all(isinstance(token, int) for token in ids):
        raise UserError(
            f"base.source: '{source}' has eos_token_id={generation!r:.60} in its generation_config.json; give token ids"
        )
    return tuple(dict.fromkeys(ids))


@torch.no_grad()
def _check_finite(model: Any, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    """Refuses a base that overflows in half precision (fp16 ends at 65504), which would show later as NaN losses."""
    if dtype not in HALF_DTYPES:
        return
    outputs: list[Any] = []  # not by output_hidden_states: its hooks stay, and each would cut a compiled layer in two
    hooks = [layer.register_forward_hook(lambda *found: outputs.append(found[-1])) for layer in decoder_layers(model)]
    ids_B_T = torch.tensor([tokenizer(_PROBE_TEXT)["input_ids"]], device=model.device)
    logits = model(input_ids=ids_B_T, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    inner = [output[0] if isinstance(output, tuple) else output for output in outputs]
    if not all(bool(torch.isfinite(part).all()) for part in (*inner, logits)):
        name = next(key for key, value in PRECISIONS.items() if value is dtype)
        fix = "use bf16 or fp32" if dtype is torch.float16 else "use fp32"
        raise UserError(f"base.precision: {name} gives infinite or NaN activations with this base; {fix}")


def _hash_of_files(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.name} {known_sha256(path)}\n".encode())
    return total.hexdigest()
