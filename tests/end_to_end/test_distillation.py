from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybridrl.errors import HybridRLError, ReplayError
from tests.end_to_end.runs import STAND_INS, make_teacher, train
from tests.end_to_end.small import VARIED, change_one_bit

MEGATRON = ("actor=megatron", STAND_INS)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def _rows_of(folder: Path) -> list[str]:
    """Write rows of two sources, and return the overrides that read them."""
    for source in ("a", "b"):
        rows = [{"prompt": f"{n}1=", "answer": f"1{n}", "hint": f"1{n}:"} for n in range(2, 8)]
        (folder / f"{source}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ",".join(f"{folder}/{source}.jsonl" for source in "ab")
    return [
        *("data=files", "data.use_chat_template=false", f"data.train_files=[{files}]"),
        *("eval.every_num_steps=0", "trainer.num_prompts_per_step=4", "trainer.num_steps=3"),
    ]


def test_a_policy_on_two_ranks_is_taught_by_another_run_and_by_itself_with_a_hint(
    tmp_path: Path,
) -> None:
    data = _rows_of(tmp_path)
    taught = [
        *(*data, "algorithm=gkd", "cluster.num_ranks_per_node=2", "actor.optimizer.lr=1e-2"),
        "algorithm.teacher_prompt='{hint}{prompt}'",
    ]
    alone = f"algorithm.teacher_paths={{a: {make_teacher(tmp_path)}}}"
    both = [alone, "algorithm.teacher_path=policy"]
    lines = train(tmp_path / "taught", *taught, *both)
    assert all(line["loss/divergence"] > 0 for line in lines)
    assert all(line["loss/policy"] == 0.0 < line["policy/grad_norm"] for line in lines)
    with pytest.raises(HybridRLError, match=r"b.jsonl:\d: a row of source 'b'.*has no teacher"):
        train(tmp_path / "untaught", *taught, alone)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1=", "answer": "1"}')
    with pytest.raises(HybridRLError, match=r"a.jsonl:1.*hint.*algorithm.teacher_prompt"):
        train(tmp_path / "unhinted", *taught, *both)


def test_an_adapter_is_taught_by_its_base_and_both_ways_at_once(tmp_path: Path) -> None:
    lines = train(
        tmp_path / "run",
        *_rows_of(tmp_path),
        *("lora=default", "algorithm=distillation", "algorithm.teacher_path=initial"),
        *("algorithm.divergence_coefficient=0.5", "algorithm.divergence_top_k=null"),
        "algorithm.teacher_prompt='{answer}{prompt}'",
    )
    assert all(line["loss/divergence"] > 0 for line in lines)
    assert max(abs(line["loss/policy"]) for line in lines) > 0
    assert "policy/kl_to_reference_nats/mean" not in lines[0]


def test_sources_without_a_teacher_learn_from_rewards_alone(tmp_path: Path) -> None:
    data = _rows_of(tmp_path)
    mixed = [f"++data.sources.{source}.files=[{tmp_path}/{source}.jsonl]" for source in "ab"]
    lines = train(
        tmp_path / "run",
        *(text for text in data if "train_files" not in text),
        *(*mixed, VARIED, "lora=default", "actor.optimizer.lr=1e-1"),
        "algorithm.by_source.a={advantage: distillation}",
        *("algorithm.teacher_paths={a: initial}", "algorithm.old_logprobs=recompute"),
    )
    assert all(line["policy/grad_norm"] > 0 for line in lines)


def served(teacher: Path, *overrides: str) -> list[str]:
    """Return the overrides of engines of their own, for the policy and for its teacher."""
    return [
        "serving.models={policy: {groups: {main: {num_devices: 1}}}, "
        f"t: {{path: '{teacher}', groups: {{main: {{num_devices: 1}}}}}}}}",
        *("serving.num_devices_per_node=2", *overrides),
    ]


@pytest.fixture(scope="module")
def on_ranks(
    tmp_path_factory: pytest.TempPathFactory, ray_cluster: None
) -> tuple[Path, Sequence[str], Sequence[Mapping[str, float]]]:
    """A teacher, the settings of a run that it taught on two ranks, and the metrics of that run."""
    folder = tmp_path_factory.mktemp("taught")
    teacher = make_teacher(folder)
    both = [
        *(*_rows_of(folder), "algorithm=distillation", "algorithm.divergence_coefficient=0.5"),
        *("algorithm.divergence_top_k=3", "rollout.temperature=0.8"),
        *("algorithm.teacher_prompt='{hint}{prompt}'", "actor.optimizer.lr=1e-2"),
        "cluster.num_ranks_per_node=2",
    ]
    return teacher, both, train(folder / "run", *both, f"algorithm.teacher_path={teacher}")


@pytest.mark.parametrize(
    "places",
    [
        pytest.param((), id="on own devices", marks=pytest.mark.nightly),
        pytest.param(
            ("serving.colocated=true", "rollout.sleep=true"), id="on those of the trainer"
        ),
        pytest.param(
            (*MEGATRON, "megatron.tensor_parallel_size=2"), id="of ranks that share tokens"
        ),
    ],
)
def test_a_served_teacher_teaches_as_one_on_ranks(
    on_ranks: tuple[Path, Sequence[str], Sequence[Mapping[str, float]]],
    tmp_path: Path,
    places: tuple[str, ...],
) -> None:
    teacher, both, of_ranks = on_ranks
    engines = served(teacher, "algorithm.teacher_path=serving.models.t", *places)
    for line, expected in zip(train(tmp_path / "run", *both, *engines), of_ranks, strict=True):
        for name in ("loss/divergence", "loss/policy", "policy/grad_norm"):
            assert line[name] == pytest.approx(expected[name], rel=1e-3)
        assert line["loss/divergence"] > 1e-3


def test_a_served_teacher_of_one_source_teaches_a_run_that_samples_ahead(tmp_path: Path) -> None:
    data = _rows_of(tmp_path)
    mixed = [f"++data.sources.{source}.files=[{tmp_path}/{source}.jsonl]" for source in "ab"]
    ahead = [
        *(text for text in data if "train_files" not in text),
        *(*mixed, VARIED, "actor.optimizer.lr=1e-2", "trainer.max_staleness=2"),
        *("algorithm.rollout_correction=importance", "algorithm.old_logprobs=recompute"),
        *("algorithm.by_source.a={advantage: distillation}", "checkpoint.every_num_steps=1"),
    ]
    taught = served(make_teacher(tmp_path), "algorithm.teacher_paths={a: serving.models.t}")
    lines = train(tmp_path / "run", *ahead, *taught, "trainer.num_steps=2")
    lines = train(tmp_path / "run", *ahead, *taught, "trainer.num_steps=3")
    assert len(lines) == 3
    assert all(line["policy/grad_norm"] > 0 for line in lines)


def test_what_a_served_teacher_said_is_replayed_as_its_own_alone(tmp_path: Path) -> None:
    both = [
        *(*_rows_of(tmp_path), "algorithm=gkd", "algorithm.divergence_top_k=3"),
        "algorithm.teacher_prompt='{hint}{prompt}'",
    ]
    taught = served(make_teacher(tmp_path), "algorithm.teacher_path=serving.models.t", *both)
    lines = train(tmp_path / "run", *taught, "rollout.dump=true")
    replay = f"rollout.replay={tmp_path}/run"
    for line, again in zip(lines, train(tmp_path / "again", *taught, replay), strict=True):
        assert again["loss/divergence"] == line["loss/divergence"]
    with pytest.raises(ReplayError, match=r"algorithm.teacher_prompt: '{hint}{prompt}' there"):
        train(tmp_path / "other", *taught, replay, "algorithm.teacher_prompt='{prompt}'")
    change_one_bit(tmp_path / "t" / "model.safetensors")
    with pytest.raises(ReplayError, match=r"weights of served model t"):
        train(tmp_path / "changed", *taught, replay)


@pytest.mark.parametrize(
    "places",
    [
        pytest.param((), id="on own devices"),
        pytest.param(
            ("serving.colocated=true", "rollout.sleep=true", "cluster.num_ranks_per_node=2"),
            id="on those of the trainer",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_an_evaluation_starts_no_engine_of_a_teacher(
    tmp_path: Path, places: tuple[str, ...]
) -> None:
    teacher = make_teacher(tmp_path)
    taught = served(teacher, "algorithm.teacher_path=serving.models.t", *places)
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))  # with which no engine would serve
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    (line,) = train(
        tmp_path / "run", *("mode=eval", "algorithm=distillation", "eval.num_prompts=4", *taught)
    )
    assert "eval/reward/mean" in line


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_served_teacher_of_sglang_teaches(tmp_path: Path) -> None:
    lines = train(
        tmp_path / "run",
        *served(make_teacher(tmp_path), "algorithm.teacher_path=serving.models.t"),
        *_rows_of(tmp_path),
        *("rollout=sglang", "algorithm=distillation", "algorithm.divergence_coefficient=0.5"),
        *("actor.optimizer.lr=1e-2", "rollout.temperature=1.0", "trainer.num_steps=2"),
    )
    assert [line["loss/divergence"] > 1e-3 for line in lines] == [True, True]
    assert all(abs(line["loss/policy"]) > 1e-3 for line in lines)
