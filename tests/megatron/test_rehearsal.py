from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from hybridrl.config.load import load_config
from hybridrl.errors import ConfigError, ConfigErrors, ModelError
from hybridrl.main import compose
from hybridrl.run.modes.check import rehearse_megatron
from tests.command_line import call_main
from tests.config.test_megatron_recipes import MODELS
from tests.config.test_megatron_recipes import config_of as recipe_of
from tests.config.values import config_of
from tests.megatron.stand_ins import install
from tests.tiny_models import make_tiny_model

CHECK = ("actor=megatron", "mode=check")


@pytest.fixture(autouse=True)
def megatron() -> None:
    install()  # without the warnings of its import


def refusals_of(*overrides: str) -> list[tuple[str, str]]:
    config = config_of(*CHECK, *overrides)
    with pytest.raises(ConfigErrors) as caught:
        rehearse_megatron(config)
    return [(violation.key, str(violation)) for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("section", "name", "meant"),
    [
        ("transformer_args", "moe_permute_fusoin", "moe_permute_fusion"),
        ("optimizer_args", "optimizer_cpu_ofload", "optimizer_cpu_offload"),
        ("ddp_args", "bucketsize", "bucket_size"),
    ],
)
def test_a_name_that_megatron_does_not_know_is_refused(section: str, name: str, meant: str) -> None:
    [(key, text)] = refusals_of(f"megatron.{section}={{{name}: 1}}")
    assert key == f"megatron.{section}.{name}"
    assert f"did you mean '{meant}'" in text


def test_what_megatron_refuses_is_refused_under_our_key() -> None:
    [(key, text)] = refusals_of(
        "megatron.transformer_args={cp_comm_type: p2p, fp4_recipe: x,"
        " moe_router_padding_for_quantization: true}"
    )
    assert key == "megatron.transformer_args"
    assert "fp8/fp4 must be specified" in text
    [(key, text)] = refusals_of("megatron.optimizer_args={exp_avg_dtype: bfloat16}")
    assert key == "megatron.optimizer_args"
    assert "can only be fp32 when not using precision-aware" in text


def test_all_models_are_checked_and_each_error_reported_once() -> None:
    ppo = ("algorithm=ppo", "algorithm.kl.placement=loss")
    lines = rehearse_megatron(config_of(*CHECK, *ppo, "algorithm.kl.coefficient=0.1"))
    assert lines[0].endswith("takes the configuration of: policy, reference, critic")
    assert len(refusals_of(ppo[0], "megatron.ddp_args={no_such: 1}")) == 1
    assert rehearse_megatron(config_of("mode=check")) == []
    [line] = rehearse_megatron(load_config(compose(["recipes=cpu/megatron", "mode=check"])))
    assert line.endswith("takes the configuration of: policy")  # and misses no kernel


@pytest.mark.parametrize(
    ("teacher", "refused"),
    [
        ({"num_attention_heads": 3}, r"teacher_path=.*\(3\) must be a multiple"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*actor=fsdp2"),
    ],
)
def test_a_teacher_is_rehearsed_with_its_own_architecture(
    tmp_path: Path, teacher: dict[str, object], refused: str
) -> None:
    path = make_tiny_model(tmp_path, "llama", vocab_size=512) / "config.json"
    halves = ("megatron.tensor_parallel_size=2", "cluster.num_ranks_per_node=2")
    taught = (*CHECK, *halves, "algorithm=distillation", f"algorithm.teacher_path={tmp_path}")
    [line] = rehearse_megatron(config_of(*taught))
    assert line.endswith("takes the configuration of: policy, teacher")
    path.write_text(json.dumps(json.loads(path.read_text()) | teacher))
    with pytest.raises((ConfigErrors, ModelError), match=refused):
        rehearse_megatron(config_of(*taught))


def test_a_machine_without_megatron_says_what_it_could_not_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(sys.modules):
        if name.startswith(("megatron", "hybridrl.workers.train.megatron")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    [line] = rehearse_megatron(config_of(*CHECK))
    assert line.startswith("not checked: what megatron-core takes")
    assert "pip install 'hybridrl[megatron]'" in line


@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_recipe_checked_without_transformer_engine_says_so(name: str, tmp_path: Path) -> None:
    lines = rehearse_megatron(recipe_of(name, tmp_path))
    assert "takes the configuration of: policy" in lines[0]
    assert any("TransformerEngine cannot be imported here" in line for line in lines)


_AWARE = "megatron.optimizer_args={use_precision_aware_optimizer: true}"


@pytest.mark.parametrize(
    ("overrides", "key", "remedy"),
    [
        (
            ("cluster=one_gpu", "actor.compute_dtype=bfloat16", _AWARE),
            "megatron.optimizer_args.use_precision_aware_optimizer",
            "add ~megatron.optimizer_args.use_precision",
        ),
        (("cluster=one_gpu", "megatron.layers=transformer_engine"), "megatron.layers", "local"),
    ],
)
def test_a_start_without_transformer_engine_names_the_key_that_needs_it(
    overrides: tuple[str, ...], key: str, remedy: str
) -> None:
    from hybridrl.workers.train.megatron.configuration import require_transformer_engine

    with pytest.raises(ConfigError) as caught:
        require_transformer_engine(config_of(*CHECK, *overrides).megatron)
    assert caught.value.key == key
    assert "pip install --no-build-isolation" in str(caught.value)
    assert remedy in str(caught.value)


def test_on_a_machine_with_a_gpu_a_check_refuses_what_its_start_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ("cluster=one_gpu", "actor.compute_dtype=bfloat16", "rollout.dtype=bfloat16", _AWARE)
    config = config_of(*CHECK, *given)
    assert any("not checked: " in line for line in rehearse_megatron(config))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigErrors, match="use_precision_aware_optimizer=True: it needs"):
        rehearse_megatron(config)


def test_communication_overlaps_on_cuda_except_for_adapters() -> None:
    from hybridrl.workers.train.megatron.configuration import ddp_config

    megatron = config_of("actor=megatron").megatron
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    learns = ddp_config(megatron, cuda, duty="learns")
    assert (learns.overlap_grad_reduce, learns.overlap_param_gather) == (True, True)
    adapts = ddp_config(megatron, cuda, duty="adapts")
    assert (adapts.overlap_grad_reduce, adapts.overlap_param_gather) == (True, False)
    waits = ddp_config(megatron, cpu, duty="learns")
    assert (waits.overlap_grad_reduce, waits.overlap_param_gather) == (False, False)


def test_missing_transformer_engine_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridrl.workers.train.megatron import configuration

    monkeypatch.setattr(configuration, "HAVE_TE", False)
    monkeypatch.setattr(configuration, "IMPORT_WARNINGS", ("it falls back",))
    configuration._log_once.cache_clear()
    megatron = config_of("actor=megatron").megatron
    for _ in range(2):
        configuration.log_warnings_once(megatron, torch.device("cuda"))
    missing, warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "experts computed one after another" in missing
    assert "pip install --no-build-isolation 'hybridrl[transformer-engine]'" in missing
    assert warned == "megatron-core: it falls back"
    configuration._log_once.cache_clear()


def test_check_command_reports_megatrons_answer(tmp_path: Path) -> None:
    refused = call_main(*CHECK, "+megatron.transformer_args.no_such=1", folder=tmp_path)
    assert refused.returncode == 2
    assert "megatron.transformer_args.no_such=1" in refused.stderr
    taken = call_main(*CHECK, folder=tmp_path)
    assert taken.returncode == 0, taken.stderr
    assert "takes the configuration of: policy" in taken.stdout
