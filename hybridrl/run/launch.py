"""Start of a run: a process that outlives its driver, and slow pieces that start together.

A driver ends with its own Ray: status 1, no exception. So the process that the user started forks
before Ray and torch have begun, passes signals on and waits. It ends as the driver does. If the
driver died, it ends the remaining processes of Ray, reports the death, and starts another driver,
which resumes from the newest checkpoint.

Importing torch takes seconds, and so does starting Ray; neither needs the other, so a thread
imports while Ray starts. (Not the other way round: Ray's processes end with the thread that
started them.) This module therefore imports neither torch nor modules that import it.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.summary import sentence
from hybridrl.diagnostics import trace
from hybridrl.errors import DriverDiedError, HybridRLError, error_notes, is_restartable
from hybridrl.log import configure
from hybridrl.processes import guard
from hybridrl.run.checkpoints import finished_message, newest_step, should_resume
from hybridrl.run.cluster import RAY_PROCESSES, ray_cluster, show_workers_no_more
from hybridrl.run.record import open_record, write_postmortem
from hybridrl.run.run_folder import LOG, last_step
from hybridrl.trainer.interrupt import ECHO_S, SIGNALS, ended_by_signals, exit_status

log = logging.getLogger(__name__)

_DIED = (
    "ClusterLostError: the driver was ended without an exception. Ray does that when the head or "
    "the raylet beside the driver is gone (cluster.ray_address={address}); else it was killed. "
    "Look at `ray status --address={address}`, start the cluster again if need be, then the run"
)
_WATCHED = {*SIGNALS, signal.SIGCHLD}
_WORD = b"."

# Reads until the driver closes the pipe; if it did so by dying, the last byte is missing.
_WATCH = """
import sys
if not sys.stdin.buffer.read():
    sys.stderr.write(sys.argv[2] + "\\n")
    with open(sys.argv[1], "a", encoding="utf-8") as log:
        log.write(sys.argv[2] + "\\n")
"""


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
    # The thread below imports torch; processes that this one starts inherit them.
    for name, value in env.process_environment(config.cluster.num_threads_per_rank).items():
        env.set_default(name, value)
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
        record.live.phase("start Ray")
        thread = opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="import"))
        root_name = "modes.evaluate_model" if config.mode == "eval" else "train"
        imported = thread.submit(import_module, f"hybridrl.run.{root_name}")
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


def supervise(config: ExperimentConfig) -> bool:
    """Fork. Returns in the child, which must run ``config``; the parent ends as its children do.

    With ``cluster.ray_address`` nothing is forked: a foreign Ray cannot be started again here. It
    returns whether the run has begun earlier, in a child that died, and continues.

    Raises:
        DriverDiedError: in the parent; children died ``checkpoint.max_restarts`` times in a row.
        SystemExit: in the parent, with the status of a child that ended in order.
    """
    if config.cluster.address is not None:
        return False
    supervisor = _Supervisor(config)
    with_restarts(
        supervisor.attempt,
        explain=lambda _: None,  # each attempt explains its own errors
        newest_step=lambda: newest_step(config),
        max_in_a_row=config.checkpoint.max_restarts,
    )
    return supervisor.num_deaths > 0


class _Supervisor:
    """The parent of a run."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.num_deaths = 0
        self._config = config
        self._folder = Path(config.trainer.run_dir)
        self._was_asked_to_stop = False

    def attempt(self) -> None:
        """Fork; return in the child."""
        guard.adopt_orphans()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        read_end, write_end = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(read_end)
            ctypes.CDLL(None).prctl(guard.SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died in between
                os._exit(1)
            # Called last, since it is registered first; not at all if C++ or a signal ends this.
            atexit.register(os.write, write_end, _WORD)
            return
        os.close(write_end)
        status = self._wait(child)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            has_said_goodbye = pipe.read(1) == _WORD
        if status == -signal.SIGKILL and self._was_asked_to_stop:
            guard.kill_all()  # it could not end them
        if status < 0 and (self._was_asked_to_stop or -status in SIGNALS):
            raise SystemExit(exit_status(-status))
        if has_said_goodbye or self._was_asked_to_stop:
            raise SystemExit(status)
        self.num_deaths += 1
        error = _describe_death(child, status)
        self._explain(error)
        raise error

    def _explain(self, error: DriverDiedError) -> None:
        """Note on ``error`` the run's position, write the post-mortem, and end its processes."""
        guard.kill_all()
        configure(file=self._folder / LOG if self._folder.is_dir() else None)
        num_done, num_steps = last_step(self._folder), self._config.num_steps
        step = min(num_done + 1, num_steps)
        where = f"{'in' if num_done else 'before'} step {step} of {num_steps}, end of the driver"
        error.add_note(where)
        outcome = write_postmortem(self._folder, error, where=where)
        error.add_note(f"post-mortem: {outcome}")

    def _wait(self, child: int) -> int:
        """Return how the child ended; meanwhile pass on signals to this process.

        The third request to stop kills the child: within a call of C++ it heeds none.
        """
        num_requests, last_s = 0, -math.inf
        while True:
            signalled = signal.sigwaitinfo(_WATCHED)
            if signalled.si_signo != signal.SIGCHLD:
                self._was_asked_to_stop = True
                num_requests += time.monotonic() - last_s > ECHO_S
                last_s = time.monotonic()
                if num_requests == 3:
                    os.kill(child, signal.SIGKILL)
                    continue
                if signalled.si_code <= 0:  # of a process; a terminal sends it to the child itself
                    with suppress(ProcessLookupError):
                        os.kill(child, signalled.si_signo)
                continue
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans are children, too
                    if ended[0] == child:
                        return os.waitstatus_to_exitcode(ended[1])


def _describe_death(pid: int, status: int) -> DriverDiedError:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    alive = {guard.process_name(other) for other in guard.descendants()}
    if missing := [name for name in RAY_PROCESSES if name not in alive]:
        how += f": that happens when Ray's processes end, and {' and '.join(missing)} ended"
    return DriverDiedError(
        f"the driver (process {pid}) ended without an exception, {how}. It was killed, or ran out "
        "of memory; look at the memory of the machine first"
    )


def with_restarts(
    attempt: Callable[[], None],
    *,
    explain: Callable[[BaseException], None],
    newest_step: Callable[[], int],
    max_in_a_row: int,
) -> None:
    """Run ``attempt`` until it returns, again each time that it loses its workers.

    Args:
        explain: notes the run's position on an error that the run survives.
        newest_step: returns the step of the newest checkpoint; 0 if there is none.
        max_in_a_row: restarts without a new checkpoint between (``checkpoint.max_restarts``).

    Raises:
        HybridRLError: the error of ``attempt``, if another attempt would raise it as well or the
            limit of restarts is reached.
    """
    num_in_a_row = 0
    step_before = -1
    while True:
        try:
            return attempt()
        except HybridRLError as error:
            step = newest_step()
            num_in_a_row = num_in_a_row + 1 if step == step_before else 1
            step_before = step
            if not is_restartable(error) or num_in_a_row > max_in_a_row:
                raise
            explain(error)
            log.warning(
                "%s: %s\nworkers are started again and continue from step %d (restart %d of %d)",
                *(type(error).__name__, "\n".join([str(error), *error_notes(error)])),
                *(step, num_in_a_row, max_in_a_row),
            )


@contextmanager
def driver_watchdog(words: str, *, log_file: Path) -> Iterator[None]:
    """Write ``words`` to stderr and ``log_file`` if this process dies within the block.

    Ray ends the process of a driver from C++ when the raylet beside it, or the head, is gone: at
    once or after 60 s, depending on the driver's call at that moment (Ray 2.60), with exit status 1
    and without a message. A process of a few megabytes waits for that, and writes one. An exception
    is not a death: the code that catches it has the words.
    """
    command = [sys.executable, "-S", "-E", "-c", _WATCH, str(log_file.absolute()), words]
    # A session of its own: Ctrl-C in the terminal is for the driver.
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        watch.communicate(b"ended", timeout=10.0)
