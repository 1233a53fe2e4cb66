"""The columns of data files, by the section of the configuration that names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hybridrl.config.experiment import ExperimentConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns in the files; see ``config/data.py``."""

    prompt: str | None = "prompt"
    """None takes the messages that both chats of a preference pair begin with."""

    answer: str | None = "answer"
    """None takes the last message of the prompt, which must be the assistant's."""

    rejected: str | None = None
    """The worse answer of a preference pair; None reads no pairs."""

    source: str = "source"
    difficulty: str | None = None
    """None reads no difficulty: it is 0."""

    margin: str | None = None
    """None reads no margins: they are 0."""

    own: tuple[str, ...] = ()
    """Further ones that reward functions ask for by name."""

    section: str = "data"
    """The configuration section that names them, for messages."""

    needed: Mapping[str, str] = field(init=False)
    """The configuration key of each column that a row must have."""

    def __post_init__(self) -> None:
        keys = {
            self.prompt: f"{self.section}.prompt_key",
            self.answer: f"{self.section}.answer_key",
            self.rejected: f"{self.section}.rejected_key",
            self.difficulty: f"{self.section}.difficulty_key",
            self.margin: "reward_model.margin_key",
        }
        keys |= {name: "the parameter of reward.function" for name in self.own if name not in keys}
        needed = {name: key for name, key in keys.items() if name is not None}
        object.__setattr__(self, "needed", needed)  # once, since every row asks for it


def columns_of(config: ExperimentConfig, section: str) -> Columns:
    """Return the columns of files that a section lists.

    Args:
        section: ``data.sources.NAME`` of a source of a mix; any other has the columns of ``data``.
    """
    data = config.data
    parent, _, name = section.rpartition(".")
    source = data.sources[name] if parent == "data.sources" else None
    is_held_out = section.startswith(("eval.", "data.eval_files"))
    usual = Columns(
        prompt=data.prompt_key,
        answer=data.answer_key,
        rejected=data.rejected_key,
        source=data.source_key,
        difficulty=None if is_held_out else data.difficulty_key,
        margin=config.reward_model.margin_key if config.mode == "reward_model" else None,
        own=config.reward.own_columns if config.offline is None else (),
    )
    if source is None:
        return usual
    return replace(
        usual,
        prompt=source.prompt_key or usual.prompt,
        answer=source.answer_key or usual.answer,
        rejected=source.rejected_key or usual.rejected,
        source=source.source_key or usual.source,
        difficulty=source.difficulty_key or usual.difficulty,
        section=section,
    )
