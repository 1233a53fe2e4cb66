"""Names that users of other frameworks type, each with the hybridrl name to type instead.

The other frameworks are verl, TRL, OpenRLHF and slime; for asynchronous training AReaL and NeMo RL.
Former names of hybridrl itself are listed too. A test checks that every key in an answer exists.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.config.reward import BUILT_IN_REWARDS

_RESPONSES = "set rollout.num_responses_per_prompt"
_PROMPTS = "set trainer.num_prompts_per_step, which counts prompts"
_KL = "set algorithm.kl.placement=loss algorithm.kl.coefficient"
_MICROBATCH = "set actor.max_tokens_per_microbatch, which counts tokens"
_ADVANTAGES = "set algorithm=grpo, algorithm=rloo, algorithm=ppo or another of --help algorithm"
_REWARD = "set reward.function=FILE.py:NAME"
_STEPS = "set trainer.num_steps, which counts steps"
_MODEL = "set model=hf_folder model.path=FOLDER"
_DATA = "set data=files data.train_files=[FILE.jsonl]"
_FOLDER = "set trainer.run_dir=FOLDER"
_TRACKERS = "set tracking.trackers=[tensorboard,wandb]"
_GPUS = "set cluster=one_gpu cluster.num_ranks_per_node"
_REWARD_MODEL = "set reward.function=model reward.args.path=FOLDER"
_AGENT = "set agent=tool_calls, or agent.loop=FILE.py:CLASS"
_AHEAD = "set serving=own trainer.max_staleness, which counts steps"
_PARTIAL = (
    "set serving.on_update=interrupt with trainer.max_staleness; where the ranks have the engines, "
    "rollout.oversample"
)
_WEIGHED = "set algorithm.rollout_correction=importance algorithm.rollout_correction_args.high=2"
_MASKED = "set algorithm.token_mask=off_policy_mask algorithm.token_mask_args.max_nats=0.01"
_TOOLS = "set agent=tool_calls agent.tools=[calculator,FILE.py:FUNCTION]"

_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("rollout.n", "num_generations", "n_samples_per_prompt"), _RESPONSES),
    **dict.fromkeys(
        (
            *("batch_size", "train_batch_size", "rollout_batch_size", "gen_batch_size"),
            "generation_batch_size",
        ),
        _PROMPTS,
    ),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef", "use_kl_loss", "beta"), _KL),
    **dict.fromkeys(("use_kl_in_reward", "kl_ctrl"), "set algorithm.kl.placement=reward"),
    **dict.fromkeys(("kl_loss_type", "kl_estimator"), "set algorithm.kl.estimator"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), _ADVANTAGES),
    **dict.fromkeys(
        ("clip_ratio", "eps_clip", "epsilon"), "set algorithm.clip_low algorithm.clip_high"
    ),
    "clip_ratio_low": "set algorithm.clip_low",
    **dict.fromkeys(
        ("clip_ratio_high", "epsilon_high", "eps_clip_high"), "set algorithm.clip_high"
    ),
    **dict.fromkeys(
        ("ppo_mini_batch_size", "global_batch_size", "steps_per_generation"),
        "set algorithm.num_minibatches, which counts optimizer steps of a rollout",
    ),
    **dict.fromkeys(("ppo_epochs", "num_iterations", "max_epochs"), "set algorithm.num_epochs"),
    **dict.fromkeys(
        (
            *("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "micro_train_batch_size"),
            *("per_device_train_batch_size", "ppo_max_token_len_per_gpu", "use_dynamic_bsz"),
            *("log_prob_micro_batch_size_per_gpu", "max_tokens_per_gpu"),
            "gradient_accumulation_steps",
        ),
        _MICROBATCH,
    ),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), "set algorithm.entropy_coefficient"),
    **dict.fromkeys(
        ("loss_agg_mode", "loss_type", "calculate_per_token_loss"),
        "set algorithm.loss_aggregation",
    ),
    **dict.fromkeys(
        ("clip_ratio_c", "eps_clip_c", "dual_clip"), "set algorithm.policy_loss_args.dual_clip"
    ),
    **dict.fromkeys(
        ("overlong_buffer_len", "overlong_buffer_cfg.len"), "set algorithm.soft_overlong_tokens"
    ),
    "mask_truncated_completions": "set algorithm.mask_truncated=true",
    "importance_sampling_level": "set algorithm=gspo for sequence",
    "kl_target": "set algorithm.kl.target_nats",
    "over_sampling_batch_size": "set rollout.oversample, which is a factor",
    "rpo_alpha": "set dpo.sft_coefficient",
    "center_rewards_coefficient": "set reward_model.center_coefficient",
    **dict.fromkeys(
        ("norm_adv_by_std_in_grpo", "scale_rewards", "algorithm.divide_by_std"),
        "set algorithm.advantage_args.scale=group or none",
    ),
    **dict.fromkeys(
        ("filter_groups", "dynamic_sampling_filter_path", "dynamic_filtering"),
        "set algorithm.group_filter=zero_variance algorithm.max_sampling_rounds=10",
    ),
    "algorithm.name": _ADVANTAGES,
    **{
        f"gae.{name}": f"set algorithm.advantage_args.{name}" for name in ("gamma", "lam", "whiten")
    },
    **dict.fromkeys(
        (
            *("sampler_ratio_cap", "tis_imp_ratio_cap", "rollout_is", "use_tis"),
            *("use_decoupled_loss", "behav_imp_weight_cap", "compute_prox_log_prob"),
        ),
        _WEIGHED,
    ),
    **dict.fromkeys(
        (
            *("async_training", "staleness_threshold", "one_step_off_policy"),
            *("max_head_offpolicyness", "max_trajectory_age_steps"),
        ),
        _AHEAD,
    ),
    **dict.fromkeys(("off_policy_mask_threshold", "use_opsm", "opsm_delta"), _MASKED),
    **dict.fromkeys(
        ("bypass_mode", "use_rollout_log_probs", "use_rollout_logprobs"),
        "set algorithm.old_logprobs=sampler",
    ),
    "partial_rollout": _PARTIAL,
    **dict.fromkeys(
        (
            *("max_response_length", "max_completion_length", "max_new_tokens"),
            *("generate_max_len", "rollout_max_response_len"),
        ),
        "set rollout.max_response_tokens",
    ),
    **dict.fromkeys(
        ("max_prompt_length", "prompt_max_len", "rollout_max_prompt_len"),
        "set data.max_prompt_tokens",
    ),
    **dict.fromkeys(
        (
            *("gpu_memory_utilization", "mem_fraction_static", "vllm_gpu_memory_utilization"),
            "sglang_mem_fraction_static",
        ),
        "set rollout.memory_fraction",
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "vllm_tensor_parallel_size"),
        "set rollout.tensor_parallel_size, or megatron.tensor_parallel_size for training",
    ),
    **dict.fromkeys(("free_cache_engine", "vllm_enable_sleep"), "set rollout.sleep"),
    **dict.fromkeys(("rollout.name", "use_vllm"), "set rollout=sglang or rollout=hf"),
    **dict.fromkeys(
        ("optim.lr", "actor.lr", "learning_rate", "lr", "actor_learning_rate"),
        "set actor.optimizer.lr",
    ),
    **dict.fromkeys(
        ("enable_gradient_checkpointing", "gradient_checkpointing"),
        "set actor.gradient_checkpointing=true",
    ),
    "attn_implementation": "set model.attention",
    **dict.fromkeys(("param_offload", "optimizer_offload"), "set actor.fsdp2.cpu_offload=true"),
    **dict.fromkeys(
        ("total_training_steps", "max_steps", "num_rollout"),
        _STEPS,
    ),
    **dict.fromkeys(
        ("total_epochs", "num_train_epochs", "epochs", "num_episodes", "num_epoch"),
        "set trainer.num_epochs",
    ),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus_per_node", "actor_num_gpus_per_node"), _GPUS),
    **dict.fromkeys(("temperature", "sampling_params.temperature"), "set rollout.temperature"),
    "nnodes": "set cluster.num_nodes cluster.ray_address",
    **dict.fromkeys(("save_freq", "save_steps", "save_interval"), "set checkpoint.every_num_steps"),
    **dict.fromkeys(("test_freq", "eval_steps", "eval_interval"), "set eval.every_num_steps"),
    "val_before_train": "leave it out: evaluation comes before step 1 if eval.every_num_steps > 0",
    "resume_mode": "set checkpoint.resume",
    **dict.fromkeys(("trainer.logger", "report_to", "use_wandb"), _TRACKERS),
    "project_name": "set tracking.project",
    **dict.fromkeys(("experiment_name", "output_dir", "default_local_dir"), _FOLDER),
    **dict.fromkeys(
        ("custom_reward_function", "reward_funcs", "reward_fn", "custom_rm_path"), _REWARD
    ),
    **dict.fromkeys(
        (
            *("reward_pretrain", "remote_rm_url", "reward_model.enable", "reward_model.path"),
            *("reward_model.model", "reward_model.model.path", "reward_model.reward_manager"),
        ),
        _REWARD_MODEL,
    ),
    **dict.fromkeys(("lora_rank", "use_peft"), "set lora=default lora.rank"),
    **dict.fromkeys(("model_name_or_path", "hf_checkpoint", "pretrain", "model.name"), _MODEL),
    **dict.fromkeys(("train_files", "dataset_name", "prompt_data"), _DATA),
    "actor_rollout_ref": (
        "its keys are in actor, rollout and model: actor.optimizer.lr, "
        "rollout.num_responses_per_prompt, model.path"
    ),
    **dict.fromkeys(
        (
            *("multi_turn", "multi_turn.enable", "default_agent_loop", "agent_loop_config_path"),
            *("rollout_func", "agent_func_path", "custom_generate_function_path"),
        ),
        _AGENT,
    ),
    **dict.fromkeys(("tools", "tool_config_path", "function_tool_path"), _TOOLS),
    **dict.fromkeys(
        ("max_assistant_turns", "max_user_turns", "max_tool_calling_iterations"),
        "set agent.max_turns",
    ),
    "max_tool_response_length": "set agent.max_result_chars, which counts characters",
    "multi_turn.format": "set agent.tool_format",
    "tokenization_sanity_check_mode": "set agent.history=strict or keep",
}
"""By key, or by its last words; a key of one word without ``_`` is known only by itself."""

_CHOICES: Mapping[tuple[str, str], str] = {
    ("recipes", "clip_higher_kl_cpu"): "set recipes=dapo_cpu, which adds no KL term",
    **{("recipes", name): "set recipes=dapo_cpu" for name in ("dapo", "dapo_gpu")},
    ("algorithm", "reinforce++"): "set algorithm=reinforce_plus_plus",
    ("algorithm", "geo_mean"): "set algorithm=gmpo",
    **{
        ("algorithm", name): "set algorithm=optimal_token_baseline"
        for name in ("otb", "tir_optimal_token_baseline")
    },
    ("algorithm", "gae"): "set algorithm=ppo",
    ("algorithm", "dpo"): "set mode=dpo",
    ("rollout", "vllm"): "it is not supported yet; set rollout=sglang or rollout=hf",
    **{("actor", name): "set actor=fsdp2 or actor=megatron" for name in ("fsdp", "deepspeed")},
    **{("tracking", name): _TRACKERS for name in ("wandb", "mlflow", "swanlab")},
}
"""By group of files and name."""


def answer_key(key: str) -> str:
    """Return the hybridrl key for a key of another framework; empty if no framework has it."""
    parts = key.replace("-", "_").split(".")  # slime's are flags
    for first in range(len(parts)):
        name = ".".join(parts[first:])
        # `beta` is TRL's; `actor.optimizer.beta` is mistyped.
        if name in _KEYS and (first == 0 or "." in name or "_" in name):
            return _KEYS[name]
    for part in reversed(parts[:-1]):  # a section of theirs: reward_model.model.path
        if "_" in part and part in _KEYS:
            return _KEYS[part]
    return ""


def answer_choice(group: str, name: str) -> str:
    """Return the hybridrl choice for a file name in a group; empty if no framework has it."""
    group = group.partition("/")[0]  # model=Qwen/NAME is a file in a folder to Hydra
    if group == "model":
        return f"{_MODEL}; `hf download NAME --local-dir FOLDER` makes it"
    if group == "data":
        return _DATA
    if group == "reward":
        is_built_in = name in BUILT_IN_REWARDS
        return f"set reward.function={name}" if is_built_in else f"{_REWARD}, or reward=exact_match"
    return _CHOICES.get((group, name.lower()), "")
