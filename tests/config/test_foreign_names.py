"""Names of other frameworks are answered with ours, or with what is not supported yet."""

import re
from pathlib import Path

import pytest

from hybridrl.config import foreign_names
from hybridrl.config.foreign_names import answer_choice, answer_key
from hybridrl.config.load import free_keys, known_keys, load_config, unknown_key
from hybridrl.errors import ConfigErrors
from tests.command_line import call_main
from tests.config.values import values_of

ANSWERS = [*foreign_names._KEYS.values(), *foreign_names._CHOICES.values()]
OWN = {"recipes", *known_keys()}


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("rollout.n", "rollout.num_responses_per_prompt"),
        ("actor_rollout_ref.rollout.n", "rollout.num_responses_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "actor.optimizer.lr"),
        ("actor_rollout_ref", "actor.optimizer.lr"),
        ("kl_coef", "algorithm.kl.coefficient"),
        ("algorithm.kl_coef", "algorithm.kl.coefficient"),
        ("beta", "algorithm.kl.coefficient"),
        ("data.train_batch_size", "trainer.num_prompts_per_step"),
        ("algorithm.adv_estimator", "algorithm=ppo"),
        ("reward_model.model.path", "reward.function=model"),
        ("trainer.total_epochs", "trainer.num_epochs"),
        ("batch_size", "trainer.num_prompts_per_step"),
        ("actor.lr", "actor.optimizer.lr"),
        ("temperature", "rollout.temperature"),
        ("async_training.staleness_threshold", "trainer.max_staleness"),
        ("async_training.partial_rollout", "serving.on_update=interrupt"),
        ("rollout.max_head_offpolicyness", "trainer.max_staleness"),
        ("actor.use_decoupled_loss", "algorithm.rollout_correction=importance"),
        ("off_policy_mask_threshold", "algorithm.token_mask=off_policy_mask"),
        ("algorithm.use_opsm", "algorithm.token_mask=off_policy_mask"),
        ("async_training.use_rollout_log_probs", "algorithm.old_logprobs=sampler"),
        ("gradient_accumulation_steps", "actor.max_tokens_per_microbatch"),
    ],
)
def test_a_key_of_another_framework_is_answered(key: str, answer: str) -> None:
    assert answer in str(unknown_key(key, "1"))


@pytest.mark.parametrize(
    ("group", "name", "answer"),
    [
        ("algorithm", "reinforce++", "set algorithm=reinforce_plus_plus"),
        ("recipes", "clip_higher_kl_cpu", "set recipes=dapo_cpu"),
        ("rollout", "vllm", "set rollout=sglang"),
        ("model/Qwen", "Qwen2.5-0.5B", "set model=hf_folder model.path=FOLDER"),
        ("data", "gsm8k", "set data=files"),
        ("reward", "my_reward.py", "set reward.function=FILE.py:NAME"),
        ("reward", "http", "set reward.function=http"),
        ("tracking", "wandb", "set tracking.trackers=["),
    ],
)
def test_a_choice_of_another_framework_is_answered(group: str, name: str, answer: str) -> None:
    assert answer in answer_choice(group, name)


def test_help_answers_a_key_of_another_framework(tmp_path: Path) -> None:
    done = call_main("--help", "rollout.n", folder=tmp_path)
    assert "set rollout.num_responses_per_prompt" in done.stderr


def test_a_mistyped_key_of_ours_is_no_foreign_name() -> None:
    for key in ("actor.optimizer.beta", "rollout.temprature", "algorithm.epsilon", "rollout.lr"):
        assert answer_key(key) == ""


@pytest.mark.parametrize("answer", sorted(set(ANSWERS)))
def test_each_key_that_an_answer_names_exists(answer: str) -> None:
    sections = "|".join(key for key in OWN if "." not in key)
    named = set(re.findall(rf"\b(?:{sections})(?:\.\w+)+", answer))
    assert {name for name in named if name.rpartition(".")[0] not in free_keys()} <= OWN
    assert named or re.search(rf"\b(?:{sections})=\w+", answer)


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("algorithm.name=rloo", "set algorithm=grpo"),
        ("rollout.engine=vllm", "set rollout=sglang"),
        ("reward.function=my_reward.py", "set reward.function=my_reward.py:NAME"),
        ("data.train_files=[train.jsonl]", "set data=files to read them"),
        ("model.path=Qwen3-8B", "set model=hf_folder model.path=Qwen3-8B"),
        ("rollout.n=8", "set rollout.num_responses_per_prompt"),
        ("actor_rollout_ref={actor: {lr: 1}}", "actor.optimizer.lr"),
        ("data.train_files=['hf://openai/gsm8k']", "hf download NAME --repo-type dataset"),
    ],
)
def test_a_value_of_another_framework_is_answered(override: str, answer: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(answer)):
        load_config(values_of(override))


@pytest.mark.parametrize("path", ["hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"])
def test_a_model_of_the_hub_is_answered_with_its_download(path: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        load_config(values_of("model.starter=null", f"model.path='{path}'"))
    folder = "models/Qwen3-8B"
    words = f"hf download Qwen/Qwen3-8B --local-dir {folder}, then set model.path={folder}"
    assert words in str(refused.value)


@pytest.mark.parametrize("path", ["models/Qwen3-8B", "../Qwen3-8B", "/models/Qwen3-8B"])
def test_a_folder_that_is_missing_is_not_taken_for_a_name_of_the_hub(path: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        load_config(values_of("model.starter=null", f"model.path='{path}'"))
    assert f"download one (hf download NAME --local-dir {path})" in str(refused.value)
