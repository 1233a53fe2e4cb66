"""The weight of the KL penalty, fixed or adapted after each step."""

from __future__ import annotations

from hybridrl.algorithms.kl import adapt_coefficient
from hybridrl.config.algorithm import KLConfig
from hybridrl.metrics import Mean, Metrics

_MEASURED = {"loss": "policy/kl_to_reference_nats/mean", "reward": "reward/kl_nats/mean"}
"""The metric that a target is compared with, by the placement of the penalty."""


class KLCoefficient:
    """Holds the coefficient; part of a checkpoint where it adapts."""

    def __init__(self, config: KLConfig, *, num_rows: int) -> None:
        """Start at the configured coefficient; a step has ``num_rows`` responses."""
        self._config = config
        self._num_rows = num_rows
        self.value = config.coefficient
        """Weight of the penalty in the next step."""

    @property
    def in_loss(self) -> float:
        """Weight of the penalty in the policy loss; 0 if it is elsewhere."""
        return self.value if self._config.placement == "loss" else 0.0

    def restore(self, value: float | None) -> None:
        """Continue from the coefficient of a checkpoint; None begins with the configured one."""
        if value is None or self._config.target_nats is None:
            value = self._config.coefficient
        self.value = value

    def adapt(self, measured: Metrics) -> Metrics:
        """Adapt the coefficient to the KL that a step measured, if there is a target.

        Returns the coefficient that the step used; nothing where it is fixed.
        """
        config, used = self._config, self.value
        if config.target_nats is None:
            return {}
        kl = measured.get(_MEASURED[config.placement])
        if kl is not None:  # a step that learned from no token measures none
            self.value = adapt_coefficient(
                used,
                kl.value,
                num_rows=self._num_rows,
                target_nats=config.target_nats,
                horizon=config.horizon,
            )
        return {"policy/kl_coefficient": Mean(used)}
