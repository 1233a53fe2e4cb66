"""The model that needs no download: made on the spot, warmed up on answers, kept in the cache.

It is made from its recipe alone: other keys of the run change nothing.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, cast

import torch
import transformers
from filelock import FileLock
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import hybridrl
from hybridrl import env
from hybridrl.config.actor import ActorConfig, OptimizerConfig
from hybridrl.config.checks import fsdp2 as fsdp2_checks
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import ModelConfig, StarterConfig
from hybridrl.config.sft import SftConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ConfigError, TrainingError
from hybridrl.json_text import to_json_text
from hybridrl.metrics import Metrics
from hybridrl.run.loops import open_sft
from hybridrl.run.record import RunFolder
from hybridrl.run.workers import start_workers
from hybridrl.trainer.policy import Learner

log = logging.getLogger(__name__)

_TASK: Final = "sort_digits"
_LABEL = "making the starter model, once"
_MIN_DIGITS, _MAX_DIGITS = 2, 20
_NUM_ROWS = 10_000
_PACKAGE = Path(hybridrl.__file__).parent
_CODE = (
    *("data/sampler.py", "data/sort_digits.py", "data/starter_tokenizer.py", "data/supervised.py"),
    *("run/loops.py", "run/starter.py", "trainer/sft.py"),
    *("workers/train/optimizer.py",),
)
"""What decides how a starter is made: with other code it is another one."""


def find_model(config: ExperimentConfig, record: RunFolder) -> Path:
    """Return the folder of the model to start from; make the starter if that is asked for.

    Raises:
        ConfigError: the configuration names no model.
    """
    if config.model.path is not None:
        return Path(config.model.path)
    if config.model.starter is None:
        raise ConfigError(
            "model.path",
            None,
            rule="there is neither a folder nor a model to make",
            fix="set model.path=FOLDER, or model=starter",
        )
    recipe = recipe_of(config, config.model.starter)

    def teach(raw: Path, target: Path) -> None:
        warm_up(recipe, raw, config=config, record=record, target=target)

    return ensure_starter(recipe, cache=env.cache_dir(), warm_up=teach)


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


def warm_up(
    recipe: StarterRecipe,
    folder: Path,
    *,
    config: ExperimentConfig,
    record: RunFolder,
    target: Path,
) -> None:
    """Teach the made model its task to the point where rewards are neither all 0 nor all 1.

    The learning rate stays constant: annealed to 0, a model this small ends in so narrow a valley
    that the first steps of policy gradient throw it out (exact match .43 -> .11 in 20 steps at lr
    5e-5, with TRL alike), while from the noisy floor of a constant rate it learns at once.

    Args:
        recipe: all that decides the weights.
        folder: of the untrained model.
        config: of the run: where the one rank runs that teaches it, and how long it may take.
        record: is shown how far it is.
        target: the folder to write, atomically.

    Raises:
        TrainingError: it diverged.
        RunStopped: a signal ended the run meanwhile; nothing was written.
    """
    config = _warmup_config(config, recipe)
    record.phase(f"{_LABEL}: start workers")
    with (
        start_workers(config, folder, record=record) as workers,
        open_sft(config, folder, _WarmupRecorder(record, config.num_steps)) as training,
    ):
        loop = training.loop_of(workers)
        try:
            loop.run()
        except TrainingError as error:
            raise TrainingError(
                "a step of the starter model's warm-up had no finite loss or gradient; lower "
                f"model.starter.warmup_lr={recipe.starter.warmup_lr:g}"
            ) from error
        loop.interrupt.raise_if_unfinished()  # a half-taught model must not be kept as a whole one
        record.phase(f"{_LABEL}: export")
        cast(Learner, workers["actor"]).export_hf(target)


@dataclass(frozen=True, slots=True)
class _WarmupRecorder:
    """Shows the warm-up as one phase of the run; keeps nothing."""

    run: RunFolder
    num_steps: int

    def phase(self, name: str) -> None:
        """Do nothing: `record` says how far it is."""

    def begin_step(self, step: int) -> None:
        """Do nothing, likewise."""

    def record(self, step: int, metrics: Metrics) -> None:
        """Show how far it is."""
        loss = metrics["loss/supervised_nats"].value
        self.run.phase(f"{_LABEL}: step {step}/{self.num_steps}, loss {loss:.3f} nats")


def _warmup_config(config: ExperimentConfig, recipe: StarterRecipe) -> ExperimentConfig:
    """Return the configuration of the warm-up: every value that decides weights is the recipe's."""
    return replace(
        config,
        mode="sft",
        seed=recipe.seed,
        model=ModelConfig(path=None, starter=recipe.starter, dtype="float32", attention="padded"),
        actor=ActorConfig(
            engine="fsdp2",
            max_tokens_per_microbatch=8192,
            compute_dtype="float32",
            reduce_dtype="float32",
            gradient_checkpointing=False,
            logprob_chunk_tokens=4096,
            fsdp2=fsdp2_checks.UNUSED,
            optimizer=recipe.optimizer,
        ),
        lora=replace(config.lora, enabled=False),
        data=replace(
            config.data,
            task=_TASK,
            num_task_rows=recipe.num_rows,
            min_digits=recipe.min_digits,
            max_digits=recipe.max_digits,
            use_chat_template=False,
            max_prompt_tokens=recipe.max_digits + 1,
            overlong_prompts="error",
            shuffle=True,
        ),
        cluster=replace(config.cluster, num_nodes=1, num_ranks_per_node=1),
        trainer=replace(config.trainer, max_skipped_updates=0),
        sft=SftConfig(
            num_steps=recipe.starter.num_warmup_steps,
            batch_size=recipe.starter.warmup_batch_size,
            eval_every_num_steps=0,
        ),
    )
