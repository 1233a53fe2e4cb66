"""Teaches the made model its own task from its recipe alone: other keys change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from hybridrl.config.actor import ActorConfig
from hybridrl.config.checks import fsdp2 as fsdp2_checks
from hybridrl.config.checks import megatron as megatron_checks
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.config.model import ModelConfig
from hybridrl.data.prompts import tokenize_rows
from hybridrl.data.rows import fingerprint
from hybridrl.data.sampler import RowSampler
from hybridrl.data.sort_digits import build_sort_digits_rows
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import TrainingError
from hybridrl.metrics import Metrics
from hybridrl.run.cluster import start_group
from hybridrl.run.record import RunFolder, WarmupLogger
from hybridrl.run.starter import StarterRecipe
from hybridrl.trainer.loop import Loop, UpdateGuard
from hybridrl.trainer.policy import Learner
from hybridrl.trainer.sft import SupervisedFineTuning
from hybridrl.workers.build import TrainSpec
from hybridrl.workers.supervised import SupervisedWorker

_OFF = LoraConfig(
    enabled=False,
    rank=1,
    alpha=1.0,
    use_rslora=False,
    dropout=0.0,
    target_modules=(),
    sync="merged",
    base="auto",
    init_from=None,
)


def warm_up(
    recipe: StarterRecipe, folder: Path, *, cluster: ClusterConfig, record: RunFolder, target: Path
) -> None:
    """Teach the made model its task to the point where rewards are neither all 0 nor all 1.

    The learning rate stays constant: annealed to 0, a model this small ends in so narrow a valley
    that the first steps of policy gradient throw it out (exact match .43 -> .11 in 20 steps at lr
    5e-5, with TRL alike), while from the noisy floor of a constant rate it learns at once.

    Args:
        recipe: all that decides what the weights become.
        folder: of the untrained model.
        cluster: where the one rank runs that teaches it, and how long it may take.
        record: is shown how far it is.
        target: the folder to write, atomically.

    Raises:
        TrainingError: it diverged.
        RunStopped: a signal ended the run meanwhile; nothing was written.
    """
    num_steps = recipe.starter.num_warmup_steps
    progress = WarmupLogger(record, label="making the starter model, once", num_steps=num_steps)
    progress.phase("start workers")
    with start_group(
        replace(cluster, num_nodes=1, num_ranks_per_node=1),
        SupervisedWorker,
        _build_spec(recipe, folder, timeout_s=cluster.collective_timeout_s),
    ) as group:
        learner = cast(Learner, group)
        loop = _build_loop(recipe, folder, learner, progress)
        try:
            loop.run()
        except TrainingError as error:
            raise TrainingError(
                "a step of the starter model's warm-up had no finite loss or gradient; lower "
                f"model.starter.warmup_lr={recipe.starter.warmup_lr:g}"
            ) from error
        loop.interrupt.raise_if_unfinished()  # a half-taught model must not be kept as a whole one
        progress.phase("export")
        learner.export_hf(target)


def _build_loop(
    recipe: StarterRecipe, folder: Path, learner: Learner, progress: WarmupLogger
) -> Loop:
    tokenizer = load_tokenizer(folder, needs_chat_template=False)
    rows = tokenize_rows(
        build_sort_digits_rows(
            recipe.num_rows,
            split="train",
            seed=recipe.seed,
            min_digits=recipe.min_digits,
            max_digits=recipe.max_digits,
        ),
        tokenizer,
        use_chat_template=False,
        max_prompt_tokens=recipe.max_digits + 1,
        overlong="error",
    )
    sampler = RowSampler(
        len(rows),
        seed=recipe.seed,
        shuffle=True,
        fingerprint=fingerprint(row.row for row in rows),
    )
    tuning = SupervisedFineTuning(
        learner=learner,
        tokenizer=tokenizer,
        rows=rows,
        sampler=sampler,
        batch_size=recipe.starter.warmup_batch_size,
        dp_size=1,
    )

    def take_step(step: int) -> Metrics:
        return tuning.step()

    return Loop(
        take_step=take_step,
        evaluate=lambda _: {},
        recorder=progress,
        num_steps=recipe.starter.num_warmup_steps,
        eval_every=0,
        guard=UpdateGuard(max_skipped=0),
    )


def _build_spec(recipe: StarterRecipe, folder: Path, *, timeout_s: float) -> TrainSpec:
    return TrainSpec(
        model_folder=folder.absolute(),
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
        megatron=megatron_checks.UNUSED,
        lora=_OFF,
        seed=recipe.seed,
        device=recipe.device,
        num_total_updates=recipe.starter.num_warmup_steps,
        max_response_tokens=recipe.max_digits + 1,
        collective_timeout_s=timeout_s,
    )
