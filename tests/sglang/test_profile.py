from __future__ import annotations

import time
from pathlib import Path

import pytest

from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import single_turn
from tests.end_to_end.small import SMALL
from tests.sglang.engines import MortalEngine, kill_server, recorded_engine, server_spec
from tests.sglang.recorded_server import calls_in
from tests.sglang.test_run import TIMEOUT_S, assert_profiled, names_in, run_command
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of

FEW = make_prompts((4, 9))
GREEDY = sampling_params(group=1, tokens=6, temperature=0.0)


@pytest.mark.timeout(150)
def test_a_server_profiles_what_it_computes(engine: MortalEngine, tmp_path: Path) -> None:
    before = tokens_of(engine.run(single_turn(FEW, GREEDY)))
    folder = tmp_path / "profile"
    for step in (1, 2):
        engine.profile(folder / f"step-{step}.engine-0")
        assert tokens_of(engine.run(single_turn(FEW, GREEDY))) == before
        engine.profile(None)
        (file,) = folder.glob(f"step-{step}.engine-0-*-TP-0.trace.json.gz")
        assert names_in(file) & {"aten::mm", "aten::addmm", "aten::linear"}


def test_a_server_that_was_replaced_or_died_within_the_step_is_not_asked_for_a_profile(
    served_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    with recorded_engine(server_spec(served_model), calls, monkeypatch) as engine:
        for lose in (SGLangEngine.restart, kill_and_wait):
            engine.profile(tmp_path / "step-1.engine-0")
            lose(engine)
            engine.profile(None)
    assert [path for path, _ in calls_in(calls) if "profile" in path] == ["/start_profile"] * 2


def kill_and_wait(engine: SGLangEngine) -> None:
    kill_server(engine)
    while not engine.has_died():
        time.sleep(0.01)


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.nightly  # by day one of the ranks, in test_run.py
def test_own_servers_are_profiled_beside_the_ranks(tmp_path: Path) -> None:
    small = [override for override in SMALL if override.startswith("model.")]
    small += ["trainer.num_prompts_per_step=4", "eval.every_num_steps=0"]
    profiled = (*small, "serving=own", "trainer.profile_steps=[2]")
    run_command(tmp_path, *profiled, num_steps=2, timeout_s=TIMEOUT_S)
    assert_profiled(tmp_path / "run", "server-0", "server-1")
