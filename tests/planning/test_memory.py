from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hybridrl.batch import jagged, jagged_from
from hybridrl.config.architecture import read_architecture
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora import ATTENTION_LINEAR
from hybridrl.models.adapter import Adapter
from hybridrl.models.load import build_empty_model
from hybridrl.models.packed_model import PackedModel, PackedTokens
from hybridrl.planning.activations import Activations
from hybridrl.planning.memory import plan_critic_pool, plan_memory
from hybridrl.planning.model_memory import ModelMemory
from hybridrl.planning.page import plan_page
from hybridrl.planning.plan import MemoryKind, MemoryPlan, Phase
from hybridrl.planning.split import Split
from hybridrl.planning.workload import Workload
from hybridrl.workers.train.microbatcher import lay_out
from hybridrl.workers.train.shards import build_model
from tests.config.values import config_of
from tests.tiny_models import (
    SPARSE,
    TRAINED,
    Family,
    make_tiny_classifier,
    make_tiny_model,
)
from tests.workers.train.critics import CRITIC
from tests.workers.train.engines import ACTOR, CPU
from tests.workers.train.lora_engines import with_lora
from tests.workers.train.microbatchers import make_batcher

GPU = ("cluster=one_gpu", "actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16")


def plan_of(*overrides: str) -> MemoryPlan:
    return plan_memory(config_of(*overrides))


def phase(plan: MemoryPlan, name: str) -> Phase:
    return next(phase for phase in plan.phases if phase.name == name)


def part(plan: MemoryPlan, phase_name: str, name: str) -> int:
    return sum(p.num_bytes for p in phase(plan, phase_name).items if p.name == name)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("siblings", [1, 4])
def test_activations_are_what_autograd_keeps(
    family: Family, siblings: int, checkpointing: bool, tmp_path: Path
) -> None:
    """Exact up to positions, rotary angles and other columns of one number a token."""
    folder = make_tiny_model(tmp_path, family, hidden_size=128, num_layers=3)
    policy = build_model(
        folder, config=ACTOR, dtype=torch.float32, device=CPU, num_ranks=1, is_trainable=True
    )
    config = _config(checkpointing=checkpointing)
    planned = ModelMemory(config, "actor", read_architecture(folder))
    _compare_activations(policy, planned, siblings=siblings)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "modules", [("all-linear",), ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj")]
)
def test_beside_an_adapter_only_its_inputs_are_kept(
    modules: tuple[str, ...], checkpointing: bool, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=128, num_layers=3)
    lora = with_lora(target_modules=modules)
    policy = build_model(
        folder,
        config=ACTOR,
        dtype=torch.float32,
        device=CPU,
        num_ranks=1,
        is_trainable=True,
        adapt=Adapter(lora, seed=0).inject,
    )
    config = replace(_config(checkpointing=checkpointing), lora=lora)
    planned = ModelMemory(config, "actor", read_architecture(folder))
    trained = [p.numel() for p in policy.parameters() if p.requires_grad]
    assert planned.trained.total == sum(trained)
    _compare_activations(policy, planned, siblings=4)


@pytest.mark.parametrize("family", SPARSE)
def test_frozen_experts_keep_no_inputs_of_products(family: Family, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family, hidden_size=128, num_layers=3)
    lora = with_lora(target_modules=ATTENTION_LINEAR)
    adapt = Adapter(lora, seed=0).inject
    policy = build_model(folder, config=ACTOR, dtype=torch.float32, device=CPU, adapt=adapt)
    config = replace(_config(checkpointing=False), lora=lora)
    planned = ModelMemory(config, "actor", read_architecture(folder))
    _compare_activations(policy, planned, siblings=4)


def test_gathered_are_the_blocks_with_experts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2_moe", num_layers=4, shared_expert_intermediate_size=9)
    model = build_empty_model(folder, dtype=torch.float32)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    root = model.num_parameters() - sum(blocks)
    config = config_of("cluster.num_ranks_per_node=2")
    planned = ModelMemory(config, "actor", read_architecture(folder))
    assert planned.gathered == 4 * (root + 3 * max(blocks))
    largest = max(p.numel() for p in model.model.layers[0].parameters())
    assert Split().largest_gathered(planned.architecture) == largest


def test_a_critic_has_no_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, hidden_size=128, num_layers=3)
    critic = build_model(folder, config=CRITIC, dtype=torch.float32, device=CPU, num_ranks=1)
    planned = ModelMemory(_config(checkpointing=False), "critic", read_architecture(folder))
    assert planned.trained.total == sum(p.numel() for p in critic.parameters())
    one = _compare_activations(critic, planned, siblings=1)
    assert one.logits_forward == 0


def _config(*, checkpointing: bool) -> ExperimentConfig:
    return config_of(*(["actor.gradient_checkpointing=true"] if checkpointing else []))


def _compare_activations(model: PackedModel, planned: ModelMemory, *, siblings: int) -> Activations:
    checkpointing = planned.engine.gradient_checkpointing
    if checkpointing:
        model.train()
        model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = make_pack(num_prompts=8 // siblings, siblings=siblings)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scored = model(tokens) if planned.has_value_head else model(tokens, 1.0)
    num_bytes = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    del scored
    one = Activations(planned, workload_of(siblings).microbatch(shares_prompts=True))
    assert one.microbatch.num_tokens == len(tokens.token_ids_T)
    assert one.microbatch.num_scored == len(tokens.scored_S)
    # A recomputed block is kept by the backward pass alone.
    predicted = one.saved - checkpointing * one.saved_by_block
    assert num_bytes == pytest.approx(predicted, rel=0.03, abs=4096)
    return one


def workload_of(siblings: int) -> Workload:
    """Eight rows of 6 + 10 tokens, as ``make_pack`` makes them."""
    return Workload(
        num_rows=8,
        num_rows_per_update=8,
        group_size=siblings,
        num_prompt_tokens=6,
        num_response_tokens=10,
        max_tokens_per_microbatch=10_000,
    )


def make_pack(*, num_prompts: int, siblings: int) -> PackedTokens:
    prompt, response = 6, 10
    rows = [
        torch.cat([torch.full((prompt,), 1 + p), torch.arange(response)])
        for p in range(num_prompts)
        for _ in range(siblings)
    ]
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(prompt + response) >= prompt).repeat(len(rows))
    batcher = make_batcher()
    batch = batcher.read(jagged(rows), jagged_from(mask, lengths))
    return lay_out(batch, range(len(rows)), batcher).tokens


def test_a_plan_lists_the_phases_of_a_run_and_parts_add_up_to_each_peak() -> None:
    plan = plan_of("rollout.sleep=true", "algorithm.old_logprobs=recompute")
    names = [p.name for p in plan.phases]
    assert names == [
        "build",
        "offload_optimizer",
        "sync",
        "generate",
        "logprobs",
        "update",
        "export",
    ]
    for one in plan.phases:
        assert plan.peak_bytes(one) == sum(p.num_bytes for p in one.items)
        assert all(p.num_bytes > 0 for p in one.items)
    assert phase(plan, "generate").bytes_on(MemoryKind.HOST) > 0  # on a CPU the same memory
    assert plan.fullest.name == "update"


def test_on_a_gpu_a_sleeping_engine_and_the_training_state_are_never_there_together() -> None:
    awake, asleep = plan_of(*GPU), plan_of(*GPU, "rollout.sleep=true")
    assert part(awake, "update", "KV cache") > 0
    assert part(asleep, "update", "KV cache") == part(asleep, "update", "rollout weights") == 0
    assert part(asleep, "generate", "optimizer") == 0
    away = phase(asleep, "generate").bytes_on(MemoryKind.HOST)
    assert away - phase(awake, "generate").bytes_on(MemoryKind.HOST) == part(
        asleep, "generate", "offloaded training state"
    )
    both = {"actor weights", "rollout weights"}
    assert both <= {p.name for p in phase(asleep, "sync").items}


SERVED = ("rollout=sglang", "rollout.dtype=bfloat16", *GPU, "rollout.sleep=true")


def test_sglang_takes_its_share_of_a_gpu_and_its_memory_is_no_part_of_the_ranks() -> None:
    sizes = ("cluster.device_memory_gib=80", "rollout.memory_fraction=0.5")
    plan = plan_of(*SERVED, *sizes)
    held = [part(plan, "generate", name) for name in ("rollout weights", "KV cache")]
    assert sum(held) == 40 * 2**30
    generate = phase(plan, "generate")
    assert plan.measured_bytes(generate) < plan.peak_bytes(generate) - sum(held)
    assert part(plan, "update", "SGLang's processes") > 2**30
    assert part(plan_of(*GPU), "update", "SGLang's processes") == 0


@pytest.mark.parametrize(
    ("override", "phase_name"),
    [
        ("actor.gradient_checkpointing=true", "update"),
        ("actor.max_tokens_per_microbatch=1024", "update"),
        ("rollout.sleep=true", "update"),
        ("rollout.num_slots=16", "generate"),
        ("rollout.num_slots=16", "update"),
    ],
)
def test_what_saves_memory_saves_it_in_its_phase(override: str, phase_name: str) -> None:
    before, after = plan_of(), plan_of(override)
    assert after.peak_bytes(phase(after, phase_name)) < before.peak_bytes(phase(before, phase_name))


def test_state_is_divided_over_ranks_and_a_reference_is_one_more_model() -> None:
    one = plan_of(*GPU)
    two = plan_of(*GPU, "cluster.num_ranks_per_node=2")
    assert part(two, "sync", "optimizer") * 2 == pytest.approx(part(one, "sync", "optimizer"), 1e-3)
    kl = ("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.01")
    with_reference = plan_of(*GPU, *kl)
    weights = part(with_reference, "update", "reference weights")
    assert weights == part(with_reference, "update", "actor weights")
    assert part(with_reference, "update", "optimizer") == part(one, "update", "optimizer")


def test_backups_of_all_weights_stay_on_the_host_while_training() -> None:
    plan = plan_of("rollout.sleep=true", "rollout.backup_weights=always")
    assert part(plan, "update", "backup of rollout weights") == part(
        plan, "sync", "rollout weights"
    )


def test_shorter_rows_than_planned_take_less() -> None:
    config: ExperimentConfig = config_of()
    short = Workload.longest(config).measured(
        prompt_tokens=8, response_tokens=8, microbatch_tokens=900
    )
    longest, shorter = plan_memory(config), plan_memory(config, workload=short)
    assert part(shorter, "update", "activations") < 0.4 * part(longest, "update", "activations")
    assert part(shorter, "update", "KV cache") == part(longest, "update", "KV cache")


def test_a_fused_critic_is_one_more_model_that_leaves_with_the_others() -> None:
    ppo = (*GPU, "algorithm=ppo", "rollout.sleep=true")
    plan = plan_of(*ppo)
    names = [p.name for p in plan.phases]
    assert names[-5:] == ["values", "logprobs", "critic_update", "update", "export"]
    assert part(plan, "update", "critic weights") > 0
    assert part(plan, "generate", "critic weights") == 0
    alone = plan_of(*GPU, "rollout.sleep=true")
    assert part(plan, "update", "optimizer") > 1.9 * part(alone, "update", "optimizer")
    smaller = plan_of(*ppo, "critic.max_tokens_per_microbatch=256")
    for name in ("values", "critic_update"):
        assert smaller.peak_bytes(phase(smaller, name)) < plan.peak_bytes(phase(plan, name))
    assert phase(smaller, "update") == phase(plan, "update")


def test_a_critic_in_its_own_pool_is_planned_apart() -> None:
    pool = ("algorithm=ppo", "critic.placement=own_pool", "critic.num_ranks_per_node=2")
    policy, critic = plan_of(*pool), plan_critic_pool(config_of(*pool))
    assert critic is not None
    assert plan_critic_pool(config_of("algorithm=ppo")) is None
    assert "critic weights" not in policy.item_names
    assert "actor weights" not in critic.item_names
    assert [p.name for p in critic.phases] == ["build", "values", "critic_update", "export"]
    assert "\npeak of a rank of the critic's own " in plan_page(config_of(*pool))


def test_an_adapter_has_the_only_moments_and_the_reference_is_free() -> None:
    kl = ("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.01")
    whole, lora = plan_of(*GPU), plan_of(*GPU, "lora=default", *kl)
    assert 0 < part(lora, "update", "optimizer") < 0.3 * part(whole, "update", "optimizer")
    assert "reference weights" not in lora.item_names
    assert part(lora, "logprobs", "actor weights") > part(whole, "update", "actor weights")
    assert part(lora, "export", "checkpoint") < 0.3 * part(whole, "export", "checkpoint")


@pytest.mark.parametrize(
    ("base", "name", "kind"),
    [
        ("resident", "rollout weights", MemoryKind.DEVICE),
        ("backup", "backup of rollout weights", MemoryKind.HOST),
        ("resend", None, None),
    ],
)
def test_frozen_weights_of_a_sleeping_engine_lie_where_lora_base_says(
    base: str, name: str | None, kind: MemoryKind | None
) -> None:
    plan = plan_of(*GPU, "lora=default", "rollout.sleep=true", f"lora.base={base}")
    kinds = {i.name: i.kind for i in phase(plan, "update").items if "rollout" in i.name}
    assert kinds == ({name: kind} if name else {})


def test_a_checkpoint_is_one_copy_of_weights_that_learn_and_their_moments() -> None:
    plan = plan_of("checkpoint.every_num_steps=1")
    state = part(plan, "export", "actor weights") + part(plan, "export", "optimizer")
    assert part(plan, "export", "checkpoint") == state
    assert part(plan_of("checkpoint.every_num_steps=0"), "export", "checkpoint") == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_model_is_planned_beside_a_critic(tmp_path: Path, ranks: int) -> None:
    folder = make_tiny_classifier(tmp_path / "model", "llama", num_layers=3)
    (folder / "tokenizer.json").write_text("{}")
    scorer = ("reward.function=model", f"reward.args.path={folder}")
    plain = (
        *(f"cluster.num_ranks_per_node={ranks}", "algorithm=ppo", "mode=plan"),
        "rollout.sleep=true",
    )
    plan, before = plan_of(*plain, *scorer), plan_of(*plain)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) / ranks
    weights = part(plan, "update", "reward model model weights")
    assert weights == pytest.approx(num_bytes, abs=4)  # counts a bias that it may have
    names = [each.name for each in plan.phases]
    assert [name for name in names if name != "reward"] == [each.name for each in before.phases]
    assert names.index("reward") == names.index("generate") + 1
    assert part(plan, "reward", "activations") > 0
    assert part(plan, "values", "optimizer") == part(before, "values", "optimizer")
    away = part(plan, "generate", "offloaded training state")
    assert away - part(before, "generate", "offloaded training state") == weights
