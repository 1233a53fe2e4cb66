import re
from pathlib import Path

import pytest

from hybridrl.config.checks import rules_of, run
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config, read_config
from hybridrl.errors import ConfigError, ConfigErrors
from tests.config.values import config_of, values_of, with_overrides

# What the user typed, the key that is named, and a word of the rule.
BROKEN: list[tuple[tuple[str, ...], str, str]] = [
    (("model.starter=null",), "model.path", "needs a model folder"),
    (("model.path=model",), "model.starter", "ignored"),
    (("model.starter=null", "model.path=nowhere"), "model.path", "does not exist"),
    (("model.starter=null", "model.path=empty"), "model.path", "no config.json"),
    (
        ("model.starter=null", "model.path=model", "rollout.max_response_tokens=100"),
        "model.path",
        "its context is 64 tokens",
    ),
    (("model.starter.hidden_size=200",), "model.starter.hidden_size", "multiple of 12"),
    (("model.starter.num_key_value_heads=4",), "model.starter.num_key_value_heads", "divide"),
    (
        ("data.max_prompt_tokens=4096",),
        "model.starter.max_position_embeddings",
        "longest row has 4120 tokens",
    ),
    (
        ("cluster.num_ranks_per_node=3", "trainer.num_prompts_per_step=15"),
        "model.starter.warmup_batch_size",
        "multiple of 3 ranks",
    ),
    (("data.use_chat_template=true",), "data.use_chat_template", "no chat template"),
    (("model.attention=varlen",), "model.attention", "runs on CUDA in bfloat16"),
    (
        ("rollout.num_responses_per_prompt=1",),
        "rollout.num_responses_per_prompt",
        "siblings",
    ),
    (("algorithm=ppo", "trainer.num_steps=5"), "critic.num_warmup_steps", "never learn"),
    (("algorithm=ppo", "critic.num_minibatches=3"), "critic.num_minibatches", "multiple of 3"),
    (
        ("algorithm=ppo", "critic.placement=own_pool", "critic.num_ranks_per_node=3"),
        "critic.num_ranks_per_node",
        "multiple of 12 (3 ranks",
    ),
    (
        (
            "algorithm=ppo",
            "cluster=one_gpu",
            "model.attention=varlen",
            "actor.compute_dtype=bfloat16",
        ),
        "critic.compute_dtype",
        "computes in bfloat16",
    ),
    (("algorithm.num_epochs=2",), "algorithm.old_logprobs", "one update"),
    (("algorithm.num_minibatches=4",), "algorithm.old_logprobs", "num_minibatches=4"),
    (
        ("algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.1"),
        "algorithm.old_logprobs",
        "before the update",
    ),
    (("algorithm.kl.coefficient=0.1",), "algorithm.kl.coefficient", "ignored"),
    (("algorithm.kl.placement=loss",), "algorithm.kl.coefficient", "weighs nothing"),
    (
        (
            "algorithm.kl.placement=loss",
            "algorithm.kl.coefficient=0.1",
            "algorithm.kl.estimator=k1",
        ),
        "algorithm.kl.estimator",
        "expected gradient is 0",
    ),
    (("algorithm.sampler_ratio_cap=0.5",), "algorithm.sampler_ratio_cap", "at least 1"),
    (("rollout.tensor_parallel_size=2",), "rollout.tensor_parallel_size", "one rank"),
    (
        ("trainer.num_prompts_per_step=15", "cluster.num_ranks_per_node=2"),
        "trainer.num_prompts_per_step",
        "multiple of 2 rollout engines",
    ),
    (
        (
            "algorithm.old_logprobs=recompute",
            "algorithm.num_minibatches=3",
            "cluster.num_ranks_per_node=8",
        ),
        "trainer.num_prompts_per_step",
        "multiple of 24",
    ),
    (("data.task=null",), "data.train_files", "a built-in task"),
    (("data.train_files=[train.jsonl]",), "data.train_files", "ignored"),
    (("data.eval_files=[train.jsonl]",), "data.eval_files", "ignored"),
    (("data.task=null", "data.train_files=[train.jsonl]"), "eval.every_num_steps", "empty"),
    (("data.min_digits=21",), "data.min_digits", "at most data.max_digits=20"),
    (("data.max_digits=40",), "data.max_digits", "a token a digit"),
    (("data.max_digits=300",), "data.max_digits", "a token a digit"),
    (("rollout.max_response_tokens=1",), "data.max_digits", "max_response_tokens=1"),
    (("cluster.num_nodes=2",), "cluster.num_nodes", "this machine alone"),
    (("cluster.ray_address=somewhere",), "cluster.ray_address", "HOST:PORT"),
    (("cluster.object_store_mib=40",), "cluster.object_store_mib", "at least 80 MiB"),
    (
        ("cluster.object_store_mib=500", "cluster.ray_address=auto"),
        "cluster.object_store_mib",
        "would be ignored",
    ),
    (("reward.function=exact_mach",), "reward.function", "neither"),
    (("reward.function=math",), "reward.function", "math-verify"),
    (("reward.function=nowhere.py:score",), "reward.function", "does not exist"),
    (("reward.function=reward.py:scoer",), "reward.function", "no function 'scoer'"),
    (("reward.function=broken.py:score",), "reward.function", "not a Python file"),
    (("trainer.run_dir=old", "checkpoint.resume=never"), "trainer.run_dir", "another run"),
    (("trainer.run_dir=model", "trainer.overwrite=true"), "trainer.run_dir", "no run folder"),
    (("trainer.run_dir=.",), "trainer.run_dir", "no run folder"),
    (("trainer.run_dir=train.jsonl/run",), "trainer.run_dir", "no folder"),
    (("tracking.trackers=[tensorboard,wandb]",), "tracking.trackers", "not installed: wandb"),
    (
        ("mode=sft", "cluster.num_ranks_per_node=3", "model.starter.warmup_batch_size=63"),
        "sft.batch_size",
        "multiple of 3",
    ),
]
FILES = ["data.task=null", "eval.every_num_steps=0"]
BROKEN_FILES = [
    ("nowhere.jsonl", "does not exist"),
    ("empty.jsonl", "0 bytes"),
    ("train.csv", "must end in"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "model/config.json": '{"max_position_embeddings": 64}',
        "empty/README": "",
        "train.jsonl": '{"prompt": "1", "answer": "1"}\n',
        "empty.jsonl": "",
        "reward.py": "def score(responses, answers):\n    return [0.0 for _ in responses]\n",
        "broken.py": "def score(:\n",
        "old/config.yaml": "mode: train\n",
        "old/metrics.jsonl": "{}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def violations_of(*overrides: str) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        config_of(*overrides)
    return caught.value.violations


@pytest.mark.parametrize(("overrides", "key", "word"), BROKEN)
def test_a_broken_rule_is_named_and_each_remedy_mends_it(
    overrides: tuple[str, ...], key: str, word: str
) -> None:
    found = [v for v in violations_of(*overrides) if v.key == key and word in v.rule]
    assert len(found) == 1, [str(v) for v in violations_of(*overrides)]
    assert "Fix: " in str(found[0])
    for remedy in found[0].remedies:
        mended = with_overrides(values_of(*overrides), remedy)
        assert load_config(mended) is not None, remedy


@pytest.mark.parametrize(("file", "word"), BROKEN_FILES)
def test_an_unusable_data_file_is_named(file: str, word: str) -> None:
    violations = violations_of(*FILES, f"data.train_files=[train.jsonl,{file}]")
    assert [v.key for v in violations] == ["data.train_files"]
    assert file in str(violations[0])
    assert word in violations[0].rule


def _broken(overrides: tuple[str, ...]) -> ExperimentConfig:
    config, violations = read_config(values_of(*overrides))
    assert config is not None
    assert not violations
    return config


def test_every_rule_has_an_example_that_breaks_it() -> None:
    examples = [_broken(overrides) for overrides, _, _ in BROKEN]
    examples.append(_broken((*FILES, "data.train_files=[empty.jsonl]")))
    rules = {
        rule for mode in ("train", "sft") for group in rules_of(mode).values() for rule in group
    }
    silent = {rule.__name__ for rule in rules if not any(run((rule,), e) for e in examples)}
    assert silent == set()


def test_all_violations_of_all_sections_are_reported_at_once() -> None:
    keys = [
        violation.key
        for violation in violations_of(
            "rollout.top_p=2.0",
            "algorithm.kl.coefficient=0.1",
            "data.min_digits=21",
            "cluster.num_ranks_per_node=0",
            "trainer.num_steps='7'",
        )
    ]
    assert sorted(keys) == [
        "algorithm.kl.coefficient",
        "cluster.num_ranks_per_node",
        "data.min_digits",
        "rollout.top_p",
        "trainer.num_steps",
    ]


def test_every_remedy_stands_in_the_message_that_the_user_reads() -> None:
    for overrides, _, _ in BROKEN:
        for violation in violations_of(*overrides):
            for override in (o for remedy in violation.remedies for o in remedy):
                key = re.split("=", override)[0]
                assert key in str(violation) or "did you mean" in str(violation)


def test_supervised_mode_does_not_ask_for_what_only_sampling_needs() -> None:
    assert config_of("mode=sft", "rollout.num_responses_per_prompt=1").mode == "sft"


def test_an_existing_run_folder_may_be_replaced_on_request() -> None:
    assert config_of("trainer.run_dir=old", "trainer.overwrite=true").trainer.overwrite
    Path("new").mkdir()
    assert config_of("trainer.run_dir=new").trainer.run_dir == "new"


def test_a_function_of_the_reward_file_is_accepted() -> None:
    assert config_of("reward.function=reward.py:score").reward.function == "reward.py:score"


def test_a_critic_needs_no_siblings_and_what_it_lacks_matters_only_where_it_is_asked() -> None:
    config = config_of("algorithm=ppo", "rollout.num_responses_per_prompt=1")
    assert config.has_critic
    assert config.num_policy_updates == 95
    broken = (
        "critic.num_minibatches=3",
        "critic.num_warmup_steps=1000",
        "critic.placement=own_pool",
    )
    config = config_of(*broken)
    assert not config.has_critic
    assert not config.has_critic_pool
    assert config.num_policy_updates == 100
