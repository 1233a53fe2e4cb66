"""The model that needs no download: made on the spot, warmed up on answers, kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import hybridrl
from hybridrl.config.actor import OptimizerConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import StarterConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.json_text import to_json_text

log = logging.getLogger(__name__)

_TASK = "sort_digits"
_MIN_DIGITS, _MAX_DIGITS = 2, 20
_NUM_ROWS = 10_000
_PACKAGE = Path(hybridrl.__file__).parent
_CODE = (
    *("data/sampler.py", "data/sort_digits.py", "data/starter_tokenizer.py", "data/supervised.py"),
    *("run/starter.py", "run/starter_warmup.py", "trainer/sft.py"),
    *("workers/train/optimizer.py",),
)
"""What decides how a starter is made: with other code it is another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StarterRecipe:
    """All that the weights of a made model come from; nothing else may be read while it is made."""

    starter: StarterConfig
    """Shape, steps, batch size and learning rate."""

    seed: int
    """Of weights, rows and their order."""

    min_digits: int
    """Shortest number of the task it is taught."""

    max_digits: int
    """Longest number; prompt and answer fit into the context."""

    num_rows: int
    """Rows of that task."""

    optimizer: OptimizerConfig

    device: str
    """cpu or cuda: they round otherwise. One rank computes, in float32."""

    num_threads: int
    """OpenMP threads of that rank, on which rounding depends too."""

    @property
    def name(self) -> str:
        """Name of its folder in the cache: another one for each recipe, code and package."""
        parts = [asdict(self), _digest(_CODE), torch.__version__, transformers.__version__]
        return "starter-" + hashlib.sha256(to_json_text(parts).encode()).hexdigest()[:16]


def recipe_of(config: ExperimentConfig, starter: StarterConfig) -> StarterRecipe:
    """Return how the made model of a run is made.

    It is taught to sort digits whatever the run's data are: numbers as long as the run's own where
    that is its task, of 2 to 20 digits where rows come from files.
    """
    is_own_task = config.data.task == _TASK
    longest = config.data.max_digits if is_own_task else _MAX_DIGITS
    shortest = config.data.min_digits if is_own_task else _MIN_DIGITS
    # A number takes a token a digit: in the prompt with '=', in the answer with the end-of-text.
    room = max(1, starter.max_position_embeddings // 2 - 1)
    return StarterRecipe(
        starter=starter,
        seed=config.seed,
        min_digits=min(shortest, longest, room),
        max_digits=min(longest, room),
        num_rows=_NUM_ROWS,
        optimizer=OptimizerConfig(
            lr=starter.warmup_lr,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            schedule="constant",
            num_warmup_steps=starter.num_warmup_steps // 20,
            min_lr_ratio=0.0,
        ),
        device=config.cluster.device,
        num_threads=config.cluster.num_threads_per_rank,
    )


def ensure_starter(
    recipe: StarterRecipe, *, cache: Path, warm_up: Callable[[Path, Path], None]
) -> Path:
    """Return the folder of the made model; make it if the cache does not hold it.

    Args:
        recipe: how it is made.
        cache: folder of made models, see ``env.cache_dir``.
        warm_up: trains the model in the first folder and writes the second, atomically; it reads
            the recipe alone.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / recipe.name
    with FileLock(cache / f"{recipe.name}.lock"):  # two runs that start together make it once
        if not folder.is_dir():
            _make(recipe, folder=folder, warm_up=warm_up)
    return folder


def _make(recipe: StarterRecipe, *, folder: Path, warm_up: Callable[[Path, Path], None]) -> None:
    num_steps = recipe.starter.num_warmup_steps
    log.info("making the starter model, once: steps=%d folder=%s", num_steps, folder)
    raw = Path(tempfile.mkdtemp(prefix=f"{folder.name}-raw-", dir=folder.parent))
    try:
        write_random_model(recipe.starter, raw, seed=recipe.seed)
        if num_steps:
            warm_up(raw, folder)
        else:
            raw.rename(folder)
    finally:
        shutil.rmtree(raw, ignore_errors=True)


def _digest(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update((_PACKAGE / name).read_bytes())
    return digest.hexdigest()


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
