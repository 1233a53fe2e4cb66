"""Small engines and batches for the tests of training engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms.load import Part
from hybridrl.algorithms.policy_losses.ppo import ppo_clip
from hybridrl.batch import (
    CriticBatch,
    RolloutBatch,
    SupervisedBatch,
    TrainBatch,
    jagged_from,
    row_lengths,
    spread_over_tokens,
)
from hybridrl.config.actor import (
    ActorConfig,
    CriticConfig,
    CriticOptimizerConfig,
    FSDP2Config,
    OptimizerConfig,
)
from hybridrl.config.model import ModelConfig
from hybridrl.models.packed_attention import AttentionKernel
from hybridrl.workers.train import checkpoint
from hybridrl.workers.train.checkpoint import CheckpointWriter
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.fsdp2 import FSDP2Backend
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.microbatcher import MicroBatcher
from hybridrl.workers.train.model_engine import TOKEN_MEAN, ModelEngine
from hybridrl.workers.train.policy_engine import PolicyEngine

CPU = torch.device("cpu")
LOSS = PolicyGradientLoss(policy_loss=Part.of(ppo_clip))

# With so large an eps a step of AdamW is nearly proportional to the gradient, so that weights after
# a step compare gradients; with a small one, noise in a gradient near 0 would flip a whole step.
OPTIMIZER = OptimizerConfig(
    lr=0.5,
    beta1=0.9,
    beta2=0.95,
    eps=1.0,
    weight_decay=0.0,
    max_grad_norm=1e9,
    schedule="constant",
    num_warmup_steps=0,
    min_lr_ratio=0.0,
)
ACTOR = ActorConfig(
    engine="fsdp2",
    max_tokens_per_microbatch=10_000,
    compute_dtype="float32",
    gradient_checkpointing=False,
    logprob_chunk_tokens=16,
    replay_routing=False,
    fsdp2=FSDP2Config(),
    optimizer=OPTIMIZER,
)
MODEL = ModelConfig(path=None, starter=None, dtype="float32", attention="auto", freeze_vision=True)


def build_fsdp2(folder: Path, *, config: ActorConfig = ACTOR) -> PolicyEngine:
    return PolicyEngine(
        FSDP2Backend(folder, config=config, model_config=MODEL, num_total_steps=10, device=CPU)
    )


def with_optimizer(**changes: object) -> ActorConfig:
    return replace(ACTOR, optimizer=replace(OPTIMIZER, **changes))  # type: ignore[arg-type]


def make_rows(
    num_rows: int, *, seed: int = 0, num_siblings: int = 1, max_half: int = 8
) -> TrainBatch:
    """Rows of 2 to 2 * max_half tokens, prompt first, with made-up columns.

    ``num_siblings`` neighbours have the same prompt; it divides ``num_rows``.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    prompts_B = draw(1, max_half + 1, num_rows // num_siblings).repeat_interleave(num_siblings)
    responses_B = draw(1, max_half + 1, num_rows)
    lengths_B = prompts_B + responses_B
    num_tokens = int(lengths_B.sum())
    begins_B = lengths_B.cumsum(0) - lengths_B
    positions = torch.arange(num_tokens) - begins_B.repeat_interleave(lengths_B)
    mask_BL = jagged_from(positions >= prompts_B.repeat_interleave(lengths_B), lengths_B)
    first_B = torch.arange(num_rows) // num_siblings * num_siblings
    first = begins_B[first_B].repeat_interleave(lengths_B) + positions
    token_ids = draw(0, 64, num_tokens)
    token_ids = torch.where(mask_BL.values(), token_ids, token_ids[first.clamp(max=num_tokens - 1)])
    logprobs = -3 * torch.rand(num_tokens, generator=generator) - 3
    return TrainBatch(
        token_ids_BL=jagged_from(token_ids, lengths_B),
        response_mask_BL=mask_BL,
        advantages_BL=spread_over_tokens(torch.randn(num_rows, generator=generator), mask_BL),
        sampler_logprobs_BL=jagged_from(logprobs, lengths_B),
        batch_size=[num_rows],
    )


def to_rollouts(batch: TrainBatch) -> RolloutBatch:
    nothing_B = torch.zeros(len(batch), dtype=torch.int64)
    return RolloutBatch(
        token_ids_BL=batch.token_ids_BL,
        response_mask_BL=batch.response_mask_BL,
        sampler_logprobs_BL=batch.sampler_logprobs_BL,
        prompt_index_B=nothing_B,
        policy_version_B=nothing_B,
        is_truncated_B=nothing_B.bool(),
        sequence_lengths_BQ=batch.sequence_lengths_BQ,
        images_B=batch.images_B,
        mask_counts_BL=batch.mask_counts_BL,
        mask_ids_BM=batch.mask_ids_BM,
        batch_size=[len(batch)],
    )


def add_masks(batch: TrainBatch, *, vocab_size: int = 64) -> TrainBatch:
    """Let about a fifth of the vocabulary be left before each response token, itself among it."""
    mask_T, lengths_B = batch.response_mask_BL.values(), row_lengths(batch.token_ids_BL)
    shape = (len(mask_T), vocab_size)
    is_left_TV = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.2
    is_left_TV[torch.arange(len(mask_T)), batch.token_ids_BL.values()] = True
    is_left_TV[~mask_T] = False
    counts_T = is_left_TV.sum(1).int()
    batch.mask_counts_BL = jagged_from(counts_T, lengths_B)
    rows_B = torch.stack([row.sum() for row in counts_T.split(lengths_B.tolist())])
    batch.mask_ids_BM = jagged_from(is_left_TV.nonzero()[:, 1].int(), rows_B)
    return batch


def make_conversations(num_rows: int, *, seed: int = 0) -> tuple[TrainBatch, TrainBatch]:
    """Rows of four turns whose thoughts are left out of later ones, and a row for each sequence.

    Two neighbours have the same prompt, and 68 of their first 70 sampled tokens are the same.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> list[int]:
        return torch.randint(0, 64, (size,), generator=generator).tolist()

    sequences: list[Tensor] = []
    num_sampled: list[int] = []
    history, thought = draw(5), draw(68)
    for row in range(num_rows):
        if row % 2 == 0:
            history, thought = draw(5), draw(68)
        context = history
        for turn in range(4):
            thoughts, answer = (draw(5) if turn else thought), draw(2 + turn)
            sequences.append(torch.tensor([*context, *thoughts, *answer]))
            num_sampled.append(len(thoughts) + len(answer))
            context = [*context, *answer, *draw(3)]
    lengths_R, sampled_R = (
        torch.tensor([len(each) for each in sequences]),
        torch.tensor(num_sampled),
    )
    tokens_N, num_tokens = torch.cat(sequences), int(lengths_R.sum())
    end_N = lengths_R.cumsum(0).repeat_interleave(lengths_R)
    mask_N = torch.arange(num_tokens) >= end_N - sampled_R.repeat_interleave(lengths_R)
    advantages_N = torch.randn(num_rows * 4, generator=generator).repeat_interleave(lengths_R)
    logprobs_N = -3 * torch.rand(num_tokens, generator=generator) - 3

    def batch(lengths_B: Tensor) -> TrainBatch:
        return TrainBatch(
            token_ids_BL=jagged_from(tokens_N, lengths_B),
            response_mask_BL=jagged_from(mask_N, lengths_B),
            advantages_BL=jagged_from(advantages_N * mask_N, lengths_B),
            sampler_logprobs_BL=jagged_from(logprobs_N, lengths_B),
            batch_size=[len(lengths_B)],
        )

    together = batch(lengths_R.view(-1, 4).sum(1))
    together.sequence_lengths_BQ = jagged_from(lengths_R, torch.full((num_rows,), 4))
    return together, batch(lengths_R)


def to_supervised(batch: TrainBatch) -> SupervisedBatch:
    return SupervisedBatch(
        token_ids_BL=batch.token_ids_BL,
        response_mask_BL=batch.response_mask_BL,
        batch_size=[len(batch)],
    )


def with_nan_advantage(batch: TrainBatch, row: int) -> TrainBatch:
    values_B = torch.zeros(len(batch))
    values_B[row] = torch.nan
    spoiled = batch.clone()
    spoiled.advantages_BL = spread_over_tokens(values_B, batch.response_mask_BL)
    return spoiled


def update(
    engine: PolicyEngine, batch: TrainBatch, *, aggregation: Part = TOKEN_MEAN
) -> dict[str, Any]:
    metrics = engine.update(
        batch, loss=LOSS, aggregation=aggregation, temperature=0.9, max_response_tokens=8
    )
    return {name: metric.value for name, metric in metrics.items()}


def save(engine: ModelEngine, folder: Path) -> None:
    """Write this rank's file of a checkpoint."""
    writer = CheckpointWriter()
    rank, world_size = _place()
    name = checkpoint.file_name(rank=rank, world_size=world_size)
    writer.begin(engine, folder / name, notes={})
    writer.collect(waits=True)
    writer.close()


def load(engine: ModelEngine, folder: Path) -> checkpoint.Notes:
    """Load the checkpoint of all ranks."""
    rank, world_size = _place()
    return checkpoint.load(engine, folder, rank=rank, world_size=world_size)


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def weights_of(engine: PolicyEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def fsdp2_of(engine: PolicyEngine) -> FSDP2Backend:
    assert isinstance(engine.backend, FSDP2Backend)
    return engine.backend


def whole_tensors(engine: ModelEngine) -> dict[str, Tensor]:
    """Return the live tensors of a checkpoint, each of which this rank has one shard of."""
    tensors = {}
    for name, tensor in engine.checkpoint_tensors().items():
        (shard,) = tensor.shards
        tensors[name] = shard.values
    return tensors


def after(name: str) -> Callable[[str], str]:
    """For ``msg`` of ``assert_close``: its own message after a tensor's name."""
    return lambda message: f"{name}: {message}"


def assert_same_weights(
    one: dict[str, Tensor], other: dict[str, Tensor], *, atol: float = 0.0
) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=atol, msg=after(name))


def rows_of(batch: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    return batch[torch.tensor(list(rows), dtype=torch.int64)]


def lengths(batch: TrainBatch) -> list[int]:
    return row_lengths(batch.token_ids_BL).tolist()


CRITIC = CriticConfig(
    optimizer=CriticOptimizerConfig(lr=OPTIMIZER.lr),
    num_warmup_steps=0,
    num_epochs=1,
    num_minibatches=1,
    value_clip=0.0,
    num_ranks_per_node=0,
)


def make_lessons(num_rows: int, *, seed: int = 0, num_siblings: int = 1) -> CriticBatch:
    """Rows as ``make_rows`` makes them, with returns and old values of about 1."""
    rows = make_rows(num_rows, seed=seed, num_siblings=num_siblings)
    generator = torch.Generator().manual_seed(seed + 100)

    def column() -> Tensor:
        values = torch.randn(rows.token_ids_BL.values().shape, generator=generator)
        values = torch.where(rows.response_mask_BL.values(), values, 0.0)
        return jagged_from(values, row_lengths(rows.token_ids_BL))

    return CriticBatch(
        token_ids_BL=rows.token_ids_BL,
        response_mask_BL=rows.response_mask_BL,
        old_values_BL=column(),
        returns_BL=column(),
        batch_size=[num_rows],
    )


def make_batcher(
    kernel: AttentionKernel = "padded", *, max_tokens: int = 100, **options: Any
) -> MicroBatcher:
    return MicroBatcher(
        kernel=kernel, max_tokens=max_tokens, ranks=Ranks(CPU), device=CPU, **options
    )
