"""Conversations with images: what is trained are the sampled tokens, behind what the model saw."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch

from hybridrl.agents.rollout import AgentRollout
from hybridrl.batch import PromptBatch, RolloutBatch, jagged, objects
from hybridrl.data.prompts import encode_row
from hybridrl.data.rows import IMAGE_MARK, Message, Row
from hybridrl.images import Image, ImageSettings
from hybridrl.models.seeing import RowImages
from hybridrl.sampler import Program, Sample, SamplingParams
from hybridrl.workers.rollout.assemble import assemble_rollouts
from tests.agents import pictures_file
from tests.config.values import config_of
from tests.seeing import CHAT_TEMPLATE, KINDS, Kind, build_tokenizer
from tests.workers.seeing_rows import (
    draw_image,
    load_plain,
    plain_logprobs,
    prompt_with,
    seeing_model,
)
from tests.workers.test_seeing import build, embedded

FILE = pictures_file.__file__
ALBUM = replace(
    config_of("agent=environment", "data=calculator", "reward.function=agent").agent,
    environment=f"{FILE}:Album",
)
SHORTENED = CHAT_TEMPLATE.replace(  # two turns later the model reads the end of its words alone
    "{{ m.content }}",
    "{{ m.content[-1:] if m.role == 'assistant' and loop.index < messages|length - 2 "
    "else m.content }}",
)
ROWS = [
    Row(
        prompt=(Message("user", f"{IMAGE_MARK}What?"),),
        answer="1",
        source="s",
        origin="o",
        images=("x",),
    ),
    Row(prompt="Q", answer="1", source="s", origin="o"),
]
GROUP = 3


def prompts_of(settings: ImageSettings) -> PromptBatch:
    """One prompt with an image and one without."""
    image = draw_image(settings, 2, 3, seed=100 * settings.patch + 50)  # as no other has
    tokenizer = build_tokenizer()
    words = tokenizer.encode("<|vision_start|><|image_pad|><|vision_end|>What?")
    at = words.index(settings.placeholder)
    seeing = [*words[:at], *[settings.placeholder] * image.num_tokens, *words[at + 1 :]]
    return PromptBatch(
        token_ids_PL=jagged([torch.tensor(seeing), torch.tensor(tokenizer.encode("Q"))]),
        prompt_index_P=torch.arange(2),
        seed_P=torch.arange(2) + 11,
        row_PN=jagged([encode_row(row) for row in ROWS]),
        images_P=objects([(image,), ()]),
        batch_size=[2],
    )


def album(
    settings: ImageSettings, prompts: PromptBatch, *, history: Literal["strict", "branch"]
) -> tuple[AgentRollout, Program[list[Sample]]]:
    """Conversations that look at an album; close the rollout."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = SHORTENED if history == "branch" else CHAT_TEMPLATE
    stops = (tokenizer.eos_token_id, *range(100, 300))  # a random model seldom samples the first
    config = replace(ALBUM, history=history)
    rollout = AgentRollout(
        config, tokenizer, stop_token_ids=stops[:1], max_prompt_tokens=8000, images=settings
    )
    sampling = SamplingParams(
        num_responses_per_prompt=GROUP,
        max_response_tokens=600,
        temperature=1.0,
        stop_token_ids=stops,
    )
    return rollout, rollout.program(prompts, sampling)


def assert_trained_as_seen(batch: RolloutBatch, folder: Path, settings: ImageSettings) -> int:
    """Log-probs of sampler and trainer are those of transformers alone; returns the sequences."""
    scores = build(folder, freezes=True).compute_logprobs(batch, temperature=1.0)
    sampled_N, mask_N = batch.sampler_logprobs_BL.values(), batch.response_mask_BL.values()
    torch.testing.assert_close(scores.logprobs_BL.values(), sampled_N, atol=1e-5, rtol=0)
    assert batch.sequence_lengths_BQ is not None
    model, begin, num_sequences = load_plain(folder), 0, 0
    for lengths, images in zip(batch.sequence_lengths_BQ.unbind(), batch.images_B, strict=True):
        left = list(images)
        for length in lengths.tolist():
            own = slice(begin, begin + length)
            row_L = batch.token_ids_BL.values()[own]
            shown: list[Image] = []
            num_places = int((row_L == settings.placeholder).sum())
            while left and sum(i.num_tokens for i in [*shown, left[0]]) <= num_places:
                shown.append(left.pop(0))
            begin += length
            num_sequences += 1
            if num_places > sum(image.num_tokens for image in shown):
                continue  # one was sampled, for which transformers wants an image
            with torch.no_grad():
                expected_L = plain_logprobs(model, row_L, tuple(shown), settings)
            expected_L = expected_L * mask_N[own][1:]
            torch.testing.assert_close(sampled_N[own][1:], expected_L, atol=1e-5, rtol=0)
        assert not left
    return num_sequences


def test_positions_of_a_sequence_are_those_of_it_alone(tmp_path: Path) -> None:
    _, settings = seeing_model(tmp_path / "model", "qwen2_5_vl")
    images = [draw_image(settings, *size, seed=seed) for seed, size in enumerate([(2, 3), (3, 1)])]
    sequences = [
        (prompt_with(images, settings), images),
        (prompt_with(images[1:], settings), images[1:]),
        ([40, 41], []),
        (prompt_with(images[:1], settings), images[:1]),
    ]
    tokens = [torch.tensor(sequence) for sequence, _ in sequences]
    rows = [torch.cat(tokens[:2]), torch.cat(tokens[2:])]
    shown = [(*images, *images[1:]), tuple(images[:1])]
    lengths = torch.tensor([len(each) for each in tokens])
    together = RowImages.of(jagged(rows), shown, settings, lengths)
    alone = [
        RowImages.of(jagged([t]), [tuple(i)], settings)
        for t, (_, i) in zip(tokens, sequences, strict=True)
    ]
    assert torch.equal(together.position_3N, torch.cat([each.position_3N for each in alone], dim=1))
    assert torch.equal(together.marked_N, torch.cat([each.marked_N for each in alone]))


BY_DAY = {("qwen2_5_vl", "strict"), ("qwen3_5_moe", "branch")}


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("kind", "history"),
    [
        pytest.param(*each, marks=[pytest.mark.nightly] * (each not in BY_DAY))
        for each in product(KINDS, ("strict", "branch"))
    ],
)
def test_log_probs_agree_over_turns_with_images_between(
    kind: Kind, history: Literal["strict", "branch"], tmp_path: Path
) -> None:
    folder, settings = seeing_model(tmp_path / "model", kind)
    prompts = prompts_of(settings)
    rollout, program = album(settings, prompts, history=history)
    engine = embedded(folder, max_context_tokens=800, num_slots=16)
    batch = assemble_rollouts(prompts, engine.run(program), policy_version=0)
    rollout.close()
    assert engine.last_stats is not None
    keeps_prefixes = history == "strict" and "qwen3_5" not in kind  # no layer with a state does
    assert not keeps_prefixes or (
        engine.last_stats.num_prefill_tokens < 0.6 * engine.last_stats.num_context_tokens
    )
    assert batch.is_failed_B is not None
    assert not batch.is_failed_B.any()
    assert max(len(images) for images in batch.images_B) >= 4
    num_sequences = assert_trained_as_seen(batch, folder, settings)
    assert (num_sequences > len(batch)) == (history == "branch")
