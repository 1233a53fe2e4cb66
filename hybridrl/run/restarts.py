"""Lost workers are started again, and go on from the last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable

from hybridrl.errors import HybridRLError, error_notes, is_restartable

log = logging.getLogger(__name__)


def with_restarts(
    attempt: Callable[[], None],
    *,
    explain: Callable[[BaseException], None],
    newest_step: Callable[[], int],
    max_in_a_row: int,
) -> None:
    """Run ``attempt`` until it returns, again each time that it loses its workers.

    Args:
        attempt: starts workers, goes on from the newest checkpoint, and ends the workers.
        explain: notes on an error after which the run goes on where it was, and keeps what can be
            known of it.
        newest_step: returns the step of the newest checkpoint; 0 if there is none.
        max_in_a_row: restarts without a new checkpoint between (``checkpoint.max_restarts``).

    Raises:
        HybridRLError: what ``attempt`` raised, if another attempt would raise it as well or there
            were as many restarts as may be.
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
                "%s: %s\nworkers are started again and go on from step %d (restart %d of %d)",
                *(type(error).__name__, "\n".join([str(error), *error_notes(error)])),
                *(step, num_in_a_row, max_in_a_row),
            )
