"""What a person with experience would say about the curves: rules, each with what to type.

A rule looks at the last steps and speaks only if it is sure; a run without findings is not thereby
good.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.report import learning_rules as learning
from hybridrl.report import running_rules as running
from hybridrl.report.evidence import Evidence, Finding

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    running.ended_with_error,
    learning.reward_is_flat,
    learning.all_groups_flat,
    learning.evaluation_falls,
    learning.entropy_collapsed,
    learning.policy_moves_too_fast,
    learning.far_from_reference,
    running.sampler_differs,
    learning.updates_skipped,
    running.rewards_failed,
    running.responses_are_cut,
    running.requests_aborted,
    learning.gradient_always_clipped,
    running.generate_dominates,
    running.memory_did_not_move,
)


def find(evidence: Evidence) -> list[Finding]:
    """Apply every rule; errors first, then warnings, then notes."""
    order = ("error", "warning", "note")
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda finding: order.index(finding.severity))
