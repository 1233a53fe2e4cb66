"""Start of a run: what is slow to start starts at the same time.

Importing torch takes seconds, and so does starting Ray; neither needs the other, so a thread
imports
while Ray starts. (Not the other way round: Ray's processes end with the thread that started them.)
This module therefore imports neither torch nor what does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.trainer.cluster import ray_cluster
from hybridrl.trainer.record import open_record

_COMPOSITION_ROOT = "hybridrl.trainer.build"


def run(config: ExperimentConfig, *, resolved_yaml: str) -> None:
    """Run a checked configuration in its own run folder.

    Args:
        config: has passed every check.
        resolved_yaml: what the run folder keeps as config.yaml.

    Raises:
        RunFolderError: the folder exists already, or cannot be written.
        ResourceError: there is no Ray cluster, or it lacks what the run asks for.
    """
    with open_record(config, resolved_yaml=resolved_yaml) as record:
        record.phase("start Ray")
        with ThreadPoolExecutor(1, thread_name_prefix="import") as thread:
            imported = thread.submit(import_module, _COMPOSITION_ROOT)
            num_more_ranks = config.num_critic_ranks if config.has_critic_pool else 0
            with ray_cluster(config.cluster, num_more_ranks=num_more_ranks):
                imported.result().run(config, record=record)
