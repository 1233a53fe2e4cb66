import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybridrl.config.checks import rules_of, run
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.load import load_config, read_config
from hybridrl.errors import ConfigError, ConfigErrors
from tests.config.values import config_of, values_of, with_overrides

LORA = ("lora=default",)
SGLANG = ("rollout=sglang",)
ADAPTER = (
    *("lora=default", "lora.init_from=adapter", "lora.rank=2", "lora.alpha=2"),
    *("lora.target_modules=[o_proj,q_proj]", "model.starter.num_layers=1"),
)

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
    (("rollout.engine_args={chunked_prefill_size: 512}",), "rollout.engine_args", "ignored"),
    (
        (*SGLANG, "rollout.engine_args={port: 1, chunked_prefill_size: 512}"),
        "rollout.engine_args.port",
        "looks for a free one",
    ),
    (
        (*SGLANG, "rollout.engine_args={mem_fraction_static: 0.5}"),
        "rollout.engine_args.mem_fraction_static",
        "rollout.memory_fraction says that",
    ),
    (
        (*SGLANG, "rollout.engine_args={max_lora_rank: 64, lora_backend: triton}"),
        "rollout.engine_args.max_lora_rank",
        "lora.rank says that",
    ),
    ((*SGLANG, "rollout.stage_timeout_s=50"), "rollout.stage_timeout_s", "30 s more"),
    ((*SGLANG, "rollout.stage_timeout_s=20"), "rollout.stage_timeout_s", "30 s more"),
    (
        (*SGLANG, "model.starter=null", "model.path=tied_moe"),
        "model.path",
        "does not tie that of qwen3_moe",
    ),
    (("rollout.tensor_parallel_size=2",), "rollout.tensor_parallel_size", "one rank"),
    (("mode=certify", "rollout=sglang"), "rollout.engine", "a generator of its own"),
    (("rollout.transport=disk",), "rollout.transport", "ignored"),
    (
        (
            "rollout=sglang",
            "cluster=one_gpu",
            "model.attention=varlen",
            "actor.compute_dtype=bfloat16",
            "rollout.transport=broadcast",
        ),
        "rollout.transport",
        "NCCL",
    ),
    (
        (
            "rollout=sglang",
            "rollout.tensor_parallel_size=4",
            "cluster.num_nodes=2",
            "cluster.ray_address=auto",
            "cluster.num_ranks_per_node=2",
        ),
        "rollout.tensor_parallel_size",
        "must divide cluster.num_ranks_per_node=2",
    ),
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
    ((*LORA, "lora.target_modules=[]"), "lora.target_modules", "a layer to adapt"),
    ((*LORA, "lora.target_modules=[q_porj]"), "lora.target_modules", "did you mean 'q_proj'"),
    ((*LORA, "lora.target_modules=[lm_head]"), "lora.target_modules", "matches no linear layer"),
    ((*LORA, "lora.rank=65"), "lora.rank", "at most 64: k_proj has 192 inputs and 64 outputs"),
    ((*LORA, "lora.dropout=0.1"), "lora.dropout", "only 0 is supported"),
    ((*LORA, "lora.base=backup"), "lora.base", "because of rollout.sleep=false"),
    (
        (*LORA, "lora.base=resend", "lora.sync=merged", "rollout.sleep=true"),
        "lora.base",
        "because of lora.sync=merged",
    ),
    ((*LORA, "lora.init_from=nowhere"), "lora.init_from", "does not exist"),
    ((*LORA, "lora.init_from=empty"), "lora.init_from", "has no adapter_config.json"),
    ((*ADAPTER, "lora.rank=4"), "lora.rank", "was made with 2"),
    ((*ADAPTER, "lora.alpha=4"), "lora.alpha", "was made with 2"),
    ((*ADAPTER, "lora.use_rslora=true"), "lora.use_rslora", "was made with False"),
    ((*ADAPTER, "lora.target_modules=[q_proj]"), "lora.target_modules", "made with ['o_proj',"),
    ((*ADAPTER, "model.starter.num_layers=2"), "lora.init_from", "layers.1.self_attn.o_proj"),
    ((*ADAPTER, "lora.init_from=dora"), "lora.init_from", "use_dora=True is not supported"),
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
        "tied_moe/config.json": '{"model_type": "qwen3_moe", "tie_word_embeddings": true}',
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
    for name, changes in {"adapter": {}, "dora": {"use_dora": True}}.items():
        _write_adapter(tmp_path / name, changes)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_adapter(folder: Path, changes: dict[str, object]) -> None:
    """Write an adapter of rank 2 for the first block of the default model."""
    modules = ("q_proj", "o_proj")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": list(modules)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    prefix = "base_model.model.model.layers.0.self_attn"
    shapes = {"lora_A": (2, 192), "lora_B": (192, 2)}
    tensors = {
        f"{prefix}.{module}.{matrix}.weight": np.zeros(shape, np.float32)
        for module in modules
        for matrix, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")


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
    assert silent == {"check_sglang_is_installed"}  # its test takes SGLang away


def test_a_run_on_sglang_without_sglang_is_told_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    (violation,) = violations_of(*SGLANG)
    assert (violation.key, violation.remedies) == ("rollout.engine", (("rollout.engine=hf",),))
    assert "pip install 'hybridrl[sglang]'" in str(violation)
    assert config_of(*SGLANG, "rollout.engine=hf").rollout.engine == "hf"


def test_what_sglang_alone_knows_passes_through() -> None:
    given = config_of(
        *SGLANG, "rollout.engine_args={chunked_prefill_size: 512, lora_backend: triton}"
    )
    assert given.rollout.engine_args == {"chunked_prefill_size": 512, "lora_backend": "triton"}


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


def test_an_adapter_that_fits_is_accepted_and_one_that_is_torn_is_named() -> None:
    assert config_of(*ADAPTER).lora.init_from == "adapter"
    weights = Path("adapter/adapter_model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (violation,) = violations_of(*ADAPTER)
    assert "adapter_model.safetensors is torn" in violation.rule
    weights.unlink()
    (violation,) = violations_of(*ADAPTER)
    assert "has no adapter_model.safetensors" in violation.rule
    for text, word in (('{"r": 2', "is torn"), ('{"r": 2}', "does not say"), ("[]", "does not")):
        Path("adapter/adapter_config.json").write_text(text)
        (violation,) = violations_of(*ADAPTER)
        assert word in violation.rule


def test_rank_zero_is_refused_with_a_legal_one() -> None:
    (violation,) = violations_of(*LORA, "lora.rank=0")
    assert (violation.key, violation.remedies) == ("lora.rank", (("lora.rank=1",),))


def test_a_section_that_is_off_is_held_to_nothing() -> None:
    config = config_of("lora.target_modules=[nothing]", "lora.rank=4096", "lora.init_from=nowhere")
    assert not config.lora.sends_adapters


def test_the_rank_is_held_against_the_config_of_a_model_folder() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
    shape |= {"intermediate_size": 128, "max_position_embeddings": 64}
    Path("model/config.json").write_text(json.dumps(shape))
    folder = ("model.starter=null", "model.path=model", *LORA)
    (violation,) = violations_of(*folder, "lora.rank=9")
    assert "at most 8: k_proj has 64 inputs and 8 outputs" in violation.rule
    assert config_of(*folder, "lora.rank=9", "lora.target_modules=[q_proj,down_proj]").lora.enabled
