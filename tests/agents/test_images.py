"""Images that tools and environments show, and bad ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridrl.agents.conversation import Conversation, ConversationEnded, Setting, hold
from hybridrl.agents.environments import Environments, PlaysEnvironment, load_environment
from hybridrl.agents.rollout import ToolCalls
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_calls import ToolCall, load_format
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, ToolResult, load_tools
from hybridrl.agents.trajectory import Trajectory, decode_turns
from hybridrl.data.rows import IMAGE_MARK, Message, RawMessage
from hybridrl.errors import AgentError
from hybridrl.images import ImageSettings
from hybridrl.sampler import RequestParams
from tests.agents import pictures_file
from tests.agents.fake_sampler import PROMPT, FakeSampler, conversation_setting, require_as_sampled
from tests.seeing import IMAGE_PAD, build_tokenizer

SETTINGS = ImageSettings(
    placeholder=IMAGE_PAD,
    patch=14,
    merge=2,
    frames=2,
    min_pixels=28**2,
    max_pixels=16 * 28**2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
LIMITS = ToolLimits(timeout_s=20.0, max_chars=60, images=SETTINGS)
TOKENIZER = build_tokenizer()
FILE = pictures_file.__file__

BAD = {
    "cut": "cannot be read",
    "moving": "has 2 frames",
    "narrow": "is too narrow",
    "large": "more than 50,000,000 pixels",
    "text": "is no image of PNG",
    "missing": f"there is no image '{Path(FILE).parent}/not_there.png'",
    "link": "download it",
    "number": "has the image 7",
}


def setting_of(sampler: FakeSampler, **changes: object) -> Setting:
    stops = (TOKENIZER.eos_token_id,)
    template = TurnTemplate(TOKENIZER, stop_token_ids=stops, images=SETTINGS)
    setting = conversation_setting(sampler, template=template, tool_format=load_format("pythonic"))
    return replace(setting, **changes)  # type: ignore[arg-type]


def call_all(*calls: ToolCall, limits: ToolLimits = LIMITS) -> list[ToolResult]:
    toolbox = Toolbox(
        load_tools([f"{FILE}:{each}" for each in ("look", "peek", "describe")]),
        limits=limits,
        num_processes=1,
    )

    async def in_turn() -> list[ToolResult]:
        return [await toolbox.call(each) for each in calls]

    try:
        return asyncio.run(in_turn())
    finally:
        toolbox.close()


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", ["look", "peek"])
def test_a_tool_shows_an_image_that_was_read_and_resized_once(name: str) -> None:
    looks = [ToolCall(name, {"kind": kind}) for kind in ("good", "good", "other")]
    result, again, different = call_all(*looks)
    assert not result.is_error
    assert result.text == f"Here:{IMAGE_MARK}\ufffd"
    ((image,), (same,), (other,)) = result.images, again.images, different.images
    assert (image.rows, image.columns) == (3, 3)
    assert image.fetch().shape == (84, 84, 3)
    assert image.identity == same.identity != other.identity


@pytest.mark.parametrize("name", ["look", "peek"])
def test_a_bad_image_of_a_tool_is_an_error_that_the_model_reads(name: str) -> None:
    results = call_all(*(ToolCall(name, {"kind": kind}) for kind in BAD))
    for result, reason in zip(results, BAD.values(), strict=True):
        assert result.is_error
        assert result.images == ()
        assert result.text.startswith(f"Error: the result of {name} cannot be shown: ")
        assert reason in result.text


def test_an_image_for_a_model_that_sees_none_is_an_error() -> None:
    calls = ToolCall("look", {"kind": "path"}), ToolCall("describe", {})
    image, text = call_all(*calls, limits=replace(LIMITS, images=None))
    assert "the model sees none" in image.text
    assert (text.text, text.images) == (IMAGE_MARK, ())  # a character like others


def play(name: str, script: list[str], **changes: object) -> tuple[Trajectory, FakeSampler]:
    sampler = FakeSampler(TOKENIZER, script)
    (trajectory,) = play_all(name, [sampler], **changes)
    return trajectory, sampler


def play_all(name: str, samplers: Sequence[FakeSampler], **changes: object) -> list[Trajectory]:
    environments = Environments(load_environment(f"{FILE}:{name}"), limits=LIMITS)

    async def in_turn() -> list[Trajectory]:
        agent = PlaysEnvironment(environments)
        return [await hold(agent, PROMPT, setting_of(each, **changes)) for each in samplers]

    try:
        return asyncio.run(in_turn())
    finally:
        environments.close()


def test_a_bad_image_of_an_environment_ends_its_conversation_by_an_error() -> None:
    for trajectory, reason in zip(
        play_all("Spoilt", [FakeSampler(TOKENIZER, [kind]) for kind in BAD]),
        BAD.values(),
        strict=True,
    ):
        assert trajectory.ended == "error"
        assert "its observation cannot be shown: " in trajectory.failure
        assert reason in trajectory.failure


@pytest.mark.usefixtures("ray_cluster")
def test_images_grow_with_the_turns_and_those_behind_the_last_one_are_dropped() -> None:
    trajectory, sampler = play("Album", ["a", "b", "c", "d"])
    require_as_sampled(trajectory, sampler)
    counts = [request.num_images for request in sampler.requests]
    assert counts == [1, 3, 4, 4]
    sample = trajectory.to_sample()
    assert sample.images is not None
    assert [(i.rows, i.columns) for i in sample.images] == [(2, 1), (2, 2), (2, 2), (1, 3)]
    assert sample.context is not None
    tokens = torch.cat([sample.context, sample.token_ids])
    assert int((tokens == IMAGE_PAD).sum()) == sum(i.num_tokens for i in sample.images)
    assert sample.turns is not None
    texts = [m.content for turn in decode_turns(sample.turns) for m in turn.messages]
    assert texts == ["these<image>and<image>", "<image>?", "the last, without"]
    cut, _ = play("Album", ["a", "b", "c", "d"], max_turns=2)
    assert len(cut.to_sample().images or ()) == 3


@pytest.mark.usefixtures("ray_cluster")
def test_an_image_that_no_longer_fits_ends_the_conversation() -> None:
    room = RequestParams(max_new_tokens=12, temperature=1.0)  # a turn and the words, no image
    trajectory, sampler = play("Album", ["a", "b"], params=room)
    assert (trajectory.ended, trajectory.num_sampled_turns) == ("tokens", 1)
    require_as_sampled(trajectory, sampler)
    assert len(trajectory.to_sample().images or ()) == 1


PICTURE = RawMessage("user", [pictures_file.part(pictures_file.draw(28, 28, 1))])


@pytest.mark.usefixtures("ray_cluster")
async def test_nothing_follows_a_placeholder_that_was_sampled() -> None:
    sampler = FakeSampler(TOKENIZER, ["fine", "a <|image_pad|>", "more"])
    conversation = Conversation(PROMPT, setting_of(sampler))
    await conversation.sample()
    shown = await conversation.look_at([PICTURE])
    conversation.append(shown)
    await conversation.sample()
    with pytest.raises(ConversationEnded, match="tokens"):
        conversation.append(shown)
    assert len(conversation.to_trajectory().to_sample().images or ()) == 1


@pytest.mark.usefixtures("ray_cluster")
async def test_marks_that_are_not_those_of_the_images_are_an_error() -> None:
    conversation = Conversation(PROMPT, setting_of(FakeSampler(TOKENIZER, ["fine"])))
    await conversation.sample()
    (shown,) = await conversation.look_at([PICTURE])
    with pytest.raises(AgentError, match="has 1 images, and its text 0 of their placeholders"):
        conversation.append([Message("user", "no mark", shown.images)])


@pytest.mark.usefixtures("ray_cluster")
def test_results_of_several_calls_come_with_their_images_in_order() -> None:
    toolbox = Toolbox(
        load_tools([f"{FILE}:look", f"{FILE}:describe"]), limits=LIMITS, num_processes=1
    )
    script = ["[look(kind='good'), describe(), look(kind='cut'), look(kind='good')]", "done"]
    sampler = FakeSampler(TOKENIZER, script)
    trajectory = asyncio.run(hold(ToolCalls(), PROMPT, setting_of(sampler, toolbox=toolbox)))
    toolbox.close()
    assert trajectory.ended == "answer"
    require_as_sampled(trajectory, sampler)
    sample = trajectory.to_sample()
    assert len(sample.images or ()) == 2
    assert (trajectory.num_tool_calls, trajectory.num_tool_errors) == (4, 1)
