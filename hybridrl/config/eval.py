"""The ``eval`` section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hybridrl.config.limits import CountOrZero, Name, Rows, Tokens

EvalTemperature = Annotated[float, Field(ge=0.0, le=100.0)]
EvalTopP = Annotated[float, Field(gt=0.0, le=1.0, examples=[1.0])]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSetConfig:
    """One set of ``eval.sets``: a key that is left out, or null, is that of the section."""

    files: tuple[str, ...] | None = None
    """Files of the set. Null: ``data.eval_files``, or the built-in task."""

    num_prompts: Rows | None = None
    """Held-out prompts: the first rows of the files."""

    num_responses_per_prompt: Rows | None = None
    """Responses per prompt."""

    max_response_tokens: Tokens | None = None
    """Length limit of responses, in tokens."""

    temperature: EvalTemperature | None = None
    """0 is greedy decoding."""

    top_p: EvalTopP | None = None
    """Nucleus."""

    pass_at_k: tuple[Rows, ...] | None = None
    """Numbers k of pass@k and majority@k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSet:
    """One set with all its values, as in ``EvalConfig``."""

    name: str
    """Empty for the set of the section's own keys."""

    files: tuple[str, ...] | None
    num_prompts: int
    num_responses_per_prompt: int
    max_response_tokens: int | None
    temperature: float
    top_p: float
    pass_at_k: tuple[int, ...]

    @property
    def key(self) -> str:
        """The configuration key of the set, or of the section that it is made of."""
        return f"eval.sets.{self.name}" if self.name else "eval"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out prompts. Mirrors hydra_configs/eval/*.yaml key by key."""

    every_num_steps: CountOrZero
    """Evaluate before the first step, every this many steps, and after the last. 0: never."""

    in_background: bool
    """With ``trainer.max_staleness``: sample held-out prompts beside the next step, with the
    weights before it, and wait for the rest at its end. False: training waits for all."""

    checkpoint: str | None
    """``mode=eval``: a run folder, or one of its ``checkpoints/step-N``, whose policy is evaluated,
    the newest of a folder. Null: the model of ``model.path``, with the adapter of
    ``lora.init_from`` if ``lora.enabled``."""

    num_prompts: Rows
    """Held-out prompts: made by a built-in task, or the first rows of the files."""

    num_responses_per_prompt: Rows
    """Responses per prompt; the mean reward is taken over all of them."""

    max_response_tokens: Tokens | None
    """Length limit of responses in an evaluation, in tokens. Rollout engines have room for the
    longest limit of all; training keeps its own. Null: ``rollout.max_response_tokens``."""

    temperature: EvalTemperature
    """0 is greedy decoding; any other value is at least 0.001, or logits would overflow."""

    top_p: EvalTopP
    """Sample among the likeliest tokens that together have this probability; 1 is all tokens."""

    pass_at_k: tuple[Rows, ...]
    """Numbers k of pass@k, the probability that one of k responses is correct: its unbiased
    estimate from all responses to a prompt (arXiv:2107.03374). Above 1 also of majority@k: whether
    the most frequent answer of k responses is correct. Empty: not measured."""

    correct_reward: Annotated[float, Field(ge=-1e6, le=1e6)]
    """A response is correct, for pass@k and majority@k, with at least this reward."""

    sets: Mapping[Name, EvalSetConfig]
    """Several sets instead of one, by name: ``eval.sets.NAME.files=[FILE]``. Keys of a set: files,
    num_prompts, num_responses_per_prompt, max_response_tokens, temperature, top_p, pass_at_k.
    A key that is left out is that of ``eval``."""

    def all_sets(self) -> list[EvalSet]:
        """Return the named sets, or the one of this section's own keys, with all values."""
        usual: dict[str, Any] = asdict(self.own_set())
        given = {
            name: {key: value for key, value in asdict(of_set).items() if value is not None}
            for name, of_set in self.sets.items()
        }
        named = [EvalSet(**usual | keys | {"name": name}) for name, keys in given.items()]
        return named or [self.own_set()]

    def own_set(self) -> EvalSet:
        """Return the set of this section's own keys."""
        values: dict[str, Any] = asdict(self) | {"name": "", "files": None}
        return EvalSet(**{field.name: values[field.name] for field in fields(EvalSet)})


def split_checkpoint(name: str) -> tuple[Path, int | None]:
    """Return run folder and step of ``RUN_FOLDER[/checkpoints/step-N]``; no step is the newest."""
    path = Path(name)
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match and path.parent.name == "checkpoints":
        return path.parent.parent, int(match[1])
    return path, None
