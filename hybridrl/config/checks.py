"""One function per rule that a single field cannot state. All run; each yields what it finds.

Checks only report, they never assign. A remedy is a set of overrides that mends the violation and
breaks no other rule; tests/config/test_checks.py applies every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from hybridrl.config.adapter_checks import check_lora_init_from
from hybridrl.config.batch_sizes import check_batch_sizes, check_engines_lie_within_nodes
from hybridrl.config.cluster_checks import (
    check_nodes_have_a_cluster,
    check_object_store,
    check_ray_address,
)
from hybridrl.config.critic_checks import (
    check_critic_batch_sizes,
    check_critic_kernel,
    check_critic_warmup,
)
from hybridrl.config.disk_checks import (
    check_data_files,
    check_reward_function,
    check_run_folder,
    check_trackers,
)
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.lora_checks import (
    check_lora_base,
    check_lora_dropout,
    check_lora_rank,
    check_lora_targets,
)
from hybridrl.config.model_checks import (
    check_attention_runs_on_device,
    check_model_folder,
    check_model_source,
    check_starter_context,
    check_starter_reads_plain_text,
    check_starter_shape,
    check_starter_warmup_batch,
)
from hybridrl.config.server_checks import (
    check_drain_fits_its_stage,
    check_engine_args,
    check_server_reads_the_model,
    check_sglang_is_installed,
)
from hybridrl.errors import ConfigError

Rule = Callable[[ExperimentConfig], Iterator[ConfigError]]


def find_violations(config: ExperimentConfig) -> list[ConfigError]:
    """Run every rule that concerns ``config.mode`` and return all violations.

    ``check`` runs the rules of ``train``. Reads the disk, starts nothing.
    """
    return [
        violation for rules in rules_of(config.mode).values() for violation in run(rules, config)
    ]


def run(rules: tuple[Rule, ...], config: ExperimentConfig) -> list[ConfigError]:
    """Return what ``rules`` find, in their order."""
    return [violation for rule in rules for violation in rule(config)]


def rules_of(mode: str) -> Mapping[str, tuple[Rule, ...]]:
    """Return the groups of rules by name; ``sft`` samples nothing, so it has fewer."""
    return {**_COMMON_RULES, **(_SFT_RULES if mode == "sft" else _TRAIN_RULES)}


def check_group_has_a_baseline(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A group-relative algorithm compares siblings, so a response must have some."""
    group_size = config.rollout.num_responses_per_prompt
    if config.algorithm.name == "grpo" and group_size < 2:
        yield ConfigError(
            "rollout.num_responses_per_prompt",
            group_size,
            f"algorithm.name={config.algorithm.name} compares each response with its siblings",
            remedies=[
                ("rollout.num_responses_per_prompt=8",),
                ("rollout.num_responses_per_prompt=2",),
                ("algorithm=ppo",),
            ],
        )


def check_old_logprobs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Log-probs of the update itself are the old ones only while nothing was updated."""
    algorithm = config.algorithm
    if algorithm.old_logprobs == "recompute":
        return
    if algorithm.num_updates_per_step > 1:
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            f"needs one update per rollout, and num_epochs={algorithm.num_epochs} x "
            f"num_minibatches={algorithm.num_minibatches} makes {algorithm.num_updates_per_step}",
            remedies=[
                ("algorithm.old_logprobs=recompute",),
                ("algorithm.num_epochs=1", "algorithm.num_minibatches=1"),
            ],
        )
    if algorithm.kl.placement == "reward":
        yield ConfigError(
            "algorithm.old_logprobs",
            "current",
            "algorithm.kl.placement=reward needs log-probs before the update",
            remedies=[("algorithm.old_logprobs=recompute",), ("algorithm.kl.placement=loss",)],
        )


def check_kl_penalty(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A KL penalty has both a place and a weight, or neither; in the loss it has a gradient."""
    kl = config.algorithm.kl
    if kl.placement == "none" and kl.coefficient > 0:
        yield ConfigError(
            "algorithm.kl.coefficient",
            kl.coefficient,
            "would be ignored, because algorithm.kl.placement=none",
            remedies=[("algorithm.kl.placement=loss",), ("algorithm.kl.coefficient=0",)],
        )
    if kl.placement != "none" and kl.coefficient == 0:
        yield ConfigError(
            "algorithm.kl.coefficient",
            kl.coefficient,
            f"algorithm.kl.placement={kl.placement} costs a reference model and weighs nothing",
            remedies=[("algorithm.kl.coefficient=0.001",), ("algorithm.kl.placement=none",)],
        )
    if kl.placement == "loss" and kl.estimator == "k1":
        yield ConfigError(
            "algorithm.kl.estimator",
            kl.estimator,
            "as a loss its expected gradient is 0: it would pull the policy nowhere",
            remedies=[("algorithm.kl.estimator=k2",), ("algorithm.kl.estimator=k3",)],
        )


def check_sampler_ratio_cap(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A cap below 1 would shrink the loss of tokens on which trainer and engine agree."""
    cap = config.algorithm.sampler_ratio_cap
    if 0 < cap < 1:
        yield ConfigError(
            "algorithm.sampler_ratio_cap",
            cap,
            "must be 0 (off) or at least 1, the ratio of engines that agree",
            remedies=[("algorithm.sampler_ratio_cap=2.0",), ("algorithm.sampler_ratio_cap=0",)],
        )


def check_rollout_engine(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The embedded engine runs on one rank."""
    size = config.rollout.tensor_parallel_size
    if config.rollout.engine == "hf" and size != 1:
        yield ConfigError(
            "rollout.tensor_parallel_size",
            size,
            "rollout.engine=hf runs on one rank",
            remedies=[("rollout.tensor_parallel_size=1",)],
        )


def check_certificate(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A proof bit by bit needs an engine that draws from the seeds that it is given."""
    rollout = config.rollout
    is_seeded = rollout.engine_args.get("enable_deterministic_inference")
    if config.mode == "certify" and rollout.engine == "sglang" and not is_seeded:
        yield ConfigError(
            "rollout.engine",
            "sglang",
            "SGLang draws from a generator of its own, so a resumed run samples other responses",
            remedies=[("rollout=hf",)],
            fix="set +rollout.engine_args.enable_deterministic_inference=true, or rollout=hf",
        )


def check_transport(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Weights travel only to an engine of another process, and NCCL wants a GPU for each end."""
    key, transport = "rollout.transport", config.rollout.transport
    if config.rollout.engine == "hf" and transport != "auto":
        yield ConfigError(
            key,
            transport,
            "would be ignored: rollout.engine=hf has its weights in the trainer's process",
            remedies=[(f"{key}=auto",)],
        )
    elif transport == "broadcast" and config.cluster.device == "cuda":
        yield ConfigError(
            key,
            transport,
            "NCCL takes one process of a group on a GPU, and engines share theirs with the trainer",
            remedies=[(f"{key}=auto",), (f"{key}=disk",)],
        )


def check_data_source(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows come from a built-in task or from files, not both, not neither."""
    data = config.data
    if data.task is None and not data.train_files:
        yield ConfigError(
            "data.train_files",
            [],
            "a run needs data files or a built-in task",
            remedies=[("data=sort_digits",)],
            fix="set data.train_files=[FILE.jsonl], or data=sort_digits",
        )
    for key, files in (
        ("data.train_files", data.train_files),
        ("data.eval_files", data.eval_files),
    ):
        if data.task is not None and files:
            yield ConfigError(
                key,
                list(files),
                f"would be ignored, because data.task={data.task} makes its own rows",
                remedies=[(f"{key}=[]",)],
                fix=f"set {key}=[], or data.task=null to read files",
            )


def check_eval_has_data(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Evaluation on files needs files."""
    data = config.data
    if config.eval.every_num_steps and data.task is None and not data.eval_files:
        yield ConfigError(
            "eval.every_num_steps",
            config.eval.every_num_steps,
            "there is nothing to evaluate on: data.eval_files is empty",
            remedies=[("eval.every_num_steps=0",)],
            fix="set data.eval_files=[FILE.jsonl], or eval.every_num_steps=0",
        )


def check_sort_digits(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Numbers have a shortest and a longest length, and prompt and answer have room for them."""
    data = config.data
    if data.task != "sort_digits":
        return
    if data.min_digits > data.max_digits:
        yield ConfigError(
            "data.min_digits",
            data.min_digits,
            f"must be at most data.max_digits={data.max_digits}",
            remedies=[(f"data.min_digits={data.max_digits}",)],
        )
    # One token a digit; the prompt ends in '=' and the answer in the end-of-text token.
    room = min(data.max_prompt_tokens, config.rollout.max_response_tokens) - 1
    if data.max_digits > room:
        yield ConfigError(
            "data.max_digits",
            data.max_digits,
            f"a number takes a token a digit and one more, in data.max_prompt_tokens="
            f"{data.max_prompt_tokens} and rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}",
            remedies=_room_for_digits(config, room),
        )


def _room_for_digits(config: ExperimentConfig, room: int) -> list[tuple[str, ...]]:
    num_tokens = config.data.max_digits + 1
    prompt = max(num_tokens, config.data.max_prompt_tokens)
    response = max(num_tokens, config.rollout.max_response_tokens)
    longer: tuple[str, ...] = (
        f"data.max_prompt_tokens={prompt}",
        f"rollout.max_response_tokens={response}",
    )
    starter = config.model.starter
    if starter is not None and starter.max_position_embeddings < prompt + response:
        longer += (f"model.starter.max_position_embeddings={prompt + response}",)
    shorter: tuple[str, ...] = (f"data.max_digits={room}",)
    if config.data.min_digits > room:
        shorter += (f"data.min_digits={room}",)
    return [shorter, longer] if room >= 1 else [longer]


def check_sft_batch(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of a supervised step divide evenly over the ranks."""
    size, num_ranks = config.sft.batch_size, config.cluster.num_ranks
    if size % num_ranks:
        legal = [n for n in (size // num_ranks * num_ranks, -(-size // num_ranks) * num_ranks) if n]
        yield ConfigError(
            "sft.batch_size",
            size,
            f"must be a multiple of {num_ranks} ranks",
            remedies=[(f"sft.batch_size={n}",) for n in legal],
        )


_COMMON_RULES: Mapping[str, tuple[Rule, ...]] = {
    "model": (
        check_model_source,
        check_starter_shape,
        check_starter_context,
        check_starter_warmup_batch,
        check_starter_reads_plain_text,
        check_attention_runs_on_device,
        check_model_folder,
    ),
    "lora": (check_lora_targets, check_lora_rank, check_lora_dropout, check_lora_init_from),
    "data": (check_data_source, check_data_files, check_sort_digits),
    "cluster": (check_nodes_have_a_cluster, check_ray_address, check_object_store),
    "run folder": (check_run_folder, check_trackers),
}
_TRAIN_RULES: Mapping[str, tuple[Rule, ...]] = {
    "algorithm": (
        check_group_has_a_baseline,
        check_old_logprobs,
        check_kl_penalty,
        check_sampler_ratio_cap,
    ),
    "rollout": (
        check_rollout_engine,
        check_transport,
        check_lora_base,
        check_certificate,
        check_sglang_is_installed,
        check_engine_args,
        check_drain_fits_its_stage,
        check_server_reads_the_model,
    ),
    "critic": (check_critic_warmup, check_critic_kernel, check_critic_batch_sizes),
    "batch sizes": (check_batch_sizes, check_engines_lie_within_nodes),
    "reward": (check_reward_function,),
    "evaluation": (check_eval_has_data,),
}
_SFT_RULES: Mapping[str, tuple[Rule, ...]] = {"sft": (check_sft_batch,)}
