"""Every error that hybridrl raises on purpose.

A message states one fact with values and units, then one remedy with the exact key to type.
All errors survive pickling, because Ray carries them from a worker to the driver.
"""

from __future__ import annotations

import re
import reprlib
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches

_LOST_PEER = {
    *("DeadlineError", "ServerDiedError"),
    *("DistBackendError", "DistNetworkError", "DistStoreError"),  # torch's
    *("ObjectLostError", "OwnerDiedError", "NodeDiedError"),  # Ray's
}
"""Errors, by class, that are raised where a process hung or went away."""

_LOST_PEER_TEXTS = (
    *("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting"),
    *("timeout caused pair closure", "failed to pass monitoredBarrier"),
    *("communicator was aborted", "ServerDiedError: "),
)
"""The same in a plain RuntimeError of gloo, and in our errors that quote those of other ranks."""


_CHANGED_BY_SHELLS = re.compile(r"[\s'\"\\$`!()*?<>|&;#]|\{[^}]")
_MOST_SHOWN = 200
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _MOST_SHOWN
_SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12


class HybridRLError(Exception):
    """Base of all errors below; catch it to catch whatever hybridrl says on purpose."""

    def __reduce__(self) -> tuple[Callable[..., HybridRLError], tuple[object, ...]]:
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    cls: type[HybridRLError], args: tuple[object, ...], state: dict[str, object]
) -> HybridRLError:
    # Past __init__: subclasses build their message from other arguments than the message.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(HybridRLError, ValueError):
    """A recipe or override is wrong. Raised before any device is touched.

    The message has four parts: the dotted key, the value the user gave, the rule it breaks, and the
    text to type instead.

    Args:
        fix: the text to type instead; by default it lists ``remedies``.
        remedies: alternatives, best first. Each is a tuple of overrides which, added to the
            command, fix this violation and break no other rule (tested for every rule).
    """

    def __init__(
        self,
        key: str,
        got: object,
        rule: str,
        fix: str = "",
        *,
        remedies: Sequence[tuple[str, ...]] = (),
    ) -> None:
        fix = fix or ", or ".join(instruction(overrides) for overrides in remedies)
        end = "" if fix.endswith(("?", "...")) else "."
        stop = "" if rule.endswith("?") else "."
        super().__init__(f"{shorten(key)}={shown(got)}: {rule}{stop} Fix: {fix}{end}")
        self.key = key
        self.rule = rule
        self.remedies = tuple(remedies)


class ConfigErrors(HybridRLError, ValueError):
    """All violations of one configuration, so that a user fixes them together."""

    def __init__(self, violations: Sequence[ConfigError]) -> None:
        lines = "\n".join(f"  {n}. {violation}" for n, violation in enumerate(violations, 1))
        count = len(violations)
        super().__init__(f"{count} {'problem' if count == 1 else 'problems'}:\n{lines}")
        self.violations = tuple(violations)


def instruction(overrides: Sequence[str]) -> str:
    """Return the text to type: ``set a=1 b=2``, ``add ~c``; quoted where a shell needs it."""
    verb = "add" if overrides[0].startswith(("~", "+")) else "set"
    return f"{verb} {' '.join(map(to_type, overrides))}"


def to_type(override: str) -> str:
    """Return an override as a shell takes it: in quotes where it needs them."""
    if not _CHANGED_BY_SHELLS.search(override):
        return override
    if not re.search(r'["$`\\!]', override):  # easier to read than ' inside of '
        return f'"{override}"'
    return shlex.quote(override)


def shown(value: object) -> str:
    """Write any value in one line of at most 200 characters."""
    try:
        return shorten(_SHORT.repr(value))
    except ValueError:  # Python does not format numbers of more than 4300 digits
        return "a number of thousands of digits"


def shorten(text: str, *, at_most: int = _MOST_SHOWN) -> str:
    """Return ``text`` if it has at most so many characters, else its ends."""
    if len(text) <= at_most:
        return text
    half = (at_most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


class DispatchError(HybridRLError, ValueError):
    """A driver call cannot be divided over the ranks. Raised before any rank is called."""


class ResourceError(HybridRLError, RuntimeError):
    """The cluster lacks resources of a resource pool."""


class ClusterLostError(ResourceError):
    """The head of the Ray cluster is gone while a run uses it."""


class DriverDiedError(HybridRLError, RuntimeError):
    """The driver ended without an exception: its raylet is gone, or it was killed."""


class RemoteCallError(HybridRLError, RuntimeError):
    """A method failed on a rank: names rank, host, method, and holds the remote traceback."""

    def __init__(self, *, rank: int, host: str, method: str, cause: str, traceback: str) -> None:
        super().__init__(f"rank {rank} on {host}: {method}() failed: {cause}\n{traceback}".rstrip())
        self.rank = rank
        self.host = host
        self.method = method
        self.remote_cause = cause
        self.remote_traceback = traceback
        self.is_peer_failure = False
        """Whether the rank failed because another process hung or went away."""


class WorkerDiedError(RemoteCallError):
    """The process of a rank is gone (killed, out of memory, node lost)."""


class WorkerGroupError(HybridRLError, RuntimeError):
    """A call on a worker group that was stopped, on purpose or after a failure."""


class ReadOnlyError(HybridRLError, RuntimeError):
    """A worker wrote into a batch it received: memory that other ranks read too."""


class DeadlineError(HybridRLError, TimeoutError):
    """An action exceeded its time limit; the message names the action and the limit's key."""


class PhaseError(HybridRLError, RuntimeError):
    """An edge of the engine life cycle that is not drawn, or work in the wrong state."""


class EngineError(HybridRLError, RuntimeError):
    """A stage of waking, feeding or putting to sleep a rollout engine failed."""


class RequestError(EngineError):
    """A sampling request that is refused: its context or a parameter. Others are not affected."""


class SampledPlaceholderError(RequestError):
    """A context has more placeholders of images than images: SGLang cannot continue from there."""


class DriftError(EngineError):
    """Trainer and rollout engine are not the same policy any more; says by how much, and why."""


class ServerDiedError(EngineError):
    """The process of a rollout server is gone: killed, out of memory, or ended by itself."""


class ExternalServersError(EngineError):
    """Servers that run elsewhere cannot be used; names each with all its differences."""


class RouterError(HybridRLError, RuntimeError):
    """Requests fail behind sglang-router again and again, or it does not stay alive."""


class LedgerError(EngineError):
    """Rollout weights that were lost on release have not been sent again."""


class RehearsalError(HybridRLError, RuntimeError):
    """A rank fails on fake devices, with an error that is none of hybridrl's own."""


class ModelError(HybridRLError, ValueError):
    """A model folder, tokenizer or tensor is missing or does not fit."""


class DataError(HybridRLError, ValueError):
    """A data file or row is unusable; names file and line."""


class RewardError(HybridRLError, RuntimeError):
    """A reward function raised, hung, or returned something that is not a reward."""


class AgentError(HybridRLError, ValueError):
    """An agent, a tool or a chat template cannot be used for conversations."""


class SandboxError(HybridRLError, RuntimeError):
    """A program cannot be held in a sandbox on this machine."""


class MetricError(HybridRLError, ValueError):
    """A metric's name is not declared in ``hybridrl/metrics.py``."""


class TrainingError(HybridRLError, RuntimeError):
    """Training cannot continue, for example after too many non-finite gradients in a row."""


class CheckpointError(HybridRLError, RuntimeError):
    """A checkpoint is incomplete, of another run or model, or could not be written."""


class TornCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; the one before it may be."""


class ReplayError(HybridRLError, ValueError):
    """Recorded rollouts are missing, incomplete, or of another run than the one that replays."""


class TrackerError(HybridRLError, RuntimeError):
    """The service of a tracker does not take the run."""


class RunFolderError(HybridRLError, OSError):
    """The run folder cannot be written, or would be overwritten."""


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, follows from another process's end."""
    name = type(error).__name__
    if name in _LOST_PEER:
        return True
    if name in ("RuntimeError", "StageError", "EngineError"):
        return any(text in str(error) for text in _LOST_PEER_TEXTS)
    return error.__cause__ is not None and is_peer_failure(error.__cause__)


def is_restartable(error: BaseException) -> bool:
    """Whether new processes can be expected to get past ``error`` from where the old ones were.

    True if a process died or hung, or if a rank raised because another did. False for everything
    that the same code would do again with the same data: an error raised by our code or by the
    user's, on a rank or on the driver.
    """
    if isinstance(error, RemoteCallError):
        return error.is_peer_failure or isinstance(error, WorkerDiedError)
    if isinstance(error, EngineError):  # the driver starts and asks the run's own servers itself
        return is_peer_failure(error) and not isinstance(error, ExternalServersError)
    return isinstance(error, DeadlineError | DriverDiedError)


def error_notes(error: BaseException) -> list[str]:
    """Return the notes of an error, from ``add_note``."""
    notes: list[str] = vars(error).get("__notes__", [])
    return notes


def first_of(names: Sequence[str], *, at_most: int = 4) -> str:
    """Name the first ones and count the rest: ``a, b, c and 7 more``."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")


_MOST_NAMED = 40


def close_names(name: str, known: Sequence[str]) -> list[str]:
    """Return at most three known names: first those that begin with ``name``, then similar ones."""
    word = name.lower()
    begun = [other for other in sorted(known) if word and other.lower().startswith(word)]
    similar = get_close_matches(word, known, cutoff=0.5)
    return [*begun, *(other for other in similar if other not in begun)][:3]


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Suggest known names: ``did you mean 'lr'?`` or, if none is close, a list of them.

    Of more than 40 that exist, the first are named and the others counted.
    """
    if close := close_names(name, known):
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    shown_names = sorted(known)[:_MOST_NAMED]
    num_others = len(known) - len(shown_names)
    others = f" and {num_others} more" if num_others else ""
    return f"known: {', '.join(shown_names)}{others}"
