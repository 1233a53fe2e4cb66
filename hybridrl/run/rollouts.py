"""Where the responses of a run come from: its engines, or the files of a recorded run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hybridrl.checkpoint.fingerprint import folder_fingerprints, own_fingerprints, recipe_of
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.data.source import PromptSource, PromptStep
from hybridrl.errors import ReplayError, first_of
from hybridrl.run.checkpoints import newest_step
from hybridrl.trainer.collect import Reward
from hybridrl.trainer.policy import Generates
from hybridrl.trainer.rollout_files import CallFacts, RolloutFiles, Split, name_of
from hybridrl.trainer.rollouts import (
    DumpedRollouts,
    Origin,
    ReplayedRollouts,
    Rollouts,
    head_and_tail,
    require_same_origin,
)

log = logging.getLogger(__name__)

FOLDER = "rollouts"
"""Name in the run folder."""

_KEYS = ("agent.", "actor.replay_routing")
"""Keys besides those of the sampling on which responses depend."""

_KEYS_OF_TEACHERS = ("algorithm.teacher_", "algorithm.advantage", "algorithm.by_source.")
"""Those on which it depends what served teachers said of them, and of which rows."""

_SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Samples all rollouts; with ``rollout.dump`` they are written to the run folder."""

    dump: tuple[RolloutFiles, Origin] | None = None

    def rollouts_of(self, engines: Generates, reward: Reward) -> Rollouts:
        """Return the responses of these engines, with these scores."""
        if self.dump is None:
            return Rollouts(engines, reward)
        dumped = DumpedRollouts(engines, reward, *self.dump)
        return Rollouts(dumped, dumped, dumped.begin)

    def num_prompts(self, config: ExperimentConfig) -> int:
        """Return the number of prompts that one draw takes from the source."""
        return config.trainer.num_prompts_per_step

    def draw(self, source: PromptSource) -> PromptStep:
        """Draw the prompts of a step, or further ones."""
        return source.next()

    def begin(self, source: PromptSource, step: int) -> None:
        """Bring the source to the position of a step, if it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(Recording):
    """``rollout.replay``: reads all rollouts; engines are not asked."""

    files: RolloutFiles
    origin: Origin
    steps: Mapping[int, CallFacts]
    """The recorded facts about the first call of each training step, at least one."""

    wanted: int
    """Prompts a step, at most the recorded ones."""

    def rollouts_of(self, engines: Generates, reward: Reward) -> Rollouts:
        """Return the recorded responses."""
        replayed = ReplayedRollouts(reward, self.files, self.origin)
        return Rollouts(replayed, replayed, replayed.begin)

    def num_prompts(self, config: ExperimentConfig) -> int:
        """Return the number of prompts that one draw of the recorded run took."""
        return min(facts.num_prompts for facts in self.steps.values())

    def draw(self, source: PromptSource) -> PromptStep:
        """Draw as the recorded run did, and keep head and tail."""
        return head_and_tail(source.next(), self.wanted)

    def begin(self, source: PromptSource, step: int) -> None:
        """Bring the source to the position of the recorded step."""
        source.restore(replace(source.state(), num_drawn=self.steps[step].first_index))


def open_recording(config: ExperimentConfig, model_folder: Path) -> Recording:
    """Prepare ``rollout.dump`` and ``rollout.replay``."""
    rollout = config.rollout
    if rollout.replay is not None:
        files = RolloutFiles(Path(rollout.replay).absolute() / FOLDER)
        return _open_replay(config, files, _origin_of(config, model_folder))
    if not rollout.dump:
        return Recording()
    files = RolloutFiles(Path(config.trainer.run_dir).absolute() / FOLDER)
    return Recording(dump=(files, _origin_of(config, model_folder)))


def _open_replay(config: ExperimentConfig, files: RolloutFiles, origin: Origin) -> Recording:
    done, last, every = newest_step(config), config.num_steps, config.eval.every_num_steps
    steps = _known(files, "train", range(done + 1, last + 1))
    evaluated = [s for s in range(done, last + 1) if every and (s % every == 0 or s == last)]
    evaluations = _known(files, "eval", [s for s in evaluated if s > done or s == 0])
    for split, known in zip(_SPLITS, (steps, evaluations), strict=True):
        for step, facts in known.items():
            where = f"{name_of(step, split)} of {files.folder}"
            require_same_origin(facts.origin, origin.rollouts, where=where)
    if not steps:  # a finished run
        return Recording()
    wanted = config.trainer.num_prompts_per_step
    replay = Replay(files=files, origin=origin, steps=steps, wanted=wanted)
    recorded = replay.num_prompts(config)
    if wanted > recorded:
        raise ReplayError(
            f"trainer.num_prompts_per_step={wanted}: {files.folder} has {recorded} prompts a step; "
            f"set trainer.num_prompts_per_step={recorded}, or fewer for head and tail of a step"
        )
    log.info("replaying %d of %d prompts a step of %s", wanted, recorded, files.folder)
    return replay


def _known(files: RolloutFiles, split: Split, steps: Iterable[int]) -> dict[int, CallFacts]:
    """Return the facts about the first call of each step."""
    known = {step: files.facts(name_of(step, split)) for step in steps}
    missing = [step for step, facts in known.items() if facts is None]
    if missing:
        remedy = "set eval.every_num_steps as that run had it, or to 0"
        if split == "train":
            remedy = f"set trainer.num_steps={missing[0] - 1}, if that is above 0"
        named = first_of([str(step) for step in missing])
        raise ReplayError(
            f"{files.folder} has no rollouts ({split}) of {len(missing)} steps: {named}; {remedy}"
        )
    return {step: facts for step, facts in known.items() if facts is not None}


def _origin_of(config: ExperimentConfig, model_folder: Path) -> Origin:
    recipe, own = recipe_of(config), own_fingerprints(config)
    model = dict(folder_fingerprints(model_folder, with_weights=True))
    teachers = config.algorithm.served_teachers
    keys = _KEYS + _KEYS_OF_TEACHERS if teachers else _KEYS
    names = tuple(f" of served model {name}" for name in teachers)
    return Origin(
        rollouts={
            **{key: value for key, value in recipe.items() if key.startswith(keys)},
            **{key: digest for key, digest in own.items() if key.startswith("code of agent.")},
            **{key: digest for key, digest in own.items() if key.endswith(names)},
            **model,
        },
        scores={
            **{key: value for key, value in recipe.items() if key.startswith("reward.")},
            **{key: digest for key, digest in own.items() if " reward" in key},
        },
    )
