"""SGLang on devices of its own: two servers, of which one is killed while it samples."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from hybridrl.metrics import Sum
from hybridrl.serving.launching import start_servers
from tests.config.values import config_of
from tests.serving.processes import wait_for_a_busy_process
from tests.waiting import wait_until
from tests.workers.rollout.engines import make_prompts, sampling_params

PROMPTS = make_prompts([3, 9, 5, 2] * 8)
SAMPLING = sampling_params(group=4, tokens=100)


def servers_below() -> list[psutil.Process]:
    """The processes in which SGLang's servers of this test began."""
    processes = psutil.Process().children(recursive=True)
    return [one for one in processes if "hybridrl.workers.rollout.sglang.child" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.mark.nightly
@pytest.mark.timeout(600)  # three starts of a server, 25 s of CPU each, on cores that are shared
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.shows("4.15")
def test_a_killed_server_costs_no_sample_and_is_replaced(served_model: Path) -> None:
    config = config_of(
        *("serving=own", "rollout=sglang", "rollout.num_slots=4", "rollout.drain_timeout_s=5"),
        *("data.max_prompt_tokens=12", "rollout.max_response_tokens=100", "data.max_digits=11"),
    )
    with start_servers(config, served_model, variables={}) as servers:
        servers.update(served_model, version=0)
        before = {process.pid for process in servers_below()}
        with ThreadPoolExecutor(1) as thread:
            sampling = thread.submit(servers.sample, PROMPTS, SAMPLING, version=0)
            wait_for_a_busy_process(servers_below).kill()
            samples, metrics = sampling.result()
        assert metrics["rollout/lost_engines"] == Sum(1)
        assert [len(sample.token_ids) for sample in samples] == [100] * 128
        assert not servers.need_weights(version=0)  # the replacement has those of the others
        servers.update(served_model, version=1)
        assert len({process.pid for process in servers_below()} & before) == len(before) // 2
        samples, metrics = servers.sample(PROMPTS, SAMPLING, version=1)
        assert metrics["rollout/lost_engines"] == Sum(0)
        assert {sample.weight_version for sample in samples} == {1}
    wait_until(lambda: not servers_below())
