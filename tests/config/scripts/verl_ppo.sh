python3 -m verl.trainer.main_ppo \
 algorithm.adv_estimator=gae \
 data.train_files=data/gsm8k/train.parquet \
 data.val_files=data/gsm8k/test.parquet \
 data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \
 actor_rollout_ref.model.path=models/deepseek-llm-7b-chat \
 actor_rollout_ref.actor.optim.lr=1e-6 \
 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
 critic.optim.lr=1e-5 critic.model.use_remove_padding=True \
 critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.model.enable_gradient_checkpointing=True \
 critic.ppo_micro_batch_size_per_gpu=32 \
 critic.model.fsdp_config.param_offload=False \
 algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=console \
 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=1 trainer.total_epochs=15
