"""Figures for megatron-core, worked out by hand from the sizes of two published models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.config.architecture import architecture_of
from hybridrl.planning.activations import Activations
from hybridrl.planning.memory import plan_critic_pool, plan_memory
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.page import plan_page
from hybridrl.planning.plan import MemoryKind
from hybridrl.planning.split import Split, count_parameters
from hybridrl.planning.workload import Microbatch, Workload
from tests.config.values import config_of
from tests.planning.models import QWEN3_8B, QWEN3_30B_A3B
from tests.planning.test_memory import part, phase

GIB = 2**30
PACK = Microbatch(
    num_tokens=1000, num_scored=400, num_key_slots=1000, num_mask_elements=0, num_microbatches=8
)
COMMON = (
    *("model=hf_folder", "model.starter=null", "cluster=one_gpu", "cluster.num_ranks_per_node=8"),
    *("cluster.ray_address=auto", "actor=megatron", "critic=megatron", "rollout=sglang"),
    *("actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16", "megatron.sequence_parallel=true"),
    *("critic.compute_dtype=bfloat16", "trainer.num_prompts_per_step=64"),
)


ENDS = ("megatron.num_layers_in_first_stage=22", "megatron.num_layers_in_last_stage=24")
UNEVEN = [22, 24, 24, 24]


@pytest.fixture
def dense(tmp_path: Path) -> tuple[str, ...]:
    """Qwen3-8B on 2 x 8 GPUs: tensor 4, data 4."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    sizes = ("cluster.num_nodes=2", "megatron.tensor_parallel_size=4")
    return (*COMMON, f"model.path={tmp_path}", *sizes)


@pytest.fixture
def sparse(tmp_path: Path) -> tuple[str, ...]:
    """Qwen3-30B-A3B on 4 x 8 GPUs: tensor 2, pipeline 2, data 8; experts over 8."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    sizes = ("tensor_parallel_size=2", "pipeline_parallel_size=2", "expert_parallel_size=8")
    return (
        *(*COMMON, f"model.path={tmp_path}", "cluster.num_nodes=4"),
        *(f"megatron.{size}" for size in sizes),
    )


def memory_of(*overrides: str, stage: int = 0, name: str = "actor") -> ModelMemory:
    config = config_of(*overrides)
    return ModelMemory(config, name, architecture_of(config.model), stage)


def pass_of(*overrides: str, stage: int = 0) -> Activations:
    return Activations(memory_of(*overrides, stage=stage), PACK)


# Of one layer of the 8B: query, key, value and output matrices, the MLP, norms, norms of heads.
_8B_LAYER = (2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288) // 4 + 2 * 4096 + 2 * 128
_8B_RANK = 36 * _8B_LAYER + 2 * 151936 // 4 * 4096 + 4096


def test_state_of_a_dense_model_on_one_rank(dense: tuple[str, ...]) -> None:
    memory = memory_of(*dense)
    assert _8B_RANK == 2_047_915_008
    assert memory.parameters.total == _8B_RANK
    assert memory.weights == 4_095_830_016  # 2 bytes each
    assert memory.buffers == 8_191_660_032  # 4 bytes each
    assert memory.masters == 2_047_915_008  # 4 bytes, divided by 4 data-parallel ranks
    assert memory.optimizer == 6_143_745_024  # and 8 more
    assert memory.snapshot == 6_143_745_024
    assert memory.gradients_at_end == 2 * 151936 // 4 * 4096  # of the embedding, the largest matrix
    assert memory_of(*dense, "actor.reduce_dtype=bfloat16").buffers == memory.weights
    frozen = memory_of(*dense, name="reference")
    assert (frozen.weights, frozen.buffers, frozen.optimizer) == (4_095_830_016, 0, 0)


def test_weights_that_are_float32_are_their_own_masters(dense: tuple[str, ...]) -> None:
    memory = memory_of(*dense, "actor.compute_dtype=float32", "actor.reduce_dtype=bfloat16")
    assert memory.weights == memory.buffers == 4 * _8B_RANK
    assert memory.masters == 0
    assert memory.optimizer == 2 * _8B_RANK  # 8 bytes, divided by 4
    assert memory.snapshot == 3 * _8B_RANK


def test_activations_of_a_dense_model_on_one_rank(dense: tuple[str, ...]) -> None:
    one = pass_of(*dense)
    # Both norms and their results, on a quarter of the tokens; norms of a quarter of the heads;
    # a quarter of the MLP and of the heads: queries, their output, keys and values; row sums of 8
    # heads; cosine and sine of a rotation for queries and keys, and the fused projection.
    layer = 16 * 4096 // 4 + 6 * 5120 // 4 + 10 * 12288 // 4 + 4 * (4096 + 1024) // 4 + 4 * 8
    layer += 2 * (4 * 128 + 5120 // 4)
    assert layer == 63_520
    assert one.saved_by_block == 1000 * layer
    head = 1000 * 4096 * 6 // 4 + 400 * 4096 * 2
    assert one.saved == 36 * 1000 * layer + head
    recomputed = pass_of(*dense, "actor.gradient_checkpointing=true")
    stream = 1000 * 4096 * 2 // 4
    assert recomputed.saved == 36 * stream + 1000 * layer + head
    spread = pass_of(*dense, "megatron.sequence_parallel=false")
    assert spread.saved_by_block == 1000 * (layer + 3 * 16 * 4096 // 4)
    assert one.logits_forward == 12 * 400 * 151936 // 4
    gradients = 151936 // 4 * 4096 * (4 + 2) + 400 * 4096 * 2  # of the embedding and its input
    assert one.logits_backward == 12 * 400 * 151936 // 4 + gradients
    with_entropy = pass_of(*dense, "algorithm.entropy_coefficient=0.01")
    assert with_entropy.logits_backward == 20 * 400 * 151936 // 4 + gradients


def test_state_of_a_model_with_experts_on_one_rank(sparse: tuple[str, ...]) -> None:
    first, last = memory_of(*sparse), memory_of(*sparse, stage=1)
    layer = 2 * 2048 * (4096 + 512) // 2 + 2 * 2048 + 2 * 128 + 2048 * 128  # and the router
    assert layer == 9_703_680
    words = 151936 // 2 * 2048
    assert first.parameters.dense == 24 * layer + words == 388_470_784
    assert last.parameters.dense == 24 * layer + words + 2048
    assert first.parameters.expert == 24 * 16 * 3 * 2048 * 768 == 1_811_939_328
    assert first.weights == 4_400_820_224
    # 8 data-parallel ranks divide what all have, 2 what 8 ranks of experts have.
    assert first.masters == 4 * (388_470_784 // 8 + 1_811_939_328 // 2) == 3_818_114_048
    assert first.optimizer == 3 * first.masters
    whole = memory_of(
        *sparse, "megatron.expert_parallel_size=2", "megatron.expert_tensor_parallel_size=4"
    )
    assert whole.parameters.expert == first.parameters.expert
    assert whole.optimizer == first.optimizer


def test_activations_of_a_model_with_experts_on_one_rank(sparse: tuple[str, ...]) -> None:
    one = pass_of(*sparse, stage=1)
    # 8 experts a token, and half of the tokens here: 4 pairs a token.
    experts = 4 * (5 * 768 + 2 * 2048) * 2 + 128 * 3 * 4 // 2
    layer = 16 * 2048 // 2 + 6 * 4608 // 2 + 4 * (4096 + 512) // 2 + 4 * 16 + experts
    layer += 2 * (4 * 128 + 4608 // 2)
    assert layer == 109_376
    assert one.saved_by_block == 1000 * layer
    received = 1000 * 2048 * 2 // 2
    head = 1000 * 2048 * 6 // 2 + 400 * 2048 * 2
    assert one.saved == 24 * 1000 * layer + received + head
    first = pass_of(*sparse)
    assert first.saved == 2 * (24 * 1000 * layer + received)  # 2 micro-batches wait
    assert first.logits_forward == first.logits_backward == 0


def test_some_layers_may_be_dense_and_the_stage_that_has_more_experts_is_fuller(
    sparse: tuple[str, ...], tmp_path: Path
) -> None:
    dense_first = {**QWEN3_30B_A3B, "mlp_only_layers": list(range(20))}
    (tmp_path / "config.json").write_text(json.dumps(dense_first))
    sparse = (*sparse, "rollout=hf")  # SGLang would give the dense layers experts
    first, last = memory_of(*sparse), memory_of(*sparse, stage=1)
    assert first.parameters.expert == 4 * 16 * 3 * 2048 * 768
    mlp, router = 3 * 2048 * 6144 // 2, 2048 * 128
    assert first.parameters.dense == 388_470_784 + 20 * (mlp - router)
    assert last.parameters.expert == 24 * 16 * 3 * 2048 * 768
    plan = plan_memory(config_of(*sparse))
    assert plan.stage == 1
    assert "stage 2 of 2: the fullest" in plan_page(config_of(*sparse))


@pytest.mark.parametrize(
    ("num_layers", "ends", "virtual", "lengths"),
    [(48, (), 1, [12] * 4), (48, (), 3, [12] * 4), (94, ENDS, 1, UNEVEN), (94, ENDS, 2, UNEVEN)],
)
def test_stages_hold_the_whole_model_between_them(
    sparse: tuple[str, ...],
    tmp_path: Path,
    num_layers: int,
    ends: tuple[str, ...],
    virtual: int,
    lengths: list[int],
) -> None:
    model = {**QWEN3_30B_A3B, "num_hidden_layers": num_layers}
    (tmp_path / "config.json").write_text(json.dumps(model))
    alone = ("megatron.tensor_parallel_size=1", "megatron.sequence_parallel=false", *ends)
    alone += ("megatron.expert_parallel_size=1", "megatron.pipeline_parallel_size=4")
    given = (*sparse, *alone, f"megatron.num_virtual_stages={virtual}")
    stages = [memory_of(*given, stage=stage) for stage in range(4)]
    whole = count_parameters(architecture_of(config_of(*given).model))
    assert sum(stage.parameters.total for stage in stages) == whole
    layers = [stage.split.layers_of(stage.architecture) for stage in stages]
    assert [len(of_stage) for of_stage in layers] == lengths
    assert sorted(layer for of_stage in layers for layer in of_stage) == list(range(num_layers))
    if virtual == 3:
        assert layers[1][:5] == (4, 5, 6, 7, 20)
    if virtual == 2:
        assert layers[1][:13] == (*range(11, 23), 58)


def test_words_are_padded_and_a_tied_embedding_stands_on_both_ends(
    dense: tuple[str, ...], tmp_path: Path
) -> None:
    tied = {**QWEN3_8B, "vocab_size": 151937, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    words = 151968 // 4 * 4096  # the next multiple of 8 x 4
    assert memory_of(*dense).parameters.total == 36 * _8B_LAYER + words + 4096
    two = (*dense, "megatron.pipeline_parallel_size=2")
    assert memory_of(*two).parameters.total == 18 * _8B_LAYER + words
    assert memory_of(*two, stage=1).parameters.total == 18 * _8B_LAYER + words + 4096
    critic = memory_of(*two, stage=1, name="critic")
    assert critic.parameters.total == 18 * _8B_LAYER + 2 * 4096 + 1


def test_an_adapter_is_cut_as_its_layer_and_has_the_only_optimizer(dense: tuple[str, ...]) -> None:
    lora = ("lora=default", "lora.rank=16", "lora.target_modules=[q_proj,o_proj]")
    memory = memory_of(*dense, *lora)
    numbers = 36 * 16 * ((4096 + 4096 // 4) + (4096 // 4 + 4096))
    assert memory.adapter_parameters.total == numbers == 5_898_240
    assert memory.weights == 2 * _8B_RANK + 4 * numbers
    assert memory.buffers == 4 * numbers
    assert memory.masters == 0
    assert memory.optimizer == 8 * numbers // 4


def test_each_expert_has_an_adapter_of_its_own(sparse: tuple[str, ...]) -> None:
    lora = ("lora=default", "lora.rank=4", "lora.target_modules=[up_proj,down_proj,k_proj]")
    memory = memory_of(*sparse, *lora)
    assert memory.adapter_parameters.expert == 24 * 16 * 2 * 4 * (768 + 2048)
    assert memory.adapter_parameters.dense == 24 * 4 * (512 // 2 + 2048)
    assert memory.adapter is not None
    assert Split().count_adapter(memory.architecture, memory.adapter).total == 48 * (
        128 * 2 * 4 * (768 + 2048) + 4 * (512 + 2048)
    )


@pytest.mark.parametrize(
    ("stages", "virtual", "num_microbatches", "expected"),
    [
        (1, 1, 8, [1]),
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (4, 2, 8, [5.5, 4.5, 3.5, 2.5]),
        (2, 3, 8, [7 / 3, 5 / 3]),
    ],
)
def test_a_stage_keeps_the_micro_batches_of_one_forward_one_backward(
    stages: int, virtual: int, num_microbatches: int, expected: list[float]
) -> None:
    splits = [
        Split(pipeline=stages, num_virtual=virtual, num_ranks=stages, stage=stage)
        for stage in range(stages)
    ]
    assert [split.in_flight(num_microbatches) for split in splits] == pytest.approx(expected)


def test_ranks_with_parts_of_one_model_train_on_the_same_rows(dense: tuple[str, ...]) -> None:
    config = config_of(*dense)
    workload = Workload.longest(config)
    assert workload.num_rows == 64 * 8 // 4
    assert workload.sampling(config).num_rows == 64 * 8 // 16
    plain = config_of(*dense, "actor=fsdp2", "critic=fsdp2", "megatron=default")
    assert Workload.longest(plain).num_rows == 64 * 8 // 16


def test_while_the_rollout_engine_is_awake_training_state_lies_on_the_host(
    dense: tuple[str, ...],
) -> None:
    plan = plan_memory(config_of(*dense, "rollout.sleep=true", "cluster.device_memory_gib=80"))
    memory = memory_of(*dense)
    assert part(plan, "update", "gradient buffers") == memory.buffers
    assert part(plan, "update", "optimizer") == memory.optimizer
    assert part(plan, "sync", "gradient buffers") == 0
    away = memory.weights + memory.optimizer
    assert phase(plan, "generate").bytes_on(MemoryKind.HOST) > away
    assert part(plan, "generate", "offloaded training state") == away
    awake = plan_memory(config_of(*dense))
    assert part(awake, "generate", "gradient buffers") == 0
    assert part(awake, "build", "gradient buffers") == memory.buffers  # made, and emptied
    assert part(awake, "build", "optimizer") == memory.masters  # moments come with the first step


def test_a_critic_in_its_own_pool_is_cut_over_its_own_ranks(dense: tuple[str, ...]) -> None:
    pool = ("algorithm=ppo", "critic.placement=own_pool", "critic.num_ranks_per_node=4")
    given = (*dense, *pool, "critic.compute_dtype=bfloat16", "trainer.num_prompts_per_step=512")
    config = config_of(*given)
    plan = plan_critic_pool(config)
    assert plan is not None
    numbers = _8B_RANK - 151936 // 4 * 4096 + 4096 + 1  # a value head for the output embedding
    assert part(plan, "critic_update", "critic weights") == 2 * numbers
    assert part(plan, "critic_update", "optimizer") == pytest.approx(12 * numbers / 2, abs=24)
    assert Workload.longest(config).num_rows == 512 * config.rollout.num_responses_per_prompt // 4


def test_an_optimizer_on_the_host_takes_nothing_of_the_device(dense: tuple[str, ...]) -> None:
    usual = memory_of(*dense)
    offload = "optimizer_cpu_offload: true"
    aware = "use_precision_aware_optimizer: true"

    def given(*args: str) -> ModelMemory:
        return memory_of(*dense, "mode=plan", f"megatron.optimizer_args={{{', '.join(args)}}}")

    share = usual.optimizer // 12
    away = given(offload, aware)
    assert (away.optimizer, away.masters) == (0, 0)
    assert away.host_optimizer == 16 * share  # masters, gradients and moments
    half = given(offload, aware, "optimizer_offload_fraction: 0.5")
    assert half.optimizer == pytest.approx(usual.optimizer / 2, abs=12)
    assert half.host_optimizer == pytest.approx(8 * share, abs=16)
    assert given(offload).optimizer == 4 * share  # masters on both
    small = given(aware, "exp_avg_dtype: bfloat16", "exp_avg_sq_dtype: bfloat16")
    assert (small.optimizer, small.host_optimizer) == (8 * share, 0)
    plan = plan_memory(
        config_of(*dense, "mode=plan", f"megatron.optimizer_args={{{offload}, {aware}}}")
    )
    assert part(plan, "update", "optimizer kept on the host") == away.host_optimizer
