"""Rules about rollouts that are written, or replace sampling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.paths import flaw_of_folder
from hybridrl.errors import ConfigError


def check_recording(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rollouts are those of training steps, and a run that replays writes no others."""
    rollout = config.rollout
    for key, value in (("rollout.dump", rollout.dump), ("rollout.replay", rollout.replay)):
        if value and config.mode == "eval":
            rule = "belongs to the steps of mode=train, and this is mode=eval"
            reset = "rollout.dump=false" if rollout.dump == value else "rollout.replay=null"
            yield ConfigError(key, value, rule, remedies=[(reset,)])
    if rollout.dump and rollout.replay is not None:
        yield ConfigError(
            "rollout.dump",
            got=True,
            rule="rollout.replay reads the same rollouts from another run: a second copy is no use",
            remedies=[("rollout.dump=false",), ("rollout.replay=null",)],
        )


def check_replayed_run(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The recorded run has rollouts, and is not deleted by the run that replays them."""
    replay = config.rollout.replay
    if replay is None or config.mode == "eval":
        return
    if flaw := flaw_of_folder(Path(replay) / "rollouts"):
        yield ConfigError(
            "rollout.replay",
            replay,
            f"no rollouts there: {flaw}; a run writes them with rollout.dump=true",
            remedies=[("rollout.replay=null",)],
        )
    elif (
        config.trainer.overwrite
        and Path(replay).resolve() == Path(config.trainer.run_dir).resolve()
    ):
        yield ConfigError(
            "trainer.overwrite",
            got=True,
            rule=f"would delete the rollouts to replay: rollout.replay={replay} is trainer.run_dir",
            remedies=[("trainer.overwrite=false",)],
        )


RULES = (check_recording, check_replayed_run)
