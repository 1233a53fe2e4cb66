"""Names of other frameworks are answered with ours, or with what is not supported yet."""

import re
from pathlib import Path

import pytest

from hybridrl.config.foreign.names import answer_choice, answer_key, foreign_keys
from hybridrl.config.load import free_keys, known_keys, load_config, read_config, unknown_key
from hybridrl.env import ROOT
from hybridrl.errors import ConfigErrors
from tests.command_line import call_main
from tests.composing import composed
from tests.config.values import values_of

_SPELLED = [
    answer_key(key, value)
    for key, by_value in foreign_keys().typed.items()
    for value in ("", *by_value)
]
ANSWERS = [
    *(answer_key(key) for key in foreign_keys().lines),
    *(line for group in foreign_keys().choices.values() for line in group.values()),
    *_SPELLED,
]
OWN = {"recipes", *known_keys()}


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("rollout.n", "rollout.num_responses_per_prompt"),
        ("actor_rollout_ref.rollout.n", "rollout.num_responses_per_prompt"),
        ("actor_rollout_ref", "actor.optimizer.lr"),
        ("kl_coef", "algorithm.kl.coefficient"),
        ("data.train_batch_size", "trainer.num_prompts_per_step"),
        ("algorithm.adv_estimator", "algorithm=NAME"),
        ("reward_model.model.path", "reward.function=model"),
        ("sft.num_steps", "trainer.num_steps=1"),
        ("dpo.batch_size", "trainer.num_prompts_per_step=1"),
        ("reward_model.eval_every_num_steps", "eval.every_num_steps=1"),
        ("actor.lr", "actor.optimizer.lr"),
        ("async_training.staleness_threshold", "trainer.max_staleness"),
        ("off_policy_mask_threshold", "algorithm.token_mask=off_policy_mask"),
        ("gradient_accumulation_steps", "actor.max_tokens_per_microbatch"),
        ("group_rm", "asks for responses"),
        ("reward_key", "reward.functions={...}"),
        ("custom_reward_post_process_path", "algorithm.advantage=FILE.py:NAME"),
        ("custom_loss_function_path", "algorithm.policy_loss=FILE.py:NAME"),
        ("custom_pg_loss_reducer_function_path", "algorithm.loss_aggregation=FILE.py:NAME"),
        ("custom_tis_function_path", "algorithm.rollout_correction=FILE.py:NAME"),
        ("rollout_sample_filter_path", "algorithm.row_filter=FILE.py:NAME"),
        ("data_source_path", "data.train_files=[FILE.py:NAME]"),
        ("custom_eval_rollout_log_function_path", "tracking.function=FILE.py:NAME"),
    ],
)
def test_a_key_of_another_framework_is_answered(key: str, answer: str) -> None:
    assert answer in str(unknown_key(key, "1"))


TYPED = {
    # verl
    "algorithm.adv_estimator=gae": "set algorithm=ppo",
    "data.train_files=[a.json,b.json]": "set data=files data.train_files=[a.json,b.json]",
    "actor_rollout_ref.rollout.n=5": "set rollout.num_responses_per_prompt=5",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.6": "set eval.temperature=0.6",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": (
        "set algorithm.loss_aggregation=sequence_mean_token_sum"
    ),
    "actor_rollout_ref.actor.use_kl_loss=False": "leave it out: that is the default",
    "algorithm.kl_ctrl.kl_coef=0.01": (
        "set algorithm.kl.placement=reward algorithm.kl.coefficient=0.01"
    ),
    "critic.optim.lr=1e-5": "set critic.optimizer.lr=1e-5",
    "actor_rollout_ref.rollout.enforce_eager=True": (
        "set rollout.engine_args.disable_cuda_graph=true"
    ),
    "trainer.n_gpus_per_node=8": "set cluster=one_gpu cluster.num_ranks_per_node=8",
    "trainer.test_freq=-1": "set eval.every_num_steps=0",
    "data.return_multi_modal_inputs=True": "leave it out: the run does it itself",
    "data.video_key=films": "leave it out: images alone are supported",
    "actor_rollout_ref.actor.freeze_vision_tower=True": "set model.freeze_vision=True",
    # TRL
    "beta=0.0": "leave it out: that is the default",
    "loss_type=dr_grpo": "set algorithm.loss_aggregation=sequence_mean_fixed_length",
    "report_to=wandb": "set tracking.trackers=[tensorboard,wandb]",
    "report_to=none": "leave it out: TensorBoard is the default, which asks no service",
    "trainer.logger=['console','swanlab']": "set tracking.trackers=[tensorboard,swanlab]",
    "trainer.logger=console": "leave it out: TensorBoard is the default",
    # slime
    "multimodal-keys={image:images}": "set data.images_key=VALUE",
}


@pytest.mark.parametrize("typed", TYPED)
def test_an_answer_is_the_line_to_type_with_the_value(typed: str) -> None:
    key, _, value = typed.partition("=")
    answer = answer_key(key, value, known=OWN)
    assert answer.partition(";")[0] == TYPED[typed]
    overrides = answer.removeprefix("set ").partition(";")[0].split(" ")
    if answer.startswith("set "):
        assert read_config(composed(*overrides))[1] == []


def test_a_value_that_would_not_fit_into_a_line_leaves_its_place() -> None:
    assert answer_key("train_files", "${x}/a b.parquet") == (
        "set data=files data.train_files=[FILE.parquet]"
    )
    assert "set algorithm=NAME" in answer_key("adv_estimator", "sky")


def test_a_known_key_in_another_section_is_meant_with_its_value() -> None:
    assert "did you mean actor.optimizer.weight_decay=0.1" in str(
        unknown_key("trainer.weight_decay", "0.1")
    )


def test_a_mistyped_key_of_a_file_is_answered_with_its_value() -> None:
    with pytest.raises(ConfigErrors, match=re.escape("use rollout.temperature=0.7")):
        load_config(values_of("rollout.temprature=0.7"))
    with pytest.raises(ConfigErrors, match=re.escape("rollout.num_responses_per_prompt=4")):
        load_config(values_of("rollout.n=4"))


@pytest.mark.parametrize(
    ("group", "name", "answer"),
    [
        ("algorithm", "reinforce++", "set algorithm=reinforce_plus_plus"),
        ("recipes", "clip_higher_kl_cpu", "set recipes=algorithms/dapo"),
        ("recipes", "grpo_cpu", "leave it out: GRPO on this CPU is the default"),
        ("rollout", "vllm", "set rollout=sglang"),
        ("model/Qwen", "Qwen2.5-0.5B", "set model=hf_folder model.path=models/Qwen2.5-0.5B"),
        ("data/openai", "gsm8k", "hf download NAME --repo-type dataset"),
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
    assert "<" not in answer
    named = set(re.findall(rf"(?<![\w.])(?:{sections})(?:\.\w+)+", answer))
    assert {name for name in named if name.rpartition(".")[0] not in free_keys()} <= OWN
    chosen = set(re.findall(rf"\b({sections})=([\w/]+)", answer))
    assert named or chosen or answer.startswith("leave it out")
    for section, name in chosen:
        folder = ROOT / ("recipes" if section == "recipes" else f"hydra_configs/{section}")
        assert section == "mode" or name == "NAME" or (folder / f"{name}.yaml").is_file()


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("algorithm.name=rloo", "set algorithm=rloo"),
        ("mode=certify", "python -m hybridrl.checkpoint.compare"),
        ("rollout.engine=vllm", "set rollout=sglang"),
        ("reward.function=my_reward.py", "set reward.function=my_reward.py:NAME"),
        ("data.train_files=[train.jsonl]", "set data=files to read them"),
        ("model.path=Qwen3-8B", "then set model=hf_folder model.path=Qwen3-8B"),
        ("rollout.n=8", "set rollout.num_responses_per_prompt"),
        ("actor_rollout_ref={actor: {lr: 1}}", "actor.optimizer.lr"),
        ("data.train_files=['hf://openai/gsm8k']", "hf download NAME --repo-type dataset"),
    ],
)
def test_a_value_of_another_framework_is_answered(override: str, answer: str) -> None:
    with pytest.raises(ConfigErrors, match=re.escape(answer)):
        load_config(values_of(override))


@pytest.mark.parametrize("path", ["hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B"])
@pytest.mark.parametrize("starter", [(), ("model.starter=null",)])
def test_a_model_of_the_hub_is_answered_once_with_its_download(
    path: str, starter: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigErrors) as refused:
        load_config(values_of(*starter, f"model.path='{path}'"))
    (violation,) = refused.value.violations
    folder = "models/Qwen3-8B"
    download = f"type `hf download Qwen/Qwen3-8B --local-dir {folder}`"
    assert f"{download}, then set model=hf_folder model.path={folder}" in str(violation)


@pytest.mark.parametrize("path", ["models/Qwen3-8B", "../Qwen3-8B", "/models/Qwen3-8B"])
def test_a_folder_that_is_missing_is_not_taken_for_a_name_of_the_hub(path: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        load_config(values_of("model.starter=null", f"model.path='{path}'"))
    assert f"type `hf download NAME --local-dir {path}`" in str(refused.value)


def test_a_model_that_is_there_needs_no_download(tmp_path: Path) -> None:
    line = f"set model=hf_folder model.path={tmp_path}"
    assert answer_key("model_name_or_path", str(tmp_path)) == line
