import ast
import asyncio
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybridrl.config.checks import messages
from hybridrl.config.checks.rollout import check_sglang_is_installed
from hybridrl.config.checks.unread import unread_keys
from hybridrl.config.checks.violations import rules_of
from hybridrl.config.load import load_config
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.reward import BATCH_COLUMNS, ROW_COLUMNS
from hybridrl.errors import ConfigError, ConfigErrors, instruction
from hybridrl.rewards import child
from tests.config.examples import (
    ADAPTER,
    AHEAD,
    BROKEN,
    FILES,
    GPUS,
    LEGAL,
    LORA,
    MEGATRON,
    MISSING,
    MOE,
    PP2,
    SERVERS,
    SGLANG,
    TOOLS,
    TP2,
    UNREAD,
)
from tests.config.values import config_of, values_of, with_overrides
from tests.planning.models import QWEN3_5_9B

NO_TENSORS = "\2" + 7 * "\0" + "{}"
"""A safetensors file of none."""

TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
TOWER |= {"out_hidden_size": 4096, "num_position_embeddings": 2304}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
REWARDS = """# -*- coding: latin-1 -*-
import json
def few(responses): ...
def many(responses, answers, prompts, sources, n): ...
def mixed(response, answers): ...
def placed(responses, /): ...
def scaled(response, *, by: Annotated[float, Field(ge=0, le=2, description="test")] = 1): ...
async def later(**_): ...
class Score: ...
if json:
    def within(responses, *, answers, n=1, **others): ...
made = wrapped = lambda **_: []
@json.JSONEncoder
def decorated(): ...
"""


def _scorer(model_type: str, num_labels: int = 1, kind: str = "Sequence") -> str:
    labels = {str(n): f"LABEL_{n}" for n in range(num_labels)}
    names = [f"SomeFor{kind}Classification"]
    return json.dumps({"model_type": model_type, "architectures": names, "id2label": labels})


QWEN3 = '{"model_type": "qwen3"}'
FILES_OF_EXAMPLES = {
    **{
        f"{name}/config.json": QWEN3
        for name in ("torn", "wordless", "weightless", "half", "void", "cut", "page")
    },
    **{
        f"{name}/tokenizer.json": "{}"
        for name in ("judge", "taught", "weightless", "half", "void", "cut", "page")
    },
    **{
        f"{name}.safetensors": NO_TENSORS
        for name in ("judge/model", "taught/model", "wordless/model", "half/model-00001-of-00002")
    },
    **dict.fromkeys(("empty/README", "empty.jsonl", "void/model.safetensors", "new/.lock"), ""),
    "model/config.json": '{"model_type": "qwen3", "max_position_embeddings": 64}',
    "judge/config.json": '{"model_type": "qwen3", "vocab_size": 9}',
    "taught/config.json": '{"model_type": "qwen3", "vocab_size": 512}',
    "list/config.json": "[]",
    "unknown/config.json": '{"model_type": "mamba2"}',
    "copy.py": "def copy(folder, step): pass\n",
    "own.py": "def distance(old_logprobs_BL, reference_logprobs_BL):\n    return None\n",
    "small/config.json": '{"model_type": "qwen3", "vocab_size": 9, "pad_token_id": 9}',
    "endless/config.json": '{"model_type": "qwen3", "vocab_size": 9}',
    "endless/generation_config.json": '{"eos_token_id": [1, 9]}',
    "torn/model.safetensors.index.json": "{}",
    "wordless/tokenizer_config.json": "{}",
    "cut/model.safetensors": "\x38"
    + 7 * "\0"
    + '{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]} }',
    "page/model.safetensors": "<html>not found</html>",
    "half/model.safetensors.index.json": json.dumps(
        {"weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    ),
    "tied_moe/config.json": '{"model_type": "qwen3_moe", "tie_word_embeddings": true}',
    "narrow/config.json": json.dumps(
        {"model_type": "qwen3", "hidden_size": 384, "num_attention_heads": 12}
        | {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 510}
    ),
    "dense_moe/config.json": '{"model_type": "qwen2_moe", "mlp_only_layers": [1]}',
    "mixtral/config.json": '{"model_type": "mixtral"}',
    "shared/config.json": json.dumps(
        QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 35}
    ),
    "mistral/config.json": '{"model_type": "mistral"}',
    "moe/config.json": json.dumps(QWEN3_MOE),
    "scorer/config.json": _scorer("qwen3"),
    "labels/config.json": _scorer("qwen3", num_labels=2),
    "phi3_scorer/config.json": _scorer("phi3", kind="Token"),
    "gemma/config.json": '{"model_type": "gemma3_text"}',
    "eyes/config.json": json.dumps(QWEN3_5_9B | {"vision_config": TOWER}),
    "eyes/preprocessor_config.json": "{}",
    "blind/config.json": json.dumps(QWEN3_5_9B | {"vision_config": TOWER}),
    "capped/config.json": '{"model_type": "gemma3_text", "final_logit_softcapping": 30.0}',
    "dynamic/config.json": json.dumps(
        {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    ),
    "phi/config.json": '{"model_type": "phi3"}',
    "long/config.json": json.dumps(
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "su"},
            "original_max_position_embeddings": 64,
        }
    ),
    "train.jsonl": '{"prompt": "1", "answer": "1"}\n',
    "splits/dataset_dict.json": "{}",
    "splits/train/state.json": "{}",
    "splits/test/state.json": "{}",
    "reward.py": "def score(responses, **_):\n    return [0.0 for _ in responses]\n",
    "broken.py": "def score(:\n",
    "outside.py": "def score(**_): ...\nreturn 1\n",
    "rewards.py": REWARDS,
    "rewards.txt": REWARDS,
    "old/config.yaml": "mode: train\n",
    "old/metrics.jsonl": "{}\n",
    "old/rollouts/step-000000001-train-0.json": "{}",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of many kinds, for tests that change none of them."""
    files = tmp_path_factory.mktemp("files")
    for name, text in FILES_OF_EXAMPLES.items():
        (files / name).parent.mkdir(exist_ok=True, parents=True)
        (files / name).write_text(text)
    adapters: dict[str, dict[str, object]] = {"adapter": {}, "dora": {"use_dora": True}}
    for name, changes in adapters.items():
        _write_adapter(files / name, changes)
    _write_adapter(files / "seen", {}, tower=("visual.blocks.0.attn.qkv",))
    before = _contents_of(files)
    yield files
    assert _contents_of(files) == before


def _contents_of(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.fixture(autouse=True)
def _here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


@pytest.fixture
def folder(files: Path, _here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, for a test that changes some."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_adapter(folder: Path, changes: dict[str, object], tower: tuple[str, ...] = ()) -> None:
    """Write an adapter of rank 2 for the first block of the default model, and of a tower."""
    modules = ("q_proj", "o_proj")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": list(modules)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    layers = (*(f"layers.0.self_attn.{module}" for module in modules), *tower)
    shapes = {"lora_A": (2, 192), "lora_B": (192, 2)}
    tensors = {
        f"base_model.model.model.{layer}.{matrix}.weight": np.zeros(shape, np.float32)
        for layer in layers
        for matrix, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def violations_of(*overrides: str) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        config_of(*overrides)
    return caught.value.violations


@cache
def refused(overrides: tuple[str, ...]) -> tuple[tuple[ConfigError, ...], set[tuple[str, int]]]:
    """Violations of an example, and the place of each call of ``error`` that was reached."""
    reached, error = set(), messages.error

    def recording(*args: Any, **kwargs: Any) -> ConfigError:
        caller = sys._getframe(1)
        reached.add((caller.f_code.co_filename, caller.f_lineno))
        return error(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in sys.modules.items():
            if name.startswith("hybridrl.config.checks.") and "error" in vars(module):
                patch.setitem(vars(module), "error", recording)
        return violations_of(*overrides), reached


@pytest.mark.shows("1.12", "4.10", "6.4")
@pytest.mark.parametrize(("overrides", "key", "word"), BROKEN, ids=[word for *_, word in BROKEN])
def test_a_broken_rule_is_named_and_each_remedy_mends_it(
    overrides: tuple[str, ...], key: str, word: str
) -> None:
    violations, _ = refused(overrides)
    words = word.split("...")
    found = [v for v in violations if v.key == key and all(each in v.rule for each in words)]
    assert len(found) == 1, [str(v) for v in violations]
    assert "Fix: " in str(found[0])
    for remedy in found[0].remedies:
        mended = with_overrides(values_of(*overrides), remedy)
        assert load_config(mended) is not None, remedy
    for violation in violations:  # every remedy stands in the message that the user reads
        for remedy in violation.remedies:
            for override in remedy:
                key_of_remedy = override.partition("=")[0]
                assert key_of_remedy in str(violation) or "did you mean" in str(violation)
            assert shlex.split(instruction(remedy))[1:] == list(remedy)


def test_the_section_that_nobody_changed_is_that_of_the_file() -> None:
    assert config_of().megatron == MegatronConfig()


def test_each_key_of_the_table_has_an_example_and_its_default_is_that_of_the_files() -> None:
    rows = [row for rows in unread_keys().values() for row in rows]
    keys = {key: usual for row in rows for key, usual in row.get("keys", {}).items()}
    patterns = [re.escape(key).replace(r"\*", "[^.]+") for key in keys]
    named = {key for _, key, _ in UNREAD}
    assert [p for p in patterns if not any(re.fullmatch(p, key) for key in named)] == []
    usual = config_of()
    for key, default in keys.items():
        if "*" not in key and "_args." not in key and key != "data.task":
            value = messages.value_at(usual, key)
            assert (list(value) if isinstance(value, tuple) else value) == default, key


def test_a_plan_needs_neither_data_nor_reward_nor_sglang() -> None:
    keys = ("data.train_files=[nowhere.jsonl]", "reward.function=nowhere.py:f")
    overrides = (*FILES, *keys, "trainer.run_dir=model")
    missing = {violation.key for violation in violations_of(*overrides, "mode=check")}
    assert missing == {"data.train_files", "reward.function", "trainer.run_dir"}
    assert config_of(*overrides, "mode=plan").mode == "plan"
    planned = [rule for rules in rules_of("plan").values() for rule in rules]
    assert check_sglang_is_installed not in planned


@pytest.mark.parametrize(("overrides", "key", "why"), LEGAL, ids=[why for *_, why in LEGAL])
def test_what_is_legal_is_accepted(overrides: tuple[str, ...], key: str, why: str) -> None:
    config_of(*overrides)


def _places_of_errors() -> dict[tuple[str, int], str]:
    """Each call of `error` in the checks, by file and line, with its code."""
    return {
        (str(file), node.lineno): ast.unparse(node)
        for file in Path(messages.__file__).parent.glob("*.py")
        if file.stem != "messages"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "error"
    }


def test_every_error_has_an_example_that_raises_it() -> None:
    reached = set().union(*(refused(overrides)[1] for overrides, _, _ in BROKEN))
    unreached = {code for place, code in _places_of_errors().items() if place not in reached}
    # Their tests take SGLang, megatron-core, bm25s and wandb away, or write a function.
    assert unreached == {
        "error(config, 'rollout.engine', 'SGLang is not installed', 'rollout.engine=hf', fix=fix)",
        "error(config, key, 'megatron-core is not installed', f'{key}=fsdp2', fix=fix)",
        "error(config, _TOOLS, rule, without, fix=fix)",
        "error(config, key, f\"not installed: {', '.join(missing)}\", usable, fix=fix)",
        "error(config, key, 'it is a function of another framework', fix=fix)",
    }


@pytest.mark.parametrize(("given", "missing", "remedy"), MISSING)
def test_a_package_that_is_missing_is_named_with_its_extra(
    given: tuple[str, ...], missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (violation,) = violations_of(*given)
    extra = {"megatron.core": "megatron", "bm25s": "search"}.get(missing, missing)
    assert f"pip install 'hybridrl[{extra}]'" in str(violation)
    assert violation.remedies == (tuple(remedy.split()),)
    assert load_config(with_overrides(values_of(*given), violation.remedies[0]))


def test_context_parallel_ranks_have_the_same_rows_on_any_device() -> None:
    sizes = (*MEGATRON, "cluster.num_ranks_per_node=4", "megatron.context_parallel_size=2")
    assert config_of(*sizes).num_train_groups == 2
    assert config_of(*MEGATRON, *GPUS, "megatron.context_parallel_size=2").num_train_groups == 4
    shared = config_of(*GPUS, "actor.fsdp2.context_parallel_size=2")
    assert shared.num_train_groups == shared.num_critic_groups == 4


def test_transformer_engine_is_accepted_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = (*MEGATRON, *GPUS, "megatron.layers=transformer_engine")
    assert violations_of(*given)[0].key == "megatron.layers"
    (tmp_path / "transformer_engine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert config_of(*given).num_train_groups == 8
    fp8 = "megatron.transformer_args={fp8: hybrid}"
    assert config_of(*MEGATRON, *GPUS, fp8).megatron.transformer_args == {"fp8": "hybrid"}
    local = violations_of(*MEGATRON, *GPUS, "megatron.layers=local", fp8)
    assert [violation.key for violation in local] == ["megatron.transformer_args.fp8"]


def test_all_sizes_that_do_not_divide_are_told_at_once() -> None:
    given = (
        *(*MOE, *GPUS, "cluster.num_ranks_per_node=6", "megatron.tensor_parallel_size=3"),
        *("megatron.pipeline_parallel_size=3", "megatron.expert_parallel_size=5"),
        "trainer.num_prompts_per_step=18",
    )
    found = violations_of(*given)
    assert {violation.key for violation in found} == {
        "cluster.num_ranks_per_node",
        "megatron.tensor_parallel_size",
        "megatron.pipeline_parallel_size",
        "megatron.sequence_parallel",
        "megatron.expert_parallel_size",
    }
    mended = with_overrides(
        values_of(*given),
        (
            *("megatron.tensor_parallel_size=2", "megatron.pipeline_parallel_size=2"),
            *("megatron.sequence_parallel=true", "megatron.expert_parallel_size=4"),
            "cluster.num_ranks_per_node=8",
        ),
    )
    assert load_config(mended | {"trainer": mended["trainer"] | {"num_prompts_per_step": 16}})


def test_a_section_that_divides_is_accepted_and_counts_its_data_parallel_ranks() -> None:
    config = config_of(
        *(*MEGATRON, *SGLANG, *TP2, *PP2, "megatron.num_virtual_stages=2"),
        *("cluster.num_ranks_per_node=8", "megatron.sequence_parallel=true"),
    )
    assert (config.num_train_groups, config.num_critic_groups) == (2, 2)
    assert config.megatron_worlds == {"cluster.num_ranks_per_node": 8}
    moe = config_of(
        *(*MOE, *GPUS, *TP2, "megatron.sequence_parallel=true"),
        *("megatron.expert_parallel_size=8", "actor.replay_routing=true"),
        "megatron.load_balance_coefficient=0.001",
    )
    assert moe.num_train_groups == 4


def test_a_hook_that_is_there_is_accepted_and_its_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "unread_hooks.py").write_text("raise SystemExit\ndef install(): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        config = config_of("cluster.worker_setup_hook=unread_hooks.install")
        assert config.cluster.worker_setup_hook == "unread_hooks.install"
        (violation,) = violations_of("cluster.worker_setup_hook=unread_hooks.sub.install")
        assert "there is no module unread_hooks.sub" in violation.rule


def test_all_violations_of_all_sections_are_reported_at_once() -> None:
    keys = [
        violation.key
        for violation in violations_of(
            "rollout.top_p=2.0",
            "algorithm.kl.coefficient=0.1",
            "data.use_chat_template=true",
            "cluster.num_ranks_per_node=0",
            "trainer.num_steps='7'",
        )
    ]
    assert sorted(keys) == [
        "algorithm.kl.coefficient",
        "cluster.num_ranks_per_node",
        "data.use_chat_template",
        "rollout.top_p",
        "trainer.num_steps",
    ]


OF_OTHERS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
async def format_reward(prompts, completions, **kwargs): ...
def solved(completions, answer, **kwargs): ...
async def custom_rm(args, sample, **kwargs):
    return sample.label in sample.response
def in_metadata(args, sample):
    return sample.metadata["key"] in sample.response
async def of_group(args, samples, **kwargs):
    return [float(sample.response == max(s.response for s in samples)) for sample in samples]
def reward_func(queries, prompts, labels):
    return {"rewards": [len(q) - len(p) for q, p in zip(queries, prompts)], "extra_logs": labels}
"""


LINES = {
    "compute_score": "def scored(source, response, answer, extra_info): return compute_score("
    "data_source=source, solution_str=response, ground_truth=answer, extra_info=extra_info)",
    "format_reward": "async def scored(prompts, responses): return await format_reward("
    "prompts=prompts, completions=responses)",
    "solved": "def scored(responses, answers): return solved("
    "completions=responses, answer=answers)",
    "custom_rm": "async def scored(prompt, response, answer): return await custom_rm(args=None, "
    'sample=type("Sample", (), dict(prompt=prompt, response=response, label=answer)))',
    "in_metadata": "def scored(prompt, response, answer, metadata): return in_metadata(args=None, "
    'sample=type("Sample", (), dict(prompt=prompt, response=response, label=answer, '
    "metadata=metadata)))",
    "of_group": "async def scored(prompts, responses, answers): from itertools import groupby; "
    "return [each for _, group in groupby(zip(prompts, responses, answers), lambda row: row[0]) "
    'for each in await of_group(args=None, samples=[type("Sample", (), dict(prompt=prompt, '
    "response=response, label=answer)) for prompt, response, answer in group])]",
    "reward_func": "def scored(prompts, responses, answers): return [*map(float, (reward_func("
    "queries=[p + r for p, r in zip(prompts, responses)], prompts=prompts, labels=answers))"
    '["rewards"])]',
}


AGENTS = """
class Slime:
    async def generate(self, args, sample, sampling_params): ...
class Plain:
    def run(self, conversation): ...
class OtherInputs:
    async def run(self, args, sample, sampling_params): ...
class Own:
    async def run(self, conversation): ...
class Inherits(Own): ...
class Silent(Own):
    appended_roles = ()
"""


@pytest.mark.usefixtures("folder")
def test_an_agent_of_ones_own_has_a_coroutine_run_and_may_say_that_it_appends_nothing() -> None:
    Path("own.py").write_text(AGENTS)
    files = (*FILES, "data.train_files=[train.jsonl]")
    for name in ("Slime", "Plain", "OtherInputs"):
        (flaw,) = violations_of(*files, f"agent.loop=own.py:{name}")
        assert f"{name} has no method `async def run(self, conversation)`" in str(flaw)
    for name in ("Own", "Inherits"):
        (flaw,) = violations_of(*files, f"agent.loop=own.py:{name}")
        assert "unless its class has the line `appended_roles = ()`" in str(flaw)
    assert config_of(*files, "agent.loop=own.py:Silent")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "line"), LINES.items())
def test_a_reward_of_another_framework_gets_a_line_to_add(name: str, line: str) -> None:
    Path("theirs.py").write_text(OF_OTHERS)
    files = (*FILES, "data.train_files=[train.jsonl]")
    (violation,) = violations_of(*files, f"reward.function=theirs.py:{name}")
    assert f"add the line `{line}` to theirs.py" in str(violation)
    assert "then set reward.function=theirs.py:scored" in str(violation)
    Path("theirs.py").write_text(f"{OF_OTHERS}{line}")
    scored = config_of(*files, "reward.function=theirs.py:scored").reward
    own = {"compute_score": ("extra_info",), "in_metadata": ("metadata",)}
    assert scored.own_columns == own.get(name, ())


def test_the_lines_for_slime_and_openrlhf_give_what_their_functions_return() -> None:
    scope: dict[str, Any] = {}
    exec(f"{OF_OTHERS}\n{LINES['custom_rm']}", scope)
    assert asyncio.run(scope["scored"]("p", "it is 4", "4")) is True
    exec(LINES["of_group"], scope)
    groups = ["p", "p", "q", "q"], ["1", "2", "4", "3"], ["2", "2", "3", "3"]
    assert asyncio.run(scope["scored"](*groups)) == [0.0, 1.0, 1.0, 0.0]
    exec(LINES["reward_func"], scope)
    assert scope["scored"](["ab", "c"], ["def", ""], ["x", "y"]) == [3.0, 0.0]


@pytest.mark.usefixtures("folder")
def test_of_a_conversation_slime_and_verl_read_all_turns() -> None:
    Path("theirs.py").write_text(OF_OTHERS)
    Path("own.py").write_text(AGENTS)
    files = (*FILES, "data.train_files=[train.jsonl]", "agent.loop=own.py:Silent")
    turns = [{"role": "assistant", "text": "<search>4"}, {"role": "tool", "text": " it is"}]
    scope: dict[str, Any] = {}
    scored = {}
    for name in ("custom_rm", "of_group", "compute_score", "solved"):
        (violation,) = violations_of(*files, f"reward.function=theirs.py:{name}")
        (line,) = re.findall("`(.*)`", str(violation))
        assert ("conversation" in line) == (name != "solved"), line
        exec(f"{OF_OTHERS}\n{line}", scope)
        scored[name] = scope["scored"]
    assert asyncio.run(scored["custom_rm"]("p", turns, "4 it"))
    assert not asyncio.run(scored["custom_rm"]("p", turns[:1], "4 it"))
    groups = ["p", "p"], [turns[:1], turns], ["4", "4"]
    assert asyncio.run(scored["of_group"](*groups)) == [0.0, 1.0]
    assert scored["compute_score"]("s", turns, "4", {}) is None


def test_a_mistyped_reward_is_answered_with_the_functions_of_the_file() -> None:
    (violation,) = violations_of("reward.function=rewards.py:scalde")
    assert "Fix: did you mean 'scaled'?" in str(violation)


def test_reward_columns_are_those_of_the_process_that_calls() -> None:
    assert (BATCH_COLUMNS, ROW_COLUMNS) == (child.BATCH_COLUMNS, child.ROW_COLUMNS)


def test_paths_that_cannot_be_looked_at_are_named(folder: Path) -> None:
    (folder / "circle").symlink_to("circle")
    for path, reason in (("a" * 300, "File name too long"), ("circle", "symbolic links")):
        given = {
            "model.path": ("model.starter=null", f"model.path={path}"),
            "trainer.run_dir": (f"trainer.run_dir={path}/run",),
            "reward.function": (f"reward.function={path}/r.py:score",),
            "lora.init_from": (*LORA, f"lora.init_from={path}"),
            "data.train_files": (*FILES, f"data.train_files=[{path}/rows.jsonl]"),
        }
        for key, overrides in given.items():
            (violation,) = [v for v in violations_of(*overrides) if v.key == key]
            assert reason in violation.rule, violation
        searched = violations_of(*TOOLS, "agent.tools=[search]", f"agent.search_folder={path}")
        assert "agent.search_folder" in [violation.key for violation in searched]


def test_a_critic_needs_no_siblings_and_what_it_lacks_matters_only_where_it_is_asked() -> None:
    config = config_of("algorithm=ppo", "rollout.num_responses_per_prompt=1")
    assert config.has_critic
    assert config.num_policy_updates == 95
    broken = (
        "critic.num_minibatches=3",
        "critic.num_warmup_steps=1000",
        "critic.num_ranks_per_node=1",
    )
    config = config_of(*broken)
    assert not config.has_critic
    assert not config.has_critic_pool
    assert config.num_policy_updates == 100


def test_engines_have_an_adapter_of_each_version_that_may_be_open_and_of_the_newest() -> None:
    finish = (*LORA, *AHEAD, "serving.on_update=finish")
    assert config_of(*finish).num_adapters == 3
    for keys in (
        (*LORA, *AHEAD),  # open responses go on with the next one
        (*finish, "lora.sync=merged"),
        (*finish, "rollout.verify_weights=always"),
        (*finish, *SGLANG, "serving.router=sglang"),
        (*LORA, *SERVERS),
    ):
        assert config_of(*keys).num_adapters == 1


@pytest.mark.usefixtures("folder")
def test_an_adapter_that_fits_is_accepted_and_one_that_is_torn_is_named() -> None:
    assert config_of(*ADAPTER).lora.init_from == "adapter"
    weights = Path("adapter/adapter_model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (violation,) = violations_of(*ADAPTER)
    assert "adapter_model.safetensors is missing, incomplete or corrupt" in violation.rule
    weights.unlink()
    (violation,) = violations_of(*ADAPTER)
    assert "No such file or directory: adapter/adapter_model.safetensors" in violation.rule
    for text, word in (('{"r": 2', "delimiter"), ('{"r": 2}', "does not say"), ("[]", "does not")):
        Path("adapter/adapter_config.json").write_text(text)
        (violation,) = violations_of(*ADAPTER)
        assert word in violation.rule


@pytest.mark.usefixtures("folder")
def test_the_rank_is_held_against_the_config_of_a_model_folder() -> None:
    shape: dict[str, object] = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }
    shape |= {"head_dim": 8, "intermediate_size": 128, "max_position_embeddings": 64}
    Path("model/config.json").write_text(json.dumps(shape))
    folder = ("model.starter=null", "model.path=model", *LORA)
    (violation,) = violations_of(*folder, "lora.rank=9")
    assert "at most 8: k_proj has 64 inputs and 8 outputs" in violation.rule
    assert config_of(*folder, "lora.rank=9", "lora.target_modules=[q_proj,down_proj]").lora.enabled
