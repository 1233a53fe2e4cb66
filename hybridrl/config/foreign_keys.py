"""Keys of other frameworks, each with the line to type here.

The other frameworks are verl, TRL, OpenRLHF and slime; for asynchronous training AReaL and NeMo RL.
Former keys of hybridrl itself are listed too. In a line ``<NAME>`` is where the typed value goes;
where there is none, or it would not fit, NAME stands there.
"""

from __future__ import annotations

from collections.abc import Mapping

TRACKERS = "set tracking.trackers=[tensorboard,wandb]"

_AGENT = "set agent=tool_calls, or agent.loop=FILE.py:CLASS"
_AHEAD = "set serving=own trainer.max_staleness=2, which counts steps"
_DOWNLOAD_ROWS = (
    "type `hf download NAME --repo-type dataset --local-dir data`, then set data=files "
    "data.train_files=[FILE.parquet]"
)
_KL_IN_REWARD = "set algorithm.kl.placement=reward algorithm.kl.coefficient=<VALUE>"
_MICROBATCH = "set actor.max_tokens_per_microbatch, which counts tokens"
_MINIBATCHES = "set algorithm.num_minibatches, which counts optimizer steps of a rollout"
_PARTIAL = (
    "set serving.on_update=interrupt with trainer.max_staleness; where the ranks have the engines, "
    "rollout.oversample"
)
_WEIGHED = "set algorithm.rollout_correction=importance algorithm.rollout_correction_args.high="

_NAMES_BY_LINE: Mapping[str, str] = {
    # Sizes
    "set rollout.num_responses_per_prompt=<VALUE>": (
        "rollout.n num_generations n_samples_per_prompt"
    ),
    "set trainer.num_prompts_per_step=<VALUE>, which counts prompts": (
        "batch_size train_batch_size rollout_batch_size gen_batch_size generation_batch_size"
    ),
    _MINIBATCHES: "ppo_mini_batch_size global_batch_size steps_per_generation",
    "set algorithm.num_minibatches=<VALUE>": "num_steps_per_rollout",
    "set algorithm.num_epochs=<VALUE>": "ppo_epochs num_iterations max_epochs",
    "set actor.max_tokens_per_microbatch=<VALUE>": (
        "ppo_max_token_len_per_gpu max_tokens_per_gpu log_prob_max_token_len_per_gpu"
    ),
    _MICROBATCH: (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
        "per_device_train_batch_size use_dynamic_bsz use_dynamic_batch_size "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu micro_rollout_batch_size "
        "micro_batch_size_per_gpu gradient_accumulation_steps"
    ),
    "set rollout.max_response_tokens=<VALUE>": (
        "max_response_length max_completion_length max_new_tokens generate_max_len "
        "rollout_max_response_len response_length eval_max_response_len"
    ),
    "set data.max_prompt_tokens=<VALUE>": (
        "max_prompt_length prompt_max_len rollout_max_prompt_len prompt_length"
    ),
    "set rollout.oversample, which is a factor": "over_sampling_batch_size",
    "set rollout.num_slots=<VALUE>": "max_concurrent_rollouts max_num_seqs",
    # Objective
    "set algorithm=<NAME>; --help algorithm lists all": (
        "adv_estimator advantage_estimator algorithm.name loss_mode"
    ),
    "set algorithm.kl.placement=loss algorithm.kl.coefficient=<VALUE>": (
        "kl_coef kl_loss_coef init_kl_coef"
    ),
    "set algorithm.kl.placement=loss algorithm.kl.coefficient=<VALUE>; of mode=dpo: dpo.beta": (
        "beta"
    ),
    "set algorithm.kl.placement=loss, and algorithm.kl.coefficient above 0": "use_kl_loss",
    _KL_IN_REWARD: "kl_ctrl.kl_coef",
    "set algorithm.kl.placement=reward, and algorithm.kl.coefficient above 0": (
        "use_kl_in_reward kl_ctrl"
    ),
    "set algorithm.kl.estimator=<VALUE>": "kl_loss_type kl_estimator kl_penalty",
    "set algorithm.kl.target_nats=<VALUE>": "kl_target target_kl",
    "set algorithm.clip_low=<VALUE> algorithm.clip_high=<VALUE>": "clip_ratio eps_clip epsilon",
    "set algorithm.clip_low=<VALUE>": "clip_ratio_low",
    "set algorithm.clip_high=<VALUE>": "clip_ratio_high epsilon_high eps_clip_high",
    "set algorithm.policy_loss_args.dual_clip=<VALUE>": "clip_ratio_c eps_clip_c dual_clip delta",
    "set algorithm.loss_aggregation=<NAME>": "loss_agg_mode loss_type",
    "set algorithm.loss_aggregation=token_mean": "calculate_per_token_loss",
    "set algorithm.entropy_coefficient=<VALUE>": "entropy_coeff entropy_coef",
    "set algorithm.advantage_args.scale=<NAME>": (
        "norm_adv_by_std_in_grpo scale_rewards algorithm.divide_by_std"
    ),
    "set algorithm.group_filter=zero_variance algorithm.max_sampling_rounds=10": (
        "filter_groups filter_groups.enable dynamic_sampling_filter_path dynamic_filtering"
    ),
    "set algorithm.group_filter=zero_variance algorithm.max_sampling_rounds=<VALUE>": (
        "max_num_gen_batches"
    ),
    "set algorithm.soft_overlong_tokens=<VALUE>": (
        "overlong_buffer_len overlong_buffer_cfg.len overlong_buffer.len"
    ),
    "set algorithm.soft_overlong_tokens": "get_soft_overlong_punishment",
    "set algorithm.mask_truncated=<VALUE>": "mask_truncated_completions",
    "set algorithm=gspo for sequence": "importance_sampling_level",
    "set algorithm.advantage_args.gamma=<VALUE>": "gae.gamma algorithm.gamma",
    "set algorithm.advantage_args.lam=<VALUE>": "gae.lam algorithm.lam gae_lambda lambd",
    "set algorithm.advantage_args.whiten=<VALUE>": "gae.whiten",
    "set critic.value_clip=<VALUE>": "cliprange_value value_clip",
    "set critic.num_warmup_steps=<VALUE>": "critic_warmup",
    "leave it out: the critic begins with the policy's weights": "critic.model.path",
    "leave it out: the reference is the model that the run begins with": "ref_load",
    "give each of reward.functions its weight": "reward_weights",
    # Off-policy, asynchronous
    f"{_WEIGHED}2": (
        "sampler_ratio_cap rollout_is use_tis use_decoupled_loss compute_prox_log_prob "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "enable_vllm_is_correction"
    ),
    f"{_WEIGHED}<VALUE>": (
        "tis_imp_ratio_cap rollout_is_threshold behav_imp_weight_cap vllm_importance_sampling_cap "
        "vllm_is_truncated_threshold"
    ),
    "set algorithm.token_mask=off_policy_mask algorithm.token_mask_args.max_nats=0.01": "use_opsm",
    "set algorithm.token_mask=off_policy_mask algorithm.token_mask_args.max_nats=<VALUE>": (
        "off_policy_mask_threshold opsm_delta"
    ),
    "set algorithm.token_mask=top_entropy_mask algorithm.token_mask_args.fraction=<VALUE>": (
        "top_entropy_quantile"
    ),
    "set algorithm.old_logprobs=sampler": "bypass_mode use_rollout_log_probs use_rollout_logprobs",
    "set algorithm.old_logprobs=recompute": "recompute_logprob",
    "set serving=own trainer.max_staleness=<VALUE>": (
        "max_head_offpolicyness max_trajectory_age_steps"
    ),
    _AHEAD: "async_training staleness_threshold one_step_off_policy async_train fully_async",
    _PARTIAL: "partial_rollout",
    "leave it out: engines get weights after every step": (
        "update_weights_interval trigger_parameter_sync_step"
    ),
    # Optimizer
    "set actor.optimizer.lr=<VALUE>": "optim.lr actor.lr learning_rate lr actor_learning_rate",
    "set critic.optimizer.lr=<VALUE>": "critic_learning_rate critic_lr",
    "set actor.optimizer.weight_decay=<VALUE>": "optim.weight_decay",
    "set actor.optimizer.max_grad_norm=<VALUE>": "grad_clip clip_grad max_norm",
    "set actor.optimizer.schedule=<VALUE>": (
        "warmup_style lr_scheduler_type lr_scheduler lr_decay_style"
    ),
    "set actor.optimizer.num_warmup_steps=<VALUE>": "lr_warmup_steps warmup_steps lr_warmup_iters",
    "set actor.optimizer.num_warmup_steps, which counts optimizer steps": (
        "lr_warmup_steps_ratio warmup_ratio lr_warmup_ratio lr_warmup_fraction"
    ),
    "set actor.optimizer.beta1=<VALUE>": "adam_beta1",
    "set actor.optimizer.beta2=<VALUE>": "adam_beta2",
    # Engines
    "set rollout.memory_fraction=<VALUE>": (
        "gpu_memory_utilization mem_fraction_static vllm_gpu_memory_utilization "
        "sglang_mem_fraction_static"
    ),
    "set rollout.tensor_parallel_size=<VALUE>": (
        "rollout.tensor_model_parallel_size vllm_tensor_parallel_size rollout_num_gpus_per_engine"
    ),
    "set rollout.tensor_parallel_size, or megatron.tensor_parallel_size for training": (
        "tensor_model_parallel_size"
    ),
    "set actor=megatron megatron.pipeline_parallel_size=<VALUE>": "pipeline_model_parallel_size",
    "set actor=megatron megatron.expert_parallel_size=<VALUE>": "expert_model_parallel_size",
    "set actor=megatron megatron.context_parallel_size=<VALUE>": "ulysses_sequence_parallel_size",
    "set rollout.sleep=<VALUE>": "free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode",
    "set rollout=sglang or rollout=hf": "rollout.name use_vllm",
    "set rollout.cuda_graphs=false": "enforce_eager",
    "set rollout.temperature=<VALUE>": (
        "temperature sampling_params.temperature rollout_temperature"
    ),
    "set rollout.top_p=<VALUE>": "rollout_top_p",
    "set rollout.top_k=<VALUE>": "rollout_top_k",
    "set actor=<NAME>": "strategy actor.strategy critic.strategy train_backend",
    "set actor.gradient_checkpointing=<VALUE>": (
        "enable_gradient_checkpointing gradient_checkpointing"
    ),
    "set actor.gradient_checkpointing=true": "recompute_granularity",
    "set actor.compute_dtype=bfloat16": "bf16",
    "set model.attention": "attn_implementation flash_attn",
    "set actor.fsdp2.cpu_offload=<VALUE>": "param_offload optimizer_offload",
    "set actor.fsdp2.compile_blocks=<VALUE>": "use_torch_compile",
    "set actor.fsdp2.liger_kernels=<VALUE>": "use_liger use_liger_kernel",
    "leave it out: micro-batches are packed always": (
        "use_remove_padding remove_padding packing_samples"
    ),
    "leave it out: that is so without a key": (
        "hybrid_engine balance_batch rollout.mode colocate colocate_all_models logging_steps"
    ),
    "set 'serving.models={policy: {urls: [http://HOST:PORT]}}' serving.num_devices_per_node=0": (
        "rollout_external_engine_addrs"
    ),
    # Steps, files, cluster
    "set trainer.num_steps=<VALUE>, which counts steps": (
        "total_training_steps max_steps num_rollout"
    ),
    "set trainer.num_epochs=<VALUE>": (
        "total_epochs num_train_epochs epochs num_episodes num_epoch"
    ),
    "set checkpoint.every_num_steps=<VALUE>": "save_freq save_steps save_interval",
    "set checkpoint.keep_last=<VALUE>": (
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep save_total_limit max_ckpt_num"
    ),
    "set checkpoint.resume=auto trainer.run_dir=FOLDER": "resume_mode resume_from_checkpoint",
    "set eval.every_num_steps=<VALUE>": "test_freq eval_steps eval_interval",
    "set eval.temperature=<VALUE>": "val_kwargs.temperature eval_temperature",
    "set eval.top_p=<VALUE>": "val_kwargs.top_p eval_top_p",
    "set eval.num_responses_per_prompt=<VALUE>": "val_kwargs.n n_samples_per_eval_prompt",
    "set eval.num_prompts, which counts prompts": "val_batch_size per_device_eval_batch_size",
    "leave it out: evaluation comes before step 1 if eval.every_num_steps > 0": "val_before_train",
    "set mode=eval": "val_only",
    TRACKERS: "trainer.logger report_to use_wandb",
    "set tracking.project=<VALUE>": "project_name wandb_project",
    "set tracking.function=FILE.py:NAME": "custom_rollout_log_function_path",
    "set tracking.num_samples_per_step=<VALUE>": "log_val_generations num_completions_to_print",
    "set trainer.run_dir=<FOLDER>": (
        "experiment_name output_dir default_local_dir run_name ckpt_path save_path wandb_run_name"
    ),
    "set cluster=one_gpu cluster.num_ranks_per_node=<VALUE>": (
        "n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node"
    ),
    "set cluster.num_nodes=<VALUE> cluster.ray_address=auto": (
        "trainer.nnodes nnodes actor_num_nodes"
    ),
    "set cluster=one_gpu, or cluster=cpu": "trainer.device",
    "set cluster.collective_timeout_s=<VALUE>": "nccl_timeout",
    # Models, rows, rewards
    "set lora=default lora.rank=<VALUE>": "lora_rank lora_r",
    "set lora=default": "use_peft",
    "set lora=default lora.alpha=<VALUE>": "lora_alpha",
    "set lora=default lora.dropout=<VALUE>": "lora_dropout",
    "set lora=default lora.target_modules=[<NAME>]": "lora_target_modules target_modules",
    "set model.dtype=<VALUE>": "torch_dtype model_dtype",
    "set data=files data.train_files=[<FILE.parquet>]": "train_files prompt_data",
    "set data=files data.eval_files=[<FILE.parquet>]": "val_files eval_prompt_data",
    _DOWNLOAD_ROWS: "dataset_name",
    "set data.prompt_key=<VALUE>": "input_key",
    "set data.answer_key=<VALUE>": "label_key",
    "set data.source_key=<VALUE>": "reward_fn_key",
    "set data.use_chat_template=<VALUE>": "apply_chat_template",
    "set data.overlong_prompts=drop, error or keep_end": "filter_overlong_prompts data.truncation",
    "set reward.function=FILE.py:NAME": (
        "custom_reward_function reward_funcs reward_fn custom_rm_path rm_type "
        "reward_model.reward_manager"
    ),
    "set reward.function=<FILE.py>:NAME": "custom_reward_function.path",
    "set reward.function=model reward.args.path=<FOLDER>": (
        "reward_pretrain reward_model.path reward_model.model.path"
    ),
    "set reward.function=model reward.args.path=FOLDER": (
        "remote_rm_url reward_model.enable reward_model.model"
    ),
    # Preferences and reward models
    "set mode=reward_model": "train_rm",
    "set dpo.sft_coefficient=<VALUE>": "rpo_alpha",
    "set dpo.loss_args.label_smoothing=<VALUE>": "label_smoothing",
    "set dpo.loss=simpo dpo.loss_args.gamma=<VALUE>": "simpo_gamma",
    "set reward_model.center_coefficient=<VALUE>": "center_rewards_coefficient",
    # Agents
    _AGENT: (
        "multi_turn multi_turn.enable default_agent_loop agent_loop_config_path rollout_func "
        "agent_func_path custom_generate_function_path"
    ),
    "set agent=tool_calls agent.tools=[calculator,FILE.py:FUNCTION]": (
        "tools tool_config_path function_tool_path"
    ),
    "set agent.max_turns=<VALUE>": (
        "max_assistant_turns max_user_turns max_tool_calling_iterations"
    ),
    "set agent.max_result_chars=<VALUE>, which counts characters": "max_tool_response_length",
    "set agent.tool_format=<VALUE>": "multi_turn.format",
    "set agent.history=strict or keep": "tokenization_sanity_check_mode",
    "its keys are in actor, rollout and model: actor.optimizer.lr, "
    "rollout.num_responses_per_prompt, model.path": "actor_rollout_ref",
}

KEYS: Mapping[str, str] = {
    name: line for line, names in _NAMES_BY_LINE.items() for name in names.split()
}
"""By key, or by its last words; a key of one word without ``_`` is known only by itself."""

MODELS = (
    *("model_name_or_path", "hf_checkpoint", "pretrain", "model.name"),
    *("actor_rollout_ref.model.path", "model.partial_pretrain"),
)
"""Keys whose value is a model: a folder, or a name on the Hugging Face Hub."""

_DEFAULT = "leave it out: that is the default"


def _each(keys: str, values: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    return {key: values for key in keys.split()}


def _same(names: str, form: str = "{}") -> dict[str, str]:
    return {name: form.format(name) for name in names.split()}


VALUES: Mapping[str, Mapping[str, str]] = {
    **_each(
        "adv_estimator advantage_estimator algorithm.name",
        {
            **_same("grpo grpo_passk dr_grpo gspo cispo rloo remax opo gpg gdpo ppo"),
            **_same("reinforce_plus_plus reinforce_plus_plus_baseline optimal_token_baseline"),
            **{"gae": "ppo", "group_norm": "grpo", "reinforce": "reinforce_plus_plus"},
            "reinforce_baseline": "reinforce_plus_plus_baseline",
        },
    ),
    "loss_mode": {
        **_same("gspo cispo sapo clip_cov kl_cov gpg"),
        **{"vanilla": _DEFAULT, "geo_mean": "gmpo", "bypass_mode": "bypass_ppo_clip"},
        "dppo_tv": "dppo",
        "dppo_kl": "set algorithm=dppo algorithm.policy_loss=dppo_kl",
    },
    "loss_agg_mode": {
        "token-mean": "token_mean",
        "seq-mean-token-sum": "sequence_mean_token_sum",
        "seq-mean-token-mean": "sequence_mean_token_mean",
        "seq-mean-token-sum-norm": "sequence_mean_fixed_length",
    },
    "loss_type": {
        **{"grpo": "sequence_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean"},
        "dr_grpo": "sequence_mean_fixed_length",
        **_same("cispo sapo vespo luspo", "set algorithm={}"),
        **_same("sigmoid hinge ipo robust", "set dpo.loss={}"),
    },
    **_each("kl_coef kl_loss_coef init_kl_coef kl_ctrl.kl_coef beta", {"0": _DEFAULT}),
    **_each(
        "kl_loss_type kl_estimator kl_penalty",
        {"low_var_kl": "k3", "kl": "k1", "mse": "k2", "abs": "absolute"},
    ),
    **_each("norm_adv_by_std_in_grpo", {"true": "group", "false": "none"}),
    **_each("scale_rewards", {"true": "group", "false": "none", **_same("group batch none")}),
    "importance_sampling_level": {"token": _DEFAULT, "sequence": "set algorithm=gspo"},
    **_each(
        "strategy actor.strategy critic.strategy train_backend",
        {"fsdp": "fsdp2", **_same("fsdp2 megatron")},
    ),
    "rollout.name": {
        **_same("hf sglang", "set rollout={}"),
        "vllm": "set rollout=sglang or rollout=hf; vLLM is not supported yet",
    },
    "use_vllm": {"false": _DEFAULT, "true": "set rollout=sglang; vLLM is not supported yet"},
    **_each(
        "use_kl_loss use_kl_in_reward use_peft use_tis enforce_eager multi_turn.enable "
        "filter_groups.enable reward_model.enable",
        {"false": _DEFAULT},
    ),
    **_each(
        "warmup_style lr_scheduler_type lr_scheduler lr_decay_style",
        {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    ),
    **_each("trainer.nnodes nnodes actor_num_nodes", {"1": _DEFAULT}),
    "trainer.device": {"cuda": "set cluster=one_gpu", "cpu": "set cluster=cpu"},
    **_each("save_freq save_steps save_interval", {"-1": "set checkpoint.every_num_steps=0"}),
    **_each("test_freq eval_steps eval_interval", {"-1": "set eval.every_num_steps=0"}),
    "rollout_top_k": {"-1": "set rollout.top_k=0"},
    "filter_overlong_prompts": {
        "true": "set data.overlong_prompts=drop",
        "false": "set data.overlong_prompts=error",
    },
    "data.truncation": {
        "error": "set data.overlong_prompts=error",
        "left": "set data.overlong_prompts=keep_end",
    },
    **_each("lora_target_modules target_modules", {"all-linear": "set lora=default"}),
    "rm_type": _same("math http code", "set reward.function={}"),
}
"""By key and typed value: the value to type here, or the line. A key that stands in a line with
``<NAME>`` takes these values alone; others keep the values that are not listed."""
