"""The JSON files of a Hugging Face model folder: every error in one is named.

Imports no torch, so that ``mode=check`` can read a folder quickly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import gettempdir
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open

from hybridrl.errors import ModelError
from hybridrl.json_text import to_json_text

CONFIG = "config.json"
GENERATION = "generation_config.json"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""How images are cut: the first is transformers 5's, the other an older file for images alone."""

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
"""By ``model_type``: language models that are published within one that also sees."""

SEEING = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""By ``model_type``: models whose vision tower is used, and trained if wanted."""

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}
"""Of the language model's weights in such folders, and in a folder of itself."""

_SEEING_PREFIXES = _PREFIXES | {
    "model.visual.": "visual.",
    "visual.": "visual.",
    "model.": "model.",
}
"""Likewise, where the tower is used; the last two are those of the first Qwen2.5-VL."""

_MAX_SHOWN = 60


def read_settings(folder: Path) -> dict[str, Any]:
    """Read ``config.json``; ``ModelError`` if it is missing or has impossible values.

    Of a model that also sees the settings of its language model, as in a folder of its own.
    """
    values = _text_settings(folder, read_json(folder / CONFIG))
    _refuse_first(folder / CONFIG, _problems_of_config(values))
    return values


def vision_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the tower of a model that sees, with ``image_token_id``; None: none.

    Towers of ``TEXT_CLASSES`` are kept in the folder, and not used.
    """
    values = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if _kind_that_sees(folder, values) is None:
        return None
    tower = values.get("vision_config")
    known = tower if isinstance(tower, dict) else {}
    return {**known, "image_token_id": values.get("image_token_id")}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; ``ModelError`` if the file holds none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as err:
        raise ModelError(f"{file} is nested too deep to be read; download it again") from err
    except (OSError, ValueError) as err:
        raise ModelError(f"{file} cannot be read ({err}); download it again") from err
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ModelError(f"{file} holds a JSON {kind}, must be an object; download it again")
    return values


def _refuse_first(file: Path, problems: Iterator[str]) -> None:
    for problem in problems:
        raise ModelError(f"{file}: {problem}; correct it, or download it again")


def has_other_parts(folder: Path) -> bool:
    """Whether a folder's language model is within a model that also sees, or could."""
    if not (folder / CONFIG).is_file():
        return False
    settings = read_json(folder / CONFIG)
    return _text_settings(folder, settings) is not settings


def _kind_that_sees(folder: Path, values: dict[str, Any]) -> str | None:
    """Return the ``model_type`` of a model whose tower is used; see ``SEEING``.

    Without an image processor, a language model that is also published alone is read alone.
    """
    kind, text = values.get("model_type"), values.get("text_config")
    if kind not in tuple(SEEING):  # it may be anything
        return None
    may_be_alone = isinstance(text, dict) and text.get("model_type") in TEXT_CLASSES
    cuts_images = any((folder / name).is_file() for name in PROCESSORS)
    return str(kind) if cuts_images or not may_be_alone else None


def _text_settings(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    text = values.get("text_config")
    if (seeing := _kind_that_sees(folder, values)) is not None:
        # The first Qwen2.5-VL has no section for its language model.
        own = values if text is None else {**values, **text}
        model = {"model_type": f"{seeing}_text", "architectures": [SEEING[seeing]]}
        return {**own, **model, "tie_word_embeddings": values.get("tie_word_embeddings")}
    if not isinstance(text, dict) or text.get("model_type") not in TEXT_CLASSES:
        return values
    names = ("tie_word_embeddings", "quantization_config", "dtype")
    of_both = {name: values[name] for name in names if name in values}
    return {**of_both, **text, "architectures": [TEXT_CLASSES[text["model_type"]]]}


def text_folder(folder: Path) -> Path:
    """Return a folder whose config.json is the language model's; with weights only if it is given.

    SGLang is built of it without files of weights. The new one is named by what it holds. A folder
    whose tower is used is returned as it is.
    """
    if vision_settings(folder) is not None or not has_other_parts(folder):
        return folder
    text = to_json_text(read_settings(folder), indent=2)
    name = f"hybridrl-language-model-{os.getuid()}-{sha256(text.encode()).hexdigest()[:16]}"
    target = Path(gettempdir()) / name
    target.mkdir(exist_ok=True, mode=0o700)
    staged = target / f".{os.getpid()}"
    staged.write_text(text, encoding="utf-8")
    staged.replace(target / CONFIG)
    return target


def own_name(stored: str, *, sees: bool) -> str | None:
    """Return the name here of a weight in a folder with other parts; None: of a part not used."""
    for prefix, own in (_SEEING_PREFIXES if sees else _PREFIXES).items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None


def read_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a response by ``generation_config.json``, if the file exists."""
    file = folder / GENERATION
    if not file.exists():
        return ()
    vocab_size = read_settings(folder).get("vocab_size") if (folder / CONFIG).exists() else None
    values = read_json(file)
    _refuse_first(file, _problems_of_stop_tokens(values, vocab_size))
    listed = values.get("eos_token_id")
    return (listed,) if isinstance(listed, int) else tuple(listed or ())


def read_weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; ``ModelError`` if one is not beside it."""
    values = read_json(folder / INDEX)
    _refuse_first(folder / INDEX, _problems_of_index(values))
    weight_map: dict[str, str] = values["weight_map"]
    return weight_map


def num_labels_of(folder: Path) -> int:
    """Return the numbers that a classifier gives; transformers takes 2 where none are listed."""
    values = read_settings(folder)
    labels, count = values.get("id2label"), values.get("num_labels")
    if isinstance(labels, Mapping):
        return len(labels)
    return count if _is_whole(count) else 2


def problem_of(folder: Path) -> str:
    """Return the error in the JSON files of an existing folder; empty if there is none."""
    try:
        read_settings(folder)
        read_stop_tokens(folder)
        if (folder / INDEX).exists():
            read_weight_map(folder)
    except ModelError as error:
        return str(error)
    return ""


def flaw_of_files(folder: Path) -> str:
    """Return which file of weights or tokenizer a folder lacks, or has in part; empty if none."""
    if flaw := missing_tokenizer_of(folder):
        return flaw
    has_index = (folder / INDEX).exists()
    weights = sorted(set(read_weight_map(folder).values())) if has_index else [WEIGHTS]
    for name in weights:
        if not (folder / name).is_file():
            return f"it has no {name}"
        try:
            safe_open(folder / name, framework="np")  # reads header and length
        except (SafetensorError, OSError) as error:
            num_bytes = (folder / name).stat().st_size
            return f"{folder / name} is {num_bytes:,} bytes long, and incomplete: {error}"
    return ""


def missing_tokenizer_of(folder: Path) -> str:
    """Return that a folder has no tokenizer: transformers would make one without tokens."""
    if any((folder / name).is_file() for name in _TOKENIZERS):
        return ""
    return f"it has no tokenizer: none of {', '.join(_TOKENIZERS)}"


def _problems_of_config(values: Mapping[str, object]) -> Iterator[str]:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        yield f"holds no model_type, but {_shown(model_type)}"
    for name in _SIZES:
        size = values.get(name)
        if size is not None and not (_is_whole(size) and size > 0):
            yield f"{name}={_shown(size)} is not an integer above 0"
    if values.get("quantization_config") and not is_mxfp4(values):
        yield (
            "quantization_config says that the weights are quantised, and their scales would not "
            "be read; take a folder with float weights"
        )
    pad, vocab_size = values.get("pad_token_id"), values.get("vocab_size")
    if pad is not None and not _is_whole(pad):
        yield f"pad_token_id={_shown(pad)} is no token"
    elif _is_whole(pad) and _is_whole(vocab_size) and not -vocab_size <= pad < vocab_size:
        # -1 is some llamas' "none".
        yield f"pad_token_id={pad} is not in the vocabulary of vocab_size={vocab_size} tokens"


def is_mxfp4(values: Mapping[str, Any]) -> bool:
    """Whether a folder has the experts of gpt-oss in MXFP4, which are read as bfloat16."""
    quantization = values.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return values.get("model_type") == "gpt_oss" and method == "mxfp4"


def _problems_of_stop_tokens(values: Mapping[str, object], vocab_size: object) -> Iterator[str]:
    listed = values.get("eos_token_id")
    tokens = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for token in tokens:
        if not _is_whole(token):
            yield f"eos_token_id={_shown(listed)}: {_shown(token)} is no token"
        elif token < 0 or (_is_whole(vocab_size) and token >= vocab_size):
            yield f"eos_token_id={token} is not in the vocabulary of {vocab_size} tokens"


def _problems_of_index(values: Mapping[str, object]) -> Iterator[str]:
    weight_map = values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        yield f"weight_map is {_shown(weight_map)}, must name the file of each tensor"
        return
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            yield f"weight_map[{name!r}]={_shown(file)} is no file beside it"


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
