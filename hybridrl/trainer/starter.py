"""The model that needs no download: made on the spot, warmed up on answers, kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from hybridrl.config.data import DataConfig
from hybridrl.config.model import StarterConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

_FORMAT = 1
"""Part of the cache key: raise it when the same section makes other weights."""


def ensure_starter(
    starter: StarterConfig,
    *,
    data: DataConfig,
    seed: int,
    cache: Path,
    warm_up: Callable[[Path, Path], None],
) -> Path:
    """Return the folder of the made model; make it if the cache does not hold it.

    Args:
        starter: shape and warm-up.
        data: the task that it is warmed up on.
        seed: of its weights and its warm-up.
        cache: folder of made models, see ``env.cache_dir``.
        warm_up: trains the model in the first folder and writes the second, atomically.
    """
    key = to_json_text([_FORMAT, asdict(starter), data.min_digits, data.max_digits, seed])
    name = "starter-" + hashlib.sha256(key.encode()).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with FileLock(cache / f"{name}.lock"):  # two runs that start together make it once
        if not folder.is_dir():
            _make(starter, folder=folder, seed=seed, warm_up=warm_up)
    return folder


def _make(
    starter: StarterConfig, *, folder: Path, seed: int, warm_up: Callable[[Path, Path], None]
) -> None:
    log.info("making the starter model, once: steps=%d folder=%s", starter.num_warmup_steps, folder)
    raw = Path(tempfile.mkdtemp(prefix=f"{folder.name}-raw-", dir=folder.parent))
    try:
        write_random_model(starter, raw, seed=seed)
        if starter.num_warmup_steps:
            warm_up(raw, folder)
        else:
            raw.rename(folder)
    finally:
        shutil.rmtree(raw, ignore_errors=True)


def write_random_model(starter: StarterConfig, folder: Path, *, seed: int) -> None:
    """Write an untrained Qwen3 and its tokenizer; the same seed writes the same weights."""
    tokenizer = build_starter_tokenizer()
    shape = Qwen3Config(
        hidden_size=starter.hidden_size,
        num_hidden_layers=starter.num_layers,
        num_attention_heads=starter.num_attention_heads,
        num_key_value_heads=starter.num_key_value_heads,
        head_dim=starter.hidden_size // starter.num_attention_heads,
        intermediate_size=starter.intermediate_size,
        vocab_size=starter.vocab_size,
        max_position_embeddings=starter.max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    transformers_logging.disable_progress_bar()  # of a file written in 10 ms
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
