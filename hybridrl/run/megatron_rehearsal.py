"""megatron-core's own checks in ``mode=check``, where it can be imported on this machine."""

from __future__ import annotations

from importlib import import_module

from hybridrl.config.experiment import ExperimentConfig

_MEGATRON = "hybridrl.workers.train.megatron.rehearsal"
"""Imported by name on request: it takes 5 s, and megatron-core need not be installed."""


def rehearse_megatron(config: ExperimentConfig) -> list[str]:
    """Let megatron-core check the run's arguments; nothing if no model trains on it.

    Returns:
        Lines for the user: the checked arguments, the unchecked ones, and megatron-core's answer.

    Raises:
        ConfigErrors: arguments that megatron-core would refuse when the run starts.
        ModelError: it cannot compute the model.
    """
    if not config.megatron_worlds:
        return []
    try:
        rehearsal = import_module(_MEGATRON)
    except ImportError as err:
        return [
            f"not checked: what megatron-core takes, for it cannot be imported here ({err}); "
            "pip install 'hybridrl[megatron]'"
        ]
    lines: list[str] = rehearsal.rehearse(config)
    return lines
