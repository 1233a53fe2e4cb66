"""Images of prompts: with requests to engines, and with rows to the update."""

from __future__ import annotations

import asyncio
import io
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Decoder

from hybridrl.batch import LogprobBatch
from hybridrl.errors import RequestError, SampledPlaceholderError
from hybridrl.images import Image, Images
from hybridrl.network import Door
from hybridrl.sampler import RequestParams, Sample, SampleRequest
from hybridrl.serving.engine_handle import RankHandle
from hybridrl.single_controller.payload import concat_rows, take_rows
from hybridrl.trainer.train_batch import build_train_batch
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.embedded.engine import HFRolloutEngine
from hybridrl.workers.rollout.prefixes import prefix_sums
from hybridrl.workers.rollout.request_listener import RequestListener
from hybridrl.workers.rollout.sglang.pictures import collapsed, data_url
from hybridrl.workers.rollout.single_turn import sample_to_the_end, single_turn
from tests.seeing import make_seeing_folder
from tests.workers.rollout.engines import prompt_batch, ready_engine, sampling_params
from tests.workers.seeing_rows import draw_image, prompt_with, settings_of

SHORT = RequestParams(max_new_tokens=4, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_folder(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def engine(folder: Path) -> HFRolloutEngine:
    return ready_engine(folder, max_context_tokens=64)


def test_prompts_are_sampled_with_their_images_and_rows_keep_them(
    engine: HFRolloutEngine, folder: Path
) -> None:
    settings = settings_of(folder)
    one, other = (draw_image(settings, 2, 2, seed=seed) for seed in (1, 2))
    images: list[Images] = [(one,), (), (other,), (one, other)]
    rows = [torch.tensor(prompt_with(each, settings)) for each in images]
    prompts = prompt_batch(rows, range(len(rows)), images)
    samples = engine.run(single_turn(prompts, sampling_params(group=2, tokens=4, temperature=0.0)))
    assert not torch.equal(samples[0].logprobs, samples[4].logprobs)  # the same tokens
    rollouts = assemble_rollouts(prompts, samples, policy_version=0)
    joined = concat_rows([take_rows(rollouts, 0, 3), take_rows(rollouts, 3, 8)])
    batch = build_train_batch(joined, LogprobBatch(batch_size=[8]), joined.sampler_logprobs_BL)
    order = [7, 0, 2, 5]
    assert [tuple(each) for each in batch[order].images_B] == [images[row // 2] for row in order]


def test_an_engine_of_a_rank_gets_images_over_http(engine: HFRolloutEngine, folder: Path) -> None:
    settings = settings_of(folder)
    images = (draw_image(settings, 2, 3, seed=1), draw_image(settings, 1, 2, seed=2))
    request = SampleRequest(torch.as_tensor(prompt_with(images, settings)), SHORT, [1], images)
    (expected,) = engine.run(lambda sampler: sampler.answer(request))
    listener = RequestListener(engine, door=Door(key="a-key"))
    handle = RankHandle(listener.open(), key="a-key")
    try:
        (found,) = handle.answer(request).result(60)
        with pytest.raises(RequestError, match="placeholder"):
            handle.answer(replace(request, token_ids=request.token_ids[:3])).result(60)
    finally:
        handle.end()
        listener.end()
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs)


def test_a_url_has_every_pixel() -> None:
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (28, 84, 3), dtype=np.uint8)
    url = asyncio.run(data_url(Image(1, 3, 77, pixels_HWC)))
    decoded = Decoder.open(io.BytesIO(b64decode(url.partition(",")[2])))
    assert decoded.mode == "RGB"
    assert np.array_equal(np.asarray(decoded), pixels_HWC)


def test_a_server_gets_one_placeholder_for_each_image() -> None:
    pixels_HWC = np.zeros((28, 28, 3), dtype=np.uint8)
    images = (Image(1, 3, 1, pixels_HWC), Image(2, 1, 2, pixels_HWC))
    tokens_L = torch.tensor([7, 5, 5, 5, 8, 5, 5, 9])
    assert collapsed(tokens_L, images, [1, 5], 5) == [7, 5, 8, 5, 9]
    with pytest.raises(RequestError, match="has 6"):
        collapsed(torch.tensor([*tokens_L.tolist(), 5]), images, [1, 5], 5)


def test_contexts_with_other_images_are_not_taken_for_each_other() -> None:
    pixels_HWC = np.zeros((28, 28, 3), dtype=np.uint8)
    one, other = Image(1, 1, 1, pixels_HWC), Image(1, 1, 2, pixels_HWC)
    first, same, different = (prefix_sums([1, 5, 2], (each,)) for each in (one, one, other))
    assert torch.equal(first, same)
    assert not (first == different).any()
    assert torch.equal(first, prefix_sums([1, 5, 2, 5], (one, other))[:3])


def test_a_response_whose_continuation_is_refused_ends_there() -> None:
    begun = Sample(torch.tensor([1, 5]), torch.zeros(2), "interrupted", weight_version=0)

    async def ask(request: SampleRequest) -> list[Sample]:
        if len(request.token_ids) > 1:
            raise SampledPlaceholderError("a placeholder was sampled")
        return [begun] * len(request.keys)

    request = SampleRequest(torch.tensor([3]), SHORT, [0])
    (ended,) = asyncio.run(sample_to_the_end(ask, request))
    assert ended.token_ids.tolist() == [1, 5]
    assert ended.is_truncated

    async def refuse(*_: object) -> list[Sample]:
        raise RequestError("it is refused at once")

    with pytest.raises(RequestError, match="at once"):
        asyncio.run(sample_to_the_end(refuse, request))
