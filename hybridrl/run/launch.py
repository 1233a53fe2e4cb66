"""Start of a run: its slow pieces start at the same time.

Importing torch takes seconds, and so does starting Ray; neither needs the other, so a thread
imports while Ray starts. (Not the other way round: Ray's processes end with the thread that
started them.) This module therefore imports neither torch nor modules that import it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.summary import sentence
from hybridrl.diagnostics import trace
from hybridrl.run.checkpoints import finished_message, should_resume
from hybridrl.run.cluster import ray_cluster, show_workers_no_more
from hybridrl.run.record import open_record
from hybridrl.run.run_folder import LOG
from hybridrl.run.supervise import driver_watchdog, supervise
from hybridrl.trainer.interrupt import ended_by_signals

_COMPOSITION_ROOT = "hybridrl.run.train"
_EVALUATION = "hybridrl.run.modes.evaluate_model"
_DIED = (
    "ClusterLostError: the driver was ended without an exception. Ray does that when the head or "
    "the raylet beside the driver is gone (cluster.ray_address={address}); else it was killed. "
    "Look at `ray status --address={address}`, start the cluster again if need be, then the run"
)


def run_supervised(
    config: ExperimentConfig, *, resolved_yaml: str, command: Sequence[str] = ()
) -> None:
    """Run a checked configuration in a child process, again if that dies; see `supervise`."""
    if config.mode == "train" and config.tracking.live != "off":
        sys.stdout.write(f"{'run':<20} {sentence(config)}\n")
        sys.stdout.flush()
    has_begun = config.mode != "eval" and supervise(config)
    run(config, resolved_yaml=resolved_yaml, has_begun=has_begun, command=command)


def run(
    config: ExperimentConfig,
    *,
    resolved_yaml: str,
    has_begun: bool = False,
    command: Sequence[str] = (),
) -> None:
    """Run a checked configuration in its own run folder.

    Args:
        resolved_yaml: the text of the run folder's config.yaml.
        has_begun: the run in the folder is this one, and continues.
        command: that started it, as typed; empty if code did.

    Raises:
        RunFolderError: the folder exists already and cannot continue, or cannot be written.
        CheckpointError: the folder's run was begun with other settings.
        RunStopped: a signal ended it before its last step, after it was saved.
        RunInterrupted: a signal ended it at once.
        ResourceError: there is no Ray cluster, or it lacks the resources of the run.
    """
    env.prepare_process(config.cluster.num_threads_per_rank)  # the thread below imports torch
    resumes = config.mode != "eval" and (has_begun or should_resume(config))
    if resumes and (message := finished_message(config)):
        sys.stdout.write(f"{message}\n")
        return
    with ExitStack() as opened:
        record = opened.enter_context(
            open_record(config, resolved_yaml=resolved_yaml, resumes=resumes, command=command)
        )
        if (address := config.cluster.address) is not None:
            words = _DIED.format(address=address)
            opened.enter_context(driver_watchdog(words, log_file=record.folder / LOG))
        record.phase("start Ray")
        thread = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="import"))
        root_name = _EVALUATION if config.mode == "eval" else _COMPOSITION_ROOT
        imported = thread.submit(import_module, root_name)
        num_more_ranks = config.num_critic_ranks if config.has_critic_pool else 0
        num_more_ranks += config.num_own_server_devices
        with (
            ray_cluster(config.cluster, num_more_ranks=num_more_ranks),
            ended_by_signals(show_workers_no_more),
        ):
            with trace.span("import"):
                root = imported.result()
            start = root.evaluate_model if config.mode == "eval" else root.train
            start(config, record=record)
