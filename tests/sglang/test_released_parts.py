"""What SGLang lets happen to memory that is released, and who refuses it here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.errors import EngineError, PhaseError
from hybridrl.workers.rollout.protocol import MemoryTag
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.rollout.single_turn import single_turn
from tests.sglang.engines import make_ready, running_engine, server_spec
from tests.workers.rollout.engines import make_prompts, sampling_params, tokens_of

PROMPTS = make_prompts((3, 9))
GREEDY = sampling_params(group=1, tokens=4, temperature=0.0)
NUM_CYCLES = 2


def stopped(engine: SGLangEngine) -> None:
    engine.pause()
    engine.drain(timeout_s=10.0)


@pytest.mark.shows("3.6")
def test_generate_is_refused_while_a_part_is_released(
    engine: SGLangEngine,
) -> None:
    before = tokens_of(engine.run(single_turn(PROMPTS, GREEDY)))
    for part in [*MemoryTag] * NUM_CYCLES:
        stopped(engine)
        engine.release(part)
        engine.continue_generation()
        with pytest.raises(PhaseError, match=f"{part.name} is released"):
            engine.run(single_turn(PROMPTS, GREEDY))
        # Past our door: on a GPU an illegal access, here an answer as if nothing was.
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        assert len(engine._server.client.call("/generate", body, timeout_s=60.0)["output_ids"]) == 2
        stopped(engine)
        engine.resume(part)
        engine.continue_generation()
        assert tokens_of(engine.run(single_turn(PROMPTS, GREEDY))) == before


@pytest.mark.shows("3.7")
@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_only_released_parts_are_resumed(
    served_model: Path,
) -> None:
    """The bug of a cycle that forgets what the one before did: the first cycle looks well."""
    with running_engine(server_spec(served_model)) as engine:
        make_ready(engine, served_model)
        stopped(engine)
        engine.release(MemoryTag.WEIGHTS)
        engine.resume(MemoryTag.WEIGHTS)
        with pytest.raises(PhaseError, match="only what was released can be resumed"):
            engine.resume(MemoryTag.WEIGHTS)
        engine.continue_generation()
        assert engine.run(single_turn(PROMPTS, GREEDY))
        stopped(engine)
        with pytest.raises(EngineError):
            engine._server.post("/resume_memory_occupation", tags=["weights"])  # past our door
