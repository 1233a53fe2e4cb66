"""API keys of rollout servers, on their way from the driver to the manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """Never shown, logged or written."""

    own: str = field(default="", repr=False)
    """Of the router, of its servers, and of the engines of the ranks; made for the run."""

    by_model: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of servers that run elsewhere, by the name of their model."""

    @classmethod
    def read(cls, config: ExperimentConfig, *, own: str) -> ServerKeys:
        """Read those of servers elsewhere from the environment of this process."""
        external = config.serving.external
        by_model = {name: env.get(model.key_variable or "") for name, model in external.items()}
        return cls(own, by_model)

    def of(self, model: str) -> str:
        """Return the key of a model's servers elsewhere; empty if they require none."""
        return self.by_model.get(model, "")
