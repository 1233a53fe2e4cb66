"""Rollouts as files: all columns of one call of ``generate``, and the scores of its responses.

``step-000000003-train-0.safetensors``  columns of prompts and responses
``step-000000003-train-0.json``         facts about them; written last
``step-000000003-train-0.scores.json``  rewards by function
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from hybridrl.atomic_io import atomic_write_bytes, atomic_write_text
from hybridrl.batch import PromptBatch, RolloutBatch, routed_experts_of, row_lengths
from hybridrl.checkpoint.store import FileEntry
from hybridrl.data.prompts import TokenizedRow
from hybridrl.errors import ReplayError, RunFolderError
from hybridrl.json_text import to_json_text
from hybridrl.rewards.scorer import Scores
from hybridrl.sampler import SamplingParams

Split = Literal["train", "eval"]
Facts = Mapping[str, object]
"""Values in types of JSON."""

_FORMAT = 1
_PROMPTS, _ROLLOUTS = "prompts.", "rollouts."
_LENGTHS = ".lengths"
_Batch = TypeVar("_Batch", PromptBatch, RolloutBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """The facts about one call of ``generate``."""

    # of the run: everything besides prompts and sampling on which the responses depend
    origin: Facts
    sampling: Facts  # fields of `SamplingParams`
    num_prompts: int
    first_index: int  # index of the first prompt in its stream
    file: FileEntry


@dataclass(frozen=True, slots=True)
class RecordedScores:
    """The scores of the responses of a call."""

    scores: Scores
    rows: list[int]  # see ``row_digests``
    origin: Facts  # everything besides rows and responses on which the scores depend


@dataclass(slots=True)
class NamedCalls:
    """Names the calls of ``generate``: by step, split, and number within both."""

    step: int = field(default=0, init=False)
    split: Split = field(default="train", init=False)
    number: int = field(default=-1, init=False)

    def begin(self, step: int, split: Split) -> None:
        """Begin with the responses of a step, or of the evaluation after it."""
        self.step, self.split, self.number = step, split, -1

    def next_name(self) -> str:
        """Return the name of the next call."""
        self.number += 1
        return self.name

    @property
    def name(self) -> str:
        """Name of the last call."""
        return name_of(self.step, self.split, self.number)


class RolloutFiles:
    """The folder ``<run_dir>/rollouts``.

    What writes raises RunFolderError if the disk is full or gone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(
        self,
        name: str,
        prompts: PromptBatch,
        rollouts: RolloutBatch,
        *,
        sampling: SamplingParams,
        origin: Facts,
    ) -> None:
        """Write all columns, then the facts about them."""
        file = self.folder / f"{name}.safetensors"
        rollouts = rollouts.clone(recurse=False)
        rollouts.routed_experts_BLJK = routed_experts_of(rollouts)
        data = save(_plain(prompts, _PROMPTS) | _plain(rollouts, _ROLLOUTS))
        facts = CallFacts(
            origin=origin,
            sampling=sampling_facts(sampling),
            num_prompts=len(prompts),
            first_index=int(prompts.prompt_index_P[0]),
            file=FileEntry(name=file.name, num_bytes=len(data), crc32=zlib.crc32(data)),
        )
        text = to_json_text({"format": _FORMAT} | asdict(facts), indent=1)
        with self._writing():
            self.folder.mkdir(exist_ok=True)
            atomic_write_bytes(file, data)
            atomic_write_text(self.folder / f"{name}.json", text + "\n")

    def facts(self, name: str) -> CallFacts | None:
        """Read the facts about a call, None if it was not written.

        ReplayError if they cannot be read, or if the file of columns is missing or cut.
        """
        path = self.folder / f"{name}.json"
        if not path.is_file():
            return None
        values = _read_json(path)
        if values.get("format") != _FORMAT:
            raise ReplayError(
                f"{path} has format {values.get('format')}, and this version reads {_FORMAT}; "
                "replay it with the version of hybridrl that wrote it"
            )
        del values["format"]
        try:
            facts = CallFacts(**{**values, "file": FileEntry(**values["file"])})
        except (KeyError, TypeError) as error:
            raise ReplayError(f"{path} is no record of rollouts: {error}") from error
        file = self.folder / facts.file.name
        num_bytes = file.stat().st_size if file.is_file() else 0
        if num_bytes != facts.file.num_bytes:
            raise ReplayError(
                f"{file} has {num_bytes} bytes, and was written with {facts.file.num_bytes}; "
                "copy the folder again, or sample again"
            )
        return facts

    def read(self, name: str, facts: CallFacts) -> tuple[PromptBatch, RolloutBatch]:
        """Read all columns of a call; raises ReplayError if the file is not as it was written."""
        file = self.folder / facts.file.name
        data = file.read_bytes()
        if zlib.crc32(data) != facts.file.crc32:
            raise ReplayError(
                f"{file} is not as it was written: its checksum is {zlib.crc32(data)} instead of "
                f"{facts.file.crc32}; copy the folder again, or sample again"
            )
        tensors = load(data)
        prompts = _batch(PromptBatch, tensors, _PROMPTS, size=facts.num_prompts)
        num_rows = len(tensors[f"{_ROLLOUTS}prompt_index_B"])
        return prompts, _batch(RolloutBatch, tensors, _ROLLOUTS, size=num_rows)

    def write_scores(
        self, name: str, scores: Scores, *, rows: Sequence[TokenizedRow], origin: Facts
    ) -> None:
        """Write the scores of the responses of a call; ``origin`` as in `RecordedScores`."""
        values: dict[str, object] = {"origin": origin, "rows": row_digests(rows)}
        for column in fields(scores):
            value = getattr(scores, column.name)
            values[column.name] = value.tolist() if isinstance(value, Tensor) else value
        with self._writing():
            atomic_write_text(self._scores_file(name), to_json_text(values) + "\n")

    def read_scores(self, name: str) -> RecordedScores | None:
        """Return the scores of a call, None if there are none; raises ReplayError."""
        path = self._scores_file(name)
        if not path.is_file():
            return None
        values = _read_json(path)
        shape = (-1, len(values["names"]))
        optional = ("is_early_B", "is_unreadable_B", "is_left_out_B")
        scores = Scores(
            tuple(values["names"]),
            torch.tensor(values["reward_weights_K"], dtype=torch.float32),
            torch.tensor(values["reward_parts_BK"], dtype=torch.float32).view(shape),
            torch.tensor(values["is_failed_BK"], dtype=torch.bool).view(shape),
            **{
                name: torch.tensor(values[name], dtype=torch.bool)
                for name in optional
                if values.get(name) is not None
            },
        )
        return RecordedScores(scores, values["rows"], values["origin"])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFolderError(
                f"cannot write rollouts to {self.folder}: {error}; free space there, or set "
                "rollout.dump=false"
            ) from error

    def _scores_file(self, name: str) -> Path:
        return self.folder / f"{name}.scores.json"


def sampling_facts(sampling: SamplingParams) -> Facts:
    """Return the fields on which responses depend."""
    return {
        "num_responses_per_prompt": sampling.num_responses_per_prompt,
        "max_response_tokens": sampling.max_response_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"sampling_masks": True} if sampling.sampling_masks else {}),
        **({} if sampling.teacher_top_k is None else {"teacher_top_k": sampling.teacher_top_k}),
    }


def row_digests(rows: Sequence[TokenizedRow]) -> list[int]:
    """Return a checksum for each row, of all that reward functions see of it."""
    texts = ([row.prompt_text, row.row.answer, row.row.source] for row in rows)
    return [zlib.crc32(to_json_text(text).encode()) for text in texts]


def name_of(step: int, split: Split, number: int = 0) -> str:
    """Return the name of a call."""
    return f"step-{step:09}-{split}-{number}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path} cannot be read: {error}; copy the folder again") from error
    return values if isinstance(values, dict) else {}


def _plain(batch: PromptBatch | RolloutBatch, prefix: str) -> dict[str, Tensor]:
    """Return all columns of a batch, jagged ones as values and row lengths."""
    tensors = {}
    for name, column in batch.to_tensordict().items():
        if not isinstance(column, Tensor):
            continue
        if column.is_nested:
            tensors[prefix + name] = column.values().contiguous()
            tensors[prefix + name + _LENGTHS] = row_lengths(column)
        else:
            tensors[prefix + name] = column.contiguous()
    return tensors


def _batch(kind: type[_Batch], tensors: Mapping[str, Tensor], prefix: str, *, size: int) -> _Batch:
    """Return the batch of `_plain`; columns of the same row lengths share their offsets."""
    columns: dict[str, Any] = {}
    offsets: dict[bytes, Tensor] = {}
    for key, values in tensors.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or key.endswith(_LENGTHS):
            continue
        lengths = tensors.get(key + _LENGTHS)
        if lengths is None:
            columns[name] = values
            continue
        own = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        known = offsets.setdefault(lengths.numpy().tobytes(), own)
        columns[name] = torch.nested.nested_tensor_from_jagged(values, known)
    return kind(**columns, batch_size=[size])
