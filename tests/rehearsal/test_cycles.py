"""Families and options, rehearsed with tiny models."""

from __future__ import annotations

import pytest

from tests.rehearsal.checks import assert_sound, assert_woken_in_order
from tests.rehearsal.conftest import Rehearse
from tests.rehearsal.tiny import tiny_case
from tests.tiny_models import TRAINED, Family

REFERENCE = ("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.01")
LORA = "lora.enabled=true"
PPO = (
    *("algorithm.advantage=gae", "algorithm.old_logprobs=recompute"),
    "algorithm.advantage_args={gamma: 1.0, lam: 0.95, whiten: true}",
)
REWARD_MODEL = (
    "reward.function=null",
    "+reward.functions.score={function: model, args: {path: FOLDER/other}}",
)
TEACHER = (
    *("algorithm.advantage=distillation", "algorithm.policy_loss=reinforce"),
    *("algorithm.old_logprobs=recompute", "algorithm.teacher_path=FOLDER/other"),
)

COMPARED = (
    *("algorithm.divergence_coefficient=1.0", "algorithm.teacher_path=FOLDER/other"),
    "algorithm.teacher_paths={a: initial}",
)

EXCHANGES = "actor.fsdp2.context_parallel_size=2"
GROUPS = ("rollout.num_responses_per_prompt=32", "actor.max_tokens_per_microbatch=128")
"""Four responses to a prompt on each of eight ranks: it is computed once for them."""

TO_HOST = ("workers/rollout/buckets.py", "workers/rollout/sglang/engine.py")
"""Files that copy to the host what does not travel from device to device: adapters, files."""

FSDP2 = {
    "adapters, base resident": (LORA, "lora.base=resident", *REFERENCE),
    "adapters, base in a backup": (LORA, "lora.base=backup"),
    "adapters, base sent again": (LORA, "lora.base=resend"),
    "adapters, sent merged": (LORA, "lora.sync=merged"),
    "a reference": REFERENCE,
    "a critic": PPO,
    "a reward model and a teacher": (*REWARD_MODEL, *TEACHER),
    "teachers of distributions": COMPARED,
    "shards on the host": ("actor.fsdp2.cpu_offload=true",),
    "replicas": ("actor.fsdp2.num_replicas=2",),
    "shared tokens": (EXCHANGES, *REFERENCE),
    "shared tokens, gathered keys": ("actor.fsdp2.context_parallel_size=8", *PPO),
    "files": ("rollout.transport=disk",),
    "weights verified always": ("rollout.verify_weights=always",),
    "padded, and all activations": (
        *("model.attention=padded", "actor.gradient_checkpointing=false"),
    ),
    "float32": ("actor.compute_dtype=float32", "rollout.dtype=float32"),
    "two temperatures": ("algorithm.advantage=optimal_token_baseline",),
    "tokens of older weights": ("rollout.oversample=2.0",),
    "outliers left out": ("algorithm=m2po",),
    "shared prompts": (*GROUPS, "actor.fsdp2.num_replicas=2"),
    "shared prompts and tokens": (*GROUPS, EXCHANGES),
}
BY_NIGHT = (
    *("outliers left out", "shared prompts", "shared prompts and tokens", "a reference"),
    *("adapters, base in a backup", "adapters, base sent again", "adapters, sent merged"),
    *("weights verified always", "two temperatures", "no replicas", "float32"),
    "shared tokens, gathered keys",
    "padded, and all activations",
)
MEGATRON = ("actor.engine=megatron", "megatron.layers=local")
TENSOR = ("megatron.tensor_parallel_size=2", "megatron.sequence_parallel=true")
OFFLINE = {
    "examples": ("mode=sft", LORA),
    "pairs": ("mode=dpo", "dpo.sft_coefficient=0.1"),
    "pairs, exchanged tokens": ("mode=dpo", "dpo.loss=exo_pair", EXCHANGES),
    "a reward model": ("mode=reward_model", "reward_model.center_coefficient=0.01"),
}
OFFLINE_BY_NIGHT = ("pairs, exchanged tokens", "examples")
RESUMED = {
    "shards": (),
    "adapters": (LORA,),
    "host": ("actor.fsdp2.cpu_offload=true",),
    "megatron": MEGATRON,
}
RESUMED_BY_NIGHT = ("adapters", "host", "megatron")
TAUGHT = (
    *("algorithm.advantage=distillation", "algorithm.policy_loss=reinforce"),
    *("algorithm.old_logprobs=recompute", "algorithm.divergence_coefficient=1.0"),
    *("algorithm.divergence_top_k=8", "algorithm.teacher_paths={a: FOLDER/other, b: policy}"),
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "FSDP2": (),
    "exchanged tokens": (EXCHANGES,),
    "gathered keys": ("actor.fsdp2.context_parallel_size=8",),
    "an adapter": (LORA,),
    "tensor parallelism": (*MEGATRON, *TENSOR),
    "pipeline": (*MEGATRON, "megatron.pipeline_parallel_size=2"),
    "context parallelism": (*MEGATRON, "megatron.context_parallel_size=2"),
}
EMBEDDED = {
    "asleep": ("rollout.sleep=true",),
    "awake": ("rollout.sleep=false",),
    "an adapter": ("rollout.sleep=true", LORA),
    "masks": ("rollout.sleep=true", "rollout.sampling_masks=true", "rollout.top_k=8"),
}
FAMILIES_BY_DAY = ("qwen3", "qwen2_moe", "qwen3_5_text")
"""The others take ways that these or recipes take, too."""

DENSE = {
    "one rank": (),
    "no sequence parallelism": ("megatron.tensor_parallel_size=2",),
    "tensor parallelism, a critic": (*TENSOR, *PPO),
    "context parallelism, a reference": ("megatron.context_parallel_size=2", *REFERENCE),
    "pipeline": ("megatron.pipeline_parallel_size=2",),
    "adapters": (LORA,),
    "all activations": ("actor.gradient_checkpointing=false",),
}
SPARSE = {
    "one rank": ("actor.replay_routing=true",),
    "experts on ranks": ("megatron.expert_parallel_size=2", *TENSOR),
    "parts of experts": ("megatron.expert_tensor_parallel_size=2", *TENSOR),
    "pipeline": ("megatron.pipeline_parallel_size=2", "megatron.expert_parallel_size=2"),
    "context parallelism": ("megatron.context_parallel_size=2",),
}
DENSE_BY_NIGHT = ("one rank", "no sequence parallelism", "all activations", "adapters")
SPARSE_BY_NIGHT = ("one rank", "parts of experts", "context parallelism", "pipeline")


def marked(names: object, by_night: tuple[str, ...]) -> list[object]:
    """Return parameters, of which some are tested by night."""
    assert isinstance(names, dict | tuple)
    return [pytest.param(n, marks=pytest.mark.nightly) if n in by_night else n for n in names]


@pytest.mark.parametrize(
    "family", marked(TRAINED, tuple(name for name in TRAINED if name not in FAMILIES_BY_DAY))
)
def test_family_is_trained_and_served(rehearse: Rehearse, family: Family) -> None:
    shown = rehearse(tiny_case(family=family, num_layers=2))  # of two kinds
    assert_sound(shown)
    assert_woken_in_order(shown, num_steps=1)


@pytest.mark.parametrize("option", marked(FSDP2, BY_NIGHT))
def test_option_of_fsdp2_goes_through_a_cycle(rehearse: Rehearse, option: str) -> None:
    is_sent_from_host = option == "files" or option.startswith("adapters")
    shown = rehearse(tiny_case(*FSDP2[option]))
    assert_sound(shown, waits_in=TO_HOST if is_sent_from_host else ())


@pytest.mark.parametrize("what", marked(OFFLINE, OFFLINE_BY_NIGHT))
def test_rank_learns_from_a_data_set(rehearse: Rehearse, what: str) -> None:
    shown = rehearse(tiny_case(*OFFLINE[what], kind="of a data set"))
    assert_sound(shown)
    losses = (" at workers/train/losses.py:", " at algorithms/")
    copied = [event for event in shown.executed.events if any(each in event for each in losses)]
    assert not [event for event in copied if event.startswith("copy cpu")], copied  # of constants


@pytest.mark.parametrize("what", marked(RESUMED, RESUMED_BY_NIGHT))
def test_rank_resumes(rehearse: Rehearse, what: str) -> None:
    assert_sound(rehearse(tiny_case(*RESUMED[what], kind="resumed")), waits_in=TO_HOST)


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["files", "broadcast"])
@pytest.mark.parametrize("deltas", ["false", "true"])
def test_rank_publishes_weights(rehearse: Rehearse, weights: str, deltas: str) -> None:
    own = ("serving=own", "rollout.sleep=false", f"serving.weights={weights}")
    case = tiny_case(
        *(*own, f"serving.weight_deltas={deltas}"),
        num_steps=3,
        kind="with servers that get weights",
    )
    shown = rehearse(case)
    assert not shown.error, shown.error


@pytest.mark.parametrize("layout", marked(LAYOUTS, tuple(LAYOUTS)[1:]))
def test_rank_learns_from_rows_with_all_columns(rehearse: Rehearse, layout: str) -> None:
    num_layers = 2 if layout == "pipeline" else 1
    case = tiny_case(*TAUGHT, *LAYOUTS[layout], num_layers=num_layers, kind="with all columns")
    assert_sound(rehearse(case), waits_in=TO_HOST if layout == "an adapter" else ())


@pytest.mark.nightly
@pytest.mark.parametrize("what", EMBEDDED)
def test_embedded_engine_samples_on_a_gpu(rehearse: Rehearse, what: str) -> None:
    shown = rehearse(tiny_case("rollout=hf", *EMBEDDED[what], kind="with an embedded engine"))
    assert not shown.error, shown.error


def test_adapter_alone_is_sent_to_a_resident_base(rehearse: Rehearse) -> None:
    shown = rehearse(tiny_case(LORA, "lora.base=resident", num_steps=2))
    assert_sound(shown, waits_in=TO_HOST)
    asked = [call.path for call in shown.asked]
    sampled = asked.index("/generate")
    assert "/update_weights_from_tensor" in asked[:sampled]
    assert "/update_weights_from_tensor" not in asked[sampled:]
    assert "/load_lora_adapter_from_tensors" in asked[sampled:]


def test_engines_of_their_own_get_the_weights_below_an_adapter_once(rehearse: Rehearse) -> None:
    own = ("serving=own", "rollout.sleep=false")
    shown = rehearse(tiny_case(LORA, *own, num_steps=2))
    assert not shown.error, shown.error


def test_engines_of_ranks_are_lent_to_the_manager_beside_those_of_a_teacher(
    rehearse: Rehearse,
) -> None:
    """What the teacher said of each token is part of an update."""
    four = "groups: {main: {num_devices: 4}}"
    held = []
    for top_k in (2, 50):
        shown = rehearse(
            tiny_case(
                *("serving.colocated=true", "serving.num_devices_per_node=8", "algorithm=gkd"),
                f"serving.models={{policy: {{{four}}}, teacher: {{path: FOLDER/other, {four}}}}}",
                "algorithm.teacher_path=serving.models.teacher",
                f"algorithm.divergence_top_k={top_k}",
            )
        )
        assert_sound(shown)
        moments = shown.executed.device["update"].values()
        held.append(sum(sum(uses.values()) for uses in moments))
    assert held[0] < held[1]


def test_engine_that_stays_releases_nothing(rehearse: Rehearse) -> None:
    shown = rehearse(tiny_case("rollout.sleep=false", "rollout.memory_fraction=0.3", num_steps=2))
    assert not shown.error, shown.error
    assert not shown.unopened
    assert not [call for call in shown.asked if call.path == "/release_memory_occupation"]


def test_engine_of_two_ranks_is_asked_by_the_first(rehearse: Rehearse) -> None:
    leader = rehearse(tiny_case("rollout.tensor_parallel_size=2"))
    assert_sound(leader)
    assert_woken_in_order(leader, num_steps=1)
    follower = rehearse(tiny_case("rollout.tensor_parallel_size=2", rank=1))
    assert not follower.error, follower.error
    assert not follower.asked
    assert follower.unopened  # by the server, which the other rank asks
    assert follower.sums == leader.sums


@pytest.mark.parametrize("option", marked(DENSE, DENSE_BY_NIGHT))
def test_option_of_megatron_goes_through_a_cycle(rehearse: Rehearse, option: str) -> None:
    num_layers = 2 if option == "pipeline" else 1
    shown = rehearse(tiny_case(*MEGATRON, *DENSE[option], num_layers=num_layers))
    assert_sound(shown, waits_in=TO_HOST if option == "adapters" else ())


@pytest.mark.parametrize("option", marked(SPARSE, SPARSE_BY_NIGHT))
def test_experts_on_megatron_go_through_a_cycle(rehearse: Rehearse, option: str) -> None:
    given = (*MEGATRON, *SPARSE[option])
    assert_sound(rehearse(tiny_case(*given, num_layers=2, family="qwen3_moe")))


@pytest.mark.nightly
def test_routes_are_replayed_on_fsdp2(rehearse: Rehearse) -> None:
    replays = ("actor.replay_routing=true",)
    assert_sound(rehearse(tiny_case(*replays, family="qwen3_moe")))


def test_last_stage_of_a_pipeline_goes_through_a_cycle(rehearse: Rehearse) -> None:
    pipeline = ("megatron.pipeline_parallel_size=2", "megatron.num_virtual_stages=2")
    assert_sound(rehearse(tiny_case(*MEGATRON, *pipeline, num_layers=4, rank=4)))
