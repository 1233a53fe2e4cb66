"""The model that needs no download: made locally, warmed up on answers, kept in the cache.

It depends on a few keys of the run (`warmup_config`) and on no others.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, cast

import torch
import transformers
from filelock import FileLock
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

import hybridrl
from hybridrl import env
from hybridrl.config.actor import ActorConfig, FSDP2Config, OptimizerConfig
from hybridrl.config.algorithm import SftConfig
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.model import ModelConfig, StarterConfig
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ConfigError, TrainingError
from hybridrl.json_text import to_json_text
from hybridrl.metrics import Metrics
from hybridrl.models.architecture import starter_settings
from hybridrl.models.image_settings import PROCESSOR, STARTER_PROCESSOR, in_sections
from hybridrl.run.display import LiveView
from hybridrl.run.modes.offline import open_offline
from hybridrl.run.record import RunFolder
from hybridrl.run.workers import start_workers
from hybridrl.trainer.policy import Learner

log = logging.getLogger(__name__)

_LABEL = "making the starter model, once"
_NUM_ROWS_PER_STEP = 64
_NUM_ROWS = 10_000
_CONVERSATION_TOKENS = 96
_PACKAGE = Path(hybridrl.__file__).parent
_CODE = (
    *("data/sampler.py", "data/starter_tokenizer.py", "data/examples.py", "data/tasks.py"),
    *("data/drawn_numbers.py", "models/seeing.py", "config/model.py"),
    *("run/modes/offline.py", "run/rows.py", "run/starter.py"),
    *("workers/train/optimizer.py",),
)
"""Versions that decide a starter's weights: another version makes another starter."""


def find_model(config: ExperimentConfig, record: RunFolder) -> Path:
    """Return the folder of the initial model; make the starter if ``model.path`` is null.

    Made models are in the cache. A signal during the warm-up ends the run, and it is not there.
    """
    starter, cache = config.model.starter, env.cache_dir()
    if config.model.path is not None:
        return Path(config.model.path)
    if starter is None:
        raise ConfigError(
            "model.path",
            None,
            rule="there is neither a folder nor a model to make",
            fix="set model.path=FOLDER, or model=starter",
        )
    config = warmup_config(config, starter)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / starter_name(config)
    with FileLock(cache / f"{folder.name}.lock"):  # two runs that start together make it once
        if not folder.is_dir():
            log.info(
                "making the starter model of seed=%d, once; another seed gets another model, and "
                "model.path=FOLDER/hf gives all seeds one: steps=%d folder=%s",
                *(config.seed, config.num_steps, folder),
            )
            raw = Path(tempfile.mkdtemp(prefix=f"{folder.name}-raw-", dir=cache))
            try:
                write_random_model(starter, raw, seed=config.seed)
                if config.num_steps:
                    _warm_up(config, raw, record=record, target=folder)
                else:
                    raw.rename(folder)
            finally:
                shutil.rmtree(raw, ignore_errors=True)
    return folder


def starter_name(config: ExperimentConfig) -> str:
    """Name the folder of the model that a warm-up makes, by everything its weights depend on."""
    data, cluster, code = config.data, config.cluster, hashlib.sha256()
    for name in _CODE:
        code.update((_PACKAGE / name).read_bytes())
    parts = [
        *(config.seed, asdict(config.model), asdict(config.actor), asdict(config.sft)),
        *(data.task, data.num_task_rows, config.max_digits),
        *(cluster.device, cluster.num_threads_per_rank),  # they round differently
        *(code.hexdigest(), torch.__version__, transformers.__version__),
    ]
    return "starter-" + hashlib.sha256(to_json_text(parts).encode()).hexdigest()[:16]


def warmup_config(config: ExperimentConfig, starter: StarterConfig) -> ExperimentConfig:
    """Return the supervised run that teaches the made model, the same for most runs.

    It learns to read numbers if it sees, to call the calculator if that is the run's task, else to
    sort digits. The numbers have the lengths of the run's own task, or 2 to 20 digits (2 of a
    drawn number) if rows come from files. One rank computes, in float32.
    """
    task: Literal["sort_digits", "calculator", "read_numbers"] = "sort_digits"
    if starter.num_vision_layers:
        task = "read_numbers"
    elif config.data.task == "calculator":
        task = "calculator"
    max_digits, rollout = config.max_digits, config.rollout
    if config.data.task != task:
        max_digits, rollout = 20, replace(rollout, max_response_tokens=21)
    is_chat, num_rows = task != "sort_digits", _NUM_ROWS
    if task == "read_numbers":  # a row takes 1 ms: no more than are learned from
        num_rows = min(num_rows, _NUM_ROWS_PER_STEP * starter.num_warmup_steps)
    optimizer = OptimizerConfig(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        schedule="constant",
        num_warmup_steps=starter.num_warmup_steps // 20,
        min_lr_ratio=0.0,
    )
    return replace(
        config,
        mode="sft",
        model=ModelConfig(
            path=None, starter=starter, dtype="float32", attention="padded", freeze_vision=False
        ),
        actor=ActorConfig(
            engine="fsdp2",
            max_tokens_per_microbatch=8192,
            compute_dtype="float32",
            gradient_checkpointing=False,
            logprob_chunk_tokens=4096,
            replay_routing=False,
            fsdp2=FSDP2Config(),
            optimizer=optimizer,
        ),
        lora=replace(config.lora, enabled=False),
        data=replace(
            config.data,
            task=task,
            sources={},
            curriculum="none",
            num_task_rows=num_rows,
            use_chat_template=is_chat,
            max_prompt_tokens=_CONVERSATION_TOKENS if is_chat else max_digits + 1,  # with its '='
            overlong_prompts="error",
            shuffle=True,
        ),
        rollout=rollout,
        cluster=replace(config.cluster, num_nodes=1, num_ranks_per_node=1),
        trainer=replace(
            config.trainer,
            num_steps=starter.num_warmup_steps,
            num_prompts_per_step=_NUM_ROWS_PER_STEP,
            num_epochs=None,
        ),
        eval=replace(config.eval, every_num_steps=0),
        sft=SftConfig(turns="all" if task == "calculator" else "last"),
    )


def write_random_model(starter: StarterConfig, folder: Path, *, seed: int) -> None:
    """Write an untrained model and its tokenizer; the same seed writes the same weights."""
    tokenizer = build_starter_tokenizer(sees=starter.num_vision_layers > 0)
    settings = {
        **starter_settings(starter),
        "rms_norm_eps": 1e-6,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    transformers_logging.disable_progress_bar()  # of a file written in 10 ms
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if starter.num_vision_layers:
            shape = Qwen2_5_VLConfig(**in_sections(settings))
            Qwen2_5_VLForConditionalGeneration(shape).save_pretrained(folder)
            (folder / PROCESSOR).write_text(to_json_text(STARTER_PROCESSOR))
        else:
            Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _warm_up(config: ExperimentConfig, folder: Path, *, record: RunFolder, target: Path) -> None:
    """Teach the made model its task to the point where rewards are neither all 0 nor all 1.

    The learning rate stays constant. Annealed to 0, a model this small ends in a valley so narrow
    that the first policy-gradient steps throw it out (exact match .43 -> .11 in 20 steps at lr
    5e-5, with TRL alike). From the noisy floor of a constant rate it learns at once.
    """
    record.live.phase(f"{_LABEL}: start workers")

    def show(step: int, metrics: Metrics) -> None:
        loss = metrics["loss/supervised_nats"].value
        record.live.phase(f"{_LABEL}: step {step}/{config.num_steps}, loss {loss:.3f} nats")

    with start_workers(config, folder) as workers:
        # One phase of the run: a view of its own, which shows nothing, gets its phases and steps.
        training = open_offline(config, folder, LiveView(config.num_steps), show)
        loop = training.loop_of(workers)
        try:
            loop.run()
        except TrainingError as error:
            raise TrainingError(
                "steps of the starter model's warm-up had no finite loss or gradient; begin from "
                f"other weights than those of seed={config.seed}"
            ) from error
        loop.interrupt.raise_if_unfinished()  # a half-taught model must not be kept
        record.live.phase(f"{_LABEL}: export")
        cast(Learner, workers["actor"]).export_hf(target)
