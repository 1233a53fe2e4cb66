"""Models that see on a real SGLang: answers are those of transformers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.errors import EngineError, RequestError
from hybridrl.images import Image, Images, ImageSettings, patches
from hybridrl.metrics import Mean
from hybridrl.sampler import RequestParams, Sample, Sampler
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.sglang.engine import SGLangEngine
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.protocol import WeightSet
from tests.seeing import SERVED_KINDS, Kind, make_seeing_folder
from tests.sglang.engines import running_engine, server_spec, sync
from tests.workers.rollout.engines import stop
from tests.workers.seeing_rows import (
    draw_image,
    draw_rows,
    load_plain,
    lora_of,
    prompt_with,
    rollouts_of,
    settings_of,
)
from tests.workers.test_seeing_conversations import album, assert_trained_as_seen, prompts_of
from tests.workers.train.engines import build_fsdp2, update
from tests.workers.train.lora_engines import adapter_of, build_lora, randomize

GREEDY = RequestParams(max_new_tokens=8, temperature=0.0)
SAMPLED = RequestParams(max_new_tokens=8, temperature=0.7)


class Served:
    """A server, and the folder whose weights it has."""

    def __init__(self, engine: SGLangEngine, folder: Path, kind: Kind) -> None:
        self.engine, self.folder, self.kind = engine, folder, kind
        self.settings = settings_of(folder)
        self.send(folder, version=0)

    def send(self, folder: Path, *, version: int, tower: bool = True, words: bool = True) -> None:
        """Send the weights of a folder as the trainer streams them: of one part, or both."""
        weights = dict(build_fsdp2(folder).full_weights())
        chosen = {
            name: weight
            for name, weight in weights.items()
            if (tower if name.startswith("visual.") else words)
        }
        sync(self.engine, chosen, version=version)

    def sample(
        self, contexts: Sequence[tuple[list[int], Images]], params: RequestParams = GREEDY
    ) -> list[list[Sample]]:
        """Sample two responses to each of these contexts, all at once."""

        async def program(sampler: Sampler) -> list[list[Sample]]:
            asked = (
                sampler.sample_group(tokens, params, keys=[1, 2], images=images)
                for tokens, images in contexts
            )
            return await asyncio.gather(*asked)

        return self.engine.run(program)


@pytest.fixture(scope="module", params=SERVED_KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = make_seeing_folder(tmp_path_factory.mktemp("seeing"), request.param)
    with running_engine(server_spec(folder)) as engine:
        yield Served(engine, folder, request.param)


def draw(settings: ImageSettings, rows: int, columns: int, number: int) -> Image:
    """Draw an image whose identity no other has, also of the other family."""
    return draw_image(settings, rows, columns, seed=100 * settings.patch + number)


def contexts_of(settings: ImageSettings) -> list[tuple[list[int], Images]]:
    """Text, one image, three of several sizes, two of these, and one with odd tokens behind it."""
    one, tall, small = (
        draw(settings, *size, number) for number, size in enumerate([(2, 3), (4, 2), (2, 2)])
    )
    images: list[Images] = [(), (one,), (one, tall, small), (one, tall)]
    contexts = [(prompt_with(each, settings), each) for each in images]
    # Its tokenizer would cut the text of these bytes otherwise, as it may that of a response.
    return [*contexts, ([*contexts[1][0], *range(80, 90), 104, 105, 110], (one,))]


def assert_greedy(served: Served, folder: Path) -> float:
    """Greedy tokens and their log-probs are those of transformers alone; largest difference."""
    contexts = contexts_of(served.settings)
    return assert_as_transformers(contexts, served.sample(contexts), folder, served.settings)


def assert_as_transformers(
    contexts: Sequence[tuple[list[int], Images]],
    answered: Sequence[Sequence[Sample]],
    folder: Path,
    settings: ImageSettings,
) -> float:
    model, apart = load_plain(folder), 0.0
    for (tokens, images), answers in zip(contexts, answered, strict=True):
        for answer in answers:
            row_L = torch.tensor([*tokens, *answer.token_ids.tolist()])
            logprobs_LV = plain_logprobs_of_all(model, row_L, images, settings)
            best_L = logprobs_LV[len(tokens) - 1 : -1].max(dim=-1)
            assert answer.token_ids.tolist() == best_L.indices.tolist()
            torch.testing.assert_close(answer.logprobs, best_L.values, atol=1e-5, rtol=0)
            apart = max(apart, float((answer.logprobs - best_L.values).abs().max()))
    return apart


def plain_logprobs_of_all(
    model: PreTrainedModel, row_L: Tensor, images: Images, settings: ImageSettings
) -> Tensor:
    inputs = {}
    if images:
        grids = [(1, i.rows * settings.merge, i.columns * settings.merge) for i in images]
        inputs = {
            "pixel_values": torch.cat(
                [patches(torch.tensor(each.fetch()), settings) for each in images]
            ),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (row_L == settings.placeholder).int()[None],
        }
    with torch.no_grad():
        return torch.log_softmax(model(row_L[None], **inputs).logits[0].float(), dim=-1)


def test_answers_are_those_of_transformers_for_words_and_several_images(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    record_property("sglang", assert_greedy(served, served.folder))
    served.engine.take_metrics()
    assert_greedy(served, served.folder)
    hits = served.engine.take_metrics()["rollout/prefix_cache_hit_fraction"]
    assert isinstance(hits, Mean)
    # The same again, from the cache; SGLang keeps states of few tokens.
    assert hits.value > (0.1 if served.kind.startswith("qwen3_5") else 0.8)


@pytest.fixture(scope="module", params=SERVED_KINDS)
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = make_seeing_folder(tmp_path_factory.mktemp("adapted"), request.param)
    spec = replace(server_spec(folder), lora=lora_of(request.param))
    with running_engine(spec) as engine:
        yield Served(engine, folder, request.param)


def test_an_adapter_beside_the_words_samples_what_the_trainer_scores(adapted: Served) -> None:
    assert_adapted(adapted, build_lora(adapted.folder, lora=lora_of(adapted.kind)))


@pytest.mark.parametrize(
    "freezes", [pytest.param(True, marks=pytest.mark.nightly), False], ids=["words", "both"]
)
def test_a_merged_adapter_samples_what_the_trainer_scores(served: Served, freezes: bool) -> None:
    merged = lora_of(served.kind, sync="merged")
    assert_adapted(served, build_lora(served.folder, lora=merged, freezes=freezes))
    served.send(served.folder, version=0)


def assert_adapted(served: Served, trainer: PolicyEngine) -> None:
    """Sampled tokens have the trainer's log-probs after each of three syncs, which differ."""
    engine, contexts = served.engine, contexts_of(served.settings)
    batch, _ = draw_rows(served.settings)
    randomize(trainer)
    firsts = []
    for version in range(3):
        sync(engine, dict(trainer.full_weights()), version=version)
        if WeightSet.ADAPTER in trainer.backend.weight_sets:
            stop(engine)
            engine.unload_adapter()
            engine.load_adapter(adapter_of(trainer), version=version)
            engine.continue_generation()
        answered = [
            (tokens, images, answer)
            for (tokens, images), answers in zip(
                contexts, served.sample(contexts, SAMPLED), strict=True
            )
            for answer in answers
        ]
        rollouts = rollouts_of(answered)
        scores = trainer.compute_logprobs(rollouts, temperature=SAMPLED.temperature)
        own, sampled = scores.logprobs_BL.values(), rollouts.sampler_logprobs_BL.values()
        torch.testing.assert_close(own, sampled, atol=3e-5, rtol=0)
        firsts.append(torch.stack([answer.logprobs[0] for _, _, answer in answered]))
        update(trainer, batch)
    assert float((firsts[0] - firsts[1]).abs().max()) > 1e-3
    assert float((firsts[1] - firsts[2]).abs().max()) > 1e-3


def test_another_image_in_the_same_tokens_gives_other_answers(served: Served) -> None:
    one, other = (draw(served.settings, 2, 3, number) for number in (3, 4))
    tokens = prompt_with([one], served.settings)
    (first, *_), (second, *_), (again, *_) = served.sample(
        [(tokens, (one,)), (tokens, (other,)), (tokens, (one,))]
    )
    assert (first.logprobs - second.logprobs).abs().max() > 1e-2
    torch.testing.assert_close(first.logprobs, again.logprobs, atol=1e-5, rtol=0)


def test_weights_of_either_part_are_updated(served: Served, tmp_path: Path) -> None:
    other = make_seeing_folder(tmp_path / "other", served.kind, seed=1)
    weights = load_file(served.folder / "model.safetensors")
    changed = load_file(other / "model.safetensors")
    both = {name: weights[name] if "visual." in name else changed[name] for name in weights}
    assert any("visual." in name for name in weights)
    words = make_seeing_folder(tmp_path / "words", served.kind)
    save_file(both, words / "model.safetensors", metadata={"format": "pt"})
    served.send(words, version=1, tower=False)
    assert_greedy(served, words)
    served.send(other, version=2, words=False)
    assert_greedy(served, other)
    served.send(served.folder, version=3)
    assert_greedy(served, served.folder)


def test_weights_of_both_parts_are_those_of_the_files(served: Served) -> None:
    engine = served.engine
    stop(engine)
    engine.load_reference_weights(served.folder)
    served.send(served.folder, version=3)
    engine.verify_weights()


def test_a_request_with_other_placeholders_is_refused_and_others_are_answered(
    served: Served,
) -> None:
    one, other = (draw(served.settings, 2, 3, number) for number in (3, 4))
    tokens = prompt_with([one], served.settings)
    wrong: list[tuple[list[int], Images]] = [
        (tokens, (one, other)),
        (prompt_with([one, other], served.settings), (one,)),
        ([t for t in tokens if t != served.settings.placeholder], (one,)),
        ([*tokens, served.settings.placeholder], (one,)),
    ]
    for context in wrong:
        with pytest.raises(RequestError, match="placeholder"):
            served.sample([context])
    assert served.sample([(tokens, (one,))])


def test_an_image_that_the_server_cuts_otherwise_is_an_error(served: Served) -> None:
    tall = draw(served.settings, 4, 2, 5)
    flat = replace(tall, columns=3)  # as if it were larger than its pixels
    with pytest.raises(EngineError, match="prompt_token_ids"):
        served.sample([(prompt_with([flat], served.settings), (flat,))])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("history", ["strict", "branch"])
def test_conversations_with_images_are_trained_as_the_server_sampled_them(
    served: Served, history: Literal["strict", "branch"]
) -> None:
    served.send(served.folder, version=4)
    prompts = prompts_of(served.settings)
    rollout, program = album(served.settings, prompts, history=history)
    samples = served.engine.run(program)
    rollout.close()
    batch = assemble_rollouts(prompts, samples, policy_version=4)
    assert {each.finish_reason for each in samples} <= {"stop", "length"}
    assert max(len(images) for images in batch.images_B) >= 3
    num_sequences = assert_trained_as_seen(batch, served.folder, served.settings)
    assert history == "branch" or num_sequences == len(batch)
