"""Answers in SGLang's form, with tokens that follow from the prompt: its first one, repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from aiohttp import web

from tests.workers.rollout.answering import Body


def item(prompt: list[int], parameters: Body, *, finish: str = "length") -> Body:
    """The answer to one response: its tokens are the prompt's first one, over and over."""
    tokens = [prompt[0]] * parameters["max_new_tokens"]
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish, "message": "Aborted"},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "cached_tokens": len(prompt) - 1,
            "spec_num_correct_drafts": 1,  # as with speculation
            "spec_num_proposed_drafts": 4,
            "weight_version": "5",
        },
    }


class Samples:
    """Answers /generate; ``finish`` says why a response ended, by seed and how often it came."""

    def __init__(self, finish: Callable[[int, int], str]) -> None:
        self._finish = finish
        self.times: Counter[int] = Counter()

    async def __call__(self, _: str, body: Body) -> web.StreamResponse:
        parameters = body["sampling_params"]
        if isinstance(parameters, dict):
            return web.json_response(item(body["input_ids"], parameters))
        answers = []
        for prompt, wanted in zip(body["input_ids"], parameters, strict=True):
            seed = wanted["sampling_seed"]
            self.times[seed] += 1
            answers.append(item(prompt, wanted, finish=self._finish(seed, self.times[seed])))
        return web.json_response(answers)
