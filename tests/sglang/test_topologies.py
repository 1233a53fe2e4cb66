from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridrl.config.serving import OnUpdate
from hybridrl.env import ROOT, python_path
from hybridrl.sampler import Sample
from hybridrl.serving.launching import start_servers
from tests.config.values import config_of
from tests.serving.processes import servers_below
from tests.sglang.test_run import run_command
from tests.sglang.topologies import (
    GREEDY,
    PROMPTS,
    SMALL,
    WITHOUT_MOONCAKE,
    assert_as_hugging_face,
    groups,
)
from tests.tiny_models import make_tiny_model
from tests.waiting import wait_until
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of
from tests.workers.train.lora_engines import LORA, adapter_of, build_lora, randomize

pytestmark = pytest.mark.nightly


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.2", "4.7")
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(
            {"wide": "num_devices: 2, devices_per_engine: 2", "small": "num_devices: 1"},
            id="an engine of two devices",
        ),
        pytest.param(
            {
                "first": "num_devices: 1, worker_type: prefill",
                "second": "num_devices: 1, worker_type: decode",
                "gap": "num_devices: 1, worker_type: placeholder",
            },
            id="a pair",
            marks=WITHOUT_MOONCAKE,
        ),
    ],
)
def test_engines_of_several_devices_sample_as_one(
    sections: dict[str, str], served_model: Path, tmp_path: Path
) -> None:
    config = config_of(*SMALL, groups(**sections), "serving.num_devices_per_node=3")
    folders = [served_model, make_tiny_model(tmp_path / "b", seed=5)]
    with start_servers(config, folders[0], variables={}) as servers:
        for version, folder in enumerate(folders):
            servers.update(folder, version=version)
            for _ in range(2):
                samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
                assert_as_hugging_face(samples, folder)
    wait_until(lambda: not servers_below())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(420)
def test_engines_apply_one_adapter_after_another_as_if_it_were_merged(
    served_model: Path, tmp_path: Path
) -> None:
    lora = ("lora=default", f"lora.rank={LORA.rank}", f"lora.alpha={LORA.alpha}")
    config = config_of(
        *SMALL, *lora, groups(main="num_devices: 1"), "serving.num_devices_per_node=1"
    )
    trainer = build_lora(served_model)
    answers = []
    with start_servers(config, served_model, variables={}) as servers:
        for version in range(3):
            adapter = list(adapter_of(trainer).items())
            servers.update_adapter(served_model, adapter, version=version)
            samples, _ = servers.sample(PROMPTS, GREEDY, version=version)
            folder = tmp_path / f"merged-{version}"
            trainer.export_hf(folder)
            assert_as_hugging_face(samples, folder)
            answers.append(tokens_of(samples))
            randomize(trainer, scale=0.1 * (version + 1))
    assert answers[0] != answers[1] != answers[2]
    wait_until(lambda: not servers_below())


@pytest.mark.timeout(420)
@pytest.mark.shows("4.4", "4.7", "4.9")
def test_an_engine_of_two_nodes_answers_on_its_first(served_model: Path, tmp_path: Path) -> None:
    folders = [served_model, make_tiny_model(tmp_path / "other", seed=5)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.two_node_engine", *map(str, folders)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    by_phase = json.loads(done.stdout.splitlines()[-1])  # the last after a follower was killed
    for answers, folder in zip(by_phase, [*folders, folders[1]], strict=True):
        samples = [
            Sample(torch.tensor(tokens), torch.tensor(logprobs), "length", 0)
            for tokens, logprobs in answers
        ]
        assert_as_hugging_face(samples, folder)


ROW = 128
AHEAD_PROMPTS = make_prompts([100, 12, 90, 20, 16, 84, 24, 28])  # the row limits each response
SAMPLING = sampling_params(group=2, tokens=ROW)
NUM_PER_STEP, NUM_STEPS = 2, 4
AHEAD = (
    *("serving=own", "rollout=sglang", "rollout.num_slots=8", "rollout.drain_timeout_s=5"),
    *("trainer.max_staleness=1", "algorithm.rollout_correction=importance"),
    *(f"trainer.num_prompts_per_step={NUM_PER_STEP}", f"trainer.num_steps={NUM_STEPS}"),
    *("data.max_prompt_tokens=104", f"rollout.max_response_tokens={ROW - 104}"),
)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("on_update", ["interrupt", "finish"])
def test_each_token_has_the_log_prob_of_its_version(
    on_update: OnUpdate, served_model: Path, tmp_path: Path
) -> None:
    folders = [served_model]
    folders += [make_tiny_model(tmp_path / str(n), seed=n) for n in range(1, NUM_STEPS)]
    config = config_of(*AHEAD, f"serving.on_update={on_update}")
    num_admitted, taken, num_mixed = 0, list[int](), 0
    with start_servers(config, served_model, variables={}) as servers:
        for version, folder in enumerate(folders):
            servers.update(folder, version=version)
            num_wanted = min((version + 2) * NUM_PER_STEP, len(AHEAD_PROMPTS))
            new = AHEAD_PROMPTS[num_admitted:num_wanted] if num_wanted > num_admitted else None
            num_admitted = num_wanted
            answered, _ = servers.exchange(new, SAMPLING, version=version)
            taken += answered.prompts.prompt_index_P.tolist()
            for number, sample in enumerate(answered.samples):
                versions = set(sample.versions_L.tolist())
                assert versions <= {version - 1, version}
                assert on_update == "interrupt" or len(versions) == 1
                num_mixed += len(versions) > 1
                of_prompt = number // SAMPLING.num_responses_per_prompt
                prompt = answered.prompts.token_ids_PL.unbind()[of_prompt]
                require_log_probs(prompt, sample, folders)
    assert sorted(taken) == list(range(len(AHEAD_PROMPTS)))
    assert (num_mixed > 0) is (on_update == "interrupt")
    wait_until(lambda: not servers_below())


def require_log_probs(prompt: Tensor, sample: Sample, folders: Sequence[Path]) -> None:
    """Compare with Hugging Face on the weights that each token says it was sampled with."""
    assert len(prompt) + len(sample.token_ids) == ROW
    row = torch.cat([prompt, sample.token_ids])
    versions_L = sample.versions_L
    assert versions_L.tolist() == sorted(versions_L.tolist())
    for version in set(versions_L.tolist()):
        model = AutoModelForCausalLM.from_pretrained(folders[version], attn_implementation="eager")
        with torch.no_grad():
            logprobs = torch.log_softmax(model(row[None, :-1]).logits[0].float(), dim=-1)
        expected = logprobs[len(prompt) - 1 :].gather(-1, sample.token_ids[:, None])[:, 0]
        of_version = versions_L == version
        torch.testing.assert_close(
            sample.logprobs[of_version], expected[of_version], atol=1e-4, rtol=0
        )


NUM_LEARNING_STEPS = 40
TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("on_update", ["interrupt", "finish"])
def test_the_default_task_is_learnt_one_step_off(tmp_path: Path, on_update: OnUpdate) -> None:
    lines = run_command(
        tmp_path,
        *("serving=own", "trainer.max_staleness=1", f"serving.on_update={on_update}"),
        *("algorithm.rollout_correction=importance", "rollout.canary_max_drift_nats=0.1"),
        *("eval.every_num_steps=0", "checkpoint.every_num_steps=0"),
        num_steps=NUM_LEARNING_STEPS,
        timeout_s=TIMEOUT_S,
    )
    assert len(lines) == NUM_LEARNING_STEPS
    stale = [line["rollout/staleness_steps/max"] for line in lines]
    assert stale[0] == 0
    assert max(stale) == 1
    assert [line["rollout/lost_engines"] for line in lines] == [0] * NUM_LEARNING_STEPS
    # One step ahead: so many prompts were drawn, and each is learned from once.
    num_drawn = [16 * min(n + 2, NUM_LEARNING_STEPS) for n in range(NUM_LEARNING_STEPS)]
    assert [line["data/prompts"] for line in lines] == num_drawn
    assert sum(line["rollout/repeated_requests"] for line in lines) == 0
    assert (sum(line.get("rollout/interrupted_tokens", 0.0) for line in lines) > 0) is (
        on_update == "interrupt"
    )
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-15:]) > fmean(rewards[:10]) + 0.03
