"""The canary: fixed prompts that tell whether the rollout engine still is the trainer's policy.

After every wake the engine continues them greedily. Every N steps, with new weights, it also
samples as in training, and the trainer scores both; in between its answers are held against those
that it gave with the same weights. Fluent garbage is found before it is learned from.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.algorithms.drift import Drift, DriftMeasurement, attribute_drift, measure_drift
from hybridrl.batch import PromptBatch
from hybridrl.config.architecture import read_architecture
from hybridrl.config.rollout import RolloutConfig
from hybridrl.errors import DriftError
from hybridrl.metrics import Max, Mean, Metrics
from hybridrl.workers.rollout.assemble import assemble_rollouts
from hybridrl.workers.rollout.protocol import Response, RolloutEngine, SamplingParams
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.train.protocol import TrainEngine

log = logging.getLogger(__name__)

_NUM_PROMPTS = 4
_NUM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answers:
    """What one engine said."""

    prompts: PromptBatch
    greedy: list[Response]
    as_sampled: list[Response]
    """Empty where the trainer does not look."""


class Canary:
    """Watches the rollout engines of a worker group; every rank has one and calls it alike."""

    def __init__(
        self,
        *,
        config: RolloutConfig,
        num_updates_per_step: int,
        model_folder: Path,
        sharding: ShardingManager,
        control: ControlGroup,
        trainer: TrainEngine,
    ) -> None:
        """Prepare; prompts are taken from the first call that has some.

        Args:
            config: how often, how far, and how training samples.
            num_updates_per_step: policy versions a step.
            model_folder: whose config.json says how many ids the trainer knows.
            sharding: lends the device when weights are sent again to find a cause.
            control: the control group of all ranks.
            trainer: whose policy the engines should be.
        """
        self._config = config
        self._num_updates = config.canary_every_steps * num_updates_per_step
        self._sharding = sharding
        self._control = control
        self._trainer = trainer
        self._vocab_size = read_architecture(model_folder).vocab_size
        self._prompts: PromptBatch | None = None
        self._scored_version: int | None = None
        self._known: tuple[int, list[Response]] | None = None

    def take_prompts(self, prompts: PromptBatch) -> None:
        """Keep the first prompts that come, if the canary is on."""
        if self._num_updates and self._prompts is None and len(prompts):
            self._prompts = prompts[torch.arange(min(_NUM_PROMPTS, len(prompts)))]

    def ask(self, engine: RolloutEngine, *, version: int) -> Answers | None:
        """Let an engine that has just woken answer; None if the canary is off."""
        if self._prompts is None:
            return None
        greedy = engine.generate(self._prompts, self._sampling(temperature=0.0))
        if not self._is_due(version):
            return Answers(self._prompts, greedy, [])
        config = self._config
        as_trained = replace(
            self._sampling(temperature=config.temperature), top_p=config.top_p, top_k=config.top_k
        )
        return Answers(self._prompts, greedy, engine.generate(self._prompts, as_trained))

    def judge(self, answers: Answers | None, *, version: int) -> Metrics:
        """Compare, on all ranks together, after the rollout phase.

        Args:
            answers: what ``ask`` returned; None on a rank that leads no engine.
            version: of the weights that answered.

        Raises:
            DriftError: an engine's answers are not the trainer's policy, and why; or not what the
                same weights answered before.
        """
        if self._prompts is None:
            return {}
        own_answers, all_answers = self._shared(answers)
        if self._known is not None and self._known[0] == version:
            self._require_same(own_answers.greedy, self._known[1], version)
        self._known = (version, own_answers.greedy)
        if not self._is_due(version):
            return {}
        drift = self._widest(self._evidence(all_answers))
        if not drift.is_within(self._config.canary_max_drift_nats):
            self._raise_with_cause(drift, version)
        self._scored_version = version
        return {
            "policy/canary_drift_nats/mean": Mean(drift.mean_nats, 1.0),
            "policy/canary_drift_nats/max": Max(drift.max_nats),
        }

    def _is_due(self, version: int) -> bool:
        scored = self._scored_version
        return scored is None or version - scored >= self._num_updates

    def _sampling(self, *, temperature: float) -> SamplingParams:
        num_tokens = min(_NUM_TOKENS, self._config.max_response_tokens)
        return SamplingParams(1, num_tokens, temperature)

    def _shared(self, answers: Answers | None) -> tuple[Answers, list[Answers]]:
        """Hand answers to all ranks that score them.

        Returns:
            Those of this rank's engine; and those of all engines of the ranks that share its
            trainer's model, which score the same rows together.
        """
        rank, size = self._control.rank, self._config.tensor_parallel_size
        everyone = self._control.gather("canary", (self._trainer.dp_rank, answers))
        shares = [
            place for place, (dp_rank, _) in enumerate(everyone) if dp_rank == everyone[rank][0]
        ]
        engines = sorted({place // size for place in shares})
        of_engine = {engine: everyone[engine * size][1] for engine in engines}
        all_answers = [answer for answer in of_engine.values() if answer is not None]
        touched = {(dp_rank, place // size) for place, (dp_rank, _) in enumerate(everyone)}
        most = max(Counter(dp_rank for dp_rank, _ in touched).values())
        all_answers += all_answers[-1:] * (
            most - len(all_answers)
        )  # all trainers score equally often: a collective
        own_answers = of_engine[rank // size]
        if own_answers is None or None in of_engine.values():
            raise DriftError("an engine of these ranks was not asked for its canary's answers")
        return own_answers, all_answers

    def _require_same(
        self, now: Sequence[Response], before: Sequence[Response], version: int
    ) -> None:
        """Whatever happened to the engine since, the same weights give the same answers."""
        pairs = [_until_they_part(one, other) for one, other in zip(now, before, strict=True)]
        drift = measure_drift(
            torch.cat([one for one, _ in pairs]), torch.cat([other for _, other in pairs])
        )
        drift = self._largest(drift)
        if not drift.is_within(self._config.canary_max_drift_nats):
            raise DriftError(
                f"the rollout engine answers the canary otherwise than before with the same weights"
                f" (version {version}): {drift}. It woke up with other memory than it fell asleep "
                "with; nothing of this phase is used. Set rollout.backup_weights=always, or "
                "rollout.sleep=false"
            )

    def _evidence(self, all_answers: Sequence[Answers]) -> DriftMeasurement:
        said = [response for it in all_answers for response in (*it.greedy, *it.as_sampled)]
        ids = torch.cat([response.token_ids for response in said])
        num_foreign = int(((ids < 0) | (ids >= self._vocab_size)).sum())
        num_foreign = self._control.largest("canary ids", num_foreign)
        if num_foreign:  # the trainer has no row for them
            nothing = Drift(float("inf"), float("inf"))
            return DriftMeasurement(as_sampled=nothing, greedy=nothing, num_foreign_ids=num_foreign)
        return DriftMeasurement(
            as_sampled=self._scored(
                [(it.prompts, it.as_sampled) for it in all_answers], self._config.temperature
            ),
            greedy=self._scored([(it.prompts, it.greedy) for it in all_answers], 1.0),
            num_foreign_ids=0,
        )

    def _scored(
        self, all_answers: Sequence[tuple[PromptBatch, list[Response]]], temperature: float
    ) -> Drift:
        drifts = [Drift(0.0, 0.0)]
        for prompts, responses in all_answers:
            if not responses:
                continue
            rollouts = assemble_rollouts(prompts, responses, policy_version=0)
            scored = self._trainer.compute_logprobs(rollouts, temperature=temperature)
            mask = rollouts.response_mask_BL.values()
            drifts.append(
                measure_drift(
                    scored.logprobs_BL.values().cpu()[mask],
                    rollouts.sampler_logprobs_BL.values()[mask],
                )
            )
        return self._largest(max(drifts, key=lambda it: it.max_nats))

    def _largest(self, drift: Drift) -> Drift:
        """Of all ranks' drifts the worst: all go on, or all stop."""
        return max(self._control.gather("canary drift", drift), key=lambda it: it.max_nats)

    def _widest(self, evidence: DriftMeasurement) -> Drift:
        return max(evidence.as_sampled, evidence.greedy, key=lambda it: it.max_nats)

    def _raise_with_cause(self, drift: Drift, version: int) -> None:
        """Send the weights again, ask again, and say what has gone and what is left."""
        log.warning("canary: engine and trainer disagree, looking for the cause: %s", drift)
        self._sharding.resend_weights()
        self._known = None
        with self._sharding.rollout_phase() as engine:
            answers = None if engine is None else self.ask(engine, version=version)
        _, all_answers = self._shared(answers)
        evidence = self._evidence(all_answers)
        limit = self._config.canary_max_drift_nats
        cause = attribute_drift(evidence, limit_nats=limit)
        raise DriftError(
            f"trainer and rollout engine disagree on the canary (version {version}): {drift}, "
            f"allowed {limit:g}. Cause: {cause.value}. After the weights were sent again: greedy "
            f"{evidence.greedy}; sampled as in training {evidence.as_sampled}. If that is only "
            f"rounding, raise rollout.canary_max_drift_nats"
        )


def _until_they_part(one: Response, other: Response) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens both have, and of the first two that differ: nearly equals may swap.

    Greedy tokens are the likeliest, so where they part both log-probs are of a maximum.
    """
    length = min(len(one.token_ids), len(other.token_ids))
    differs = (one.token_ids[:length] != other.token_ids[:length]).nonzero()
    end = int(differs[0]) + 1 if len(differs) else length
    return one.logprobs[:end], other.logprobs[:end]
