"""Policy losses: what each response token adds to the loss.

Each public top-level function that the configuration knows by its name takes some of these, one
number a token, and returns float32 [T] with gradient, or a ``PolicyLoss``:

    current_logprobs_T: float32 nats, with gradient.
    old_logprobs_T: float32 nats, before the update.
    advantages_T: float32.
    rows: ``TokenRows``, which tokens belong to which response.

Ranges of its numbers are those of their types in ``config/limits.py``.

Legend: T packed response tokens of this rank, R rows.
"""
