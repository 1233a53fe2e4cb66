"""The fused worker: the policy's training and rollout engine take turns on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridrl.algorithms.advantages.optimal_token_baseline import squared_probs
from hybridrl.algorithms.load import require_part
from hybridrl.batch import (
    LogprobBatch,
    PromptBatch,
    RewardBatch,
    RolloutBatch,
    SupervisedBatch,
    TrainBatch,
    leave_experts,
)
from hybridrl.config.algorithm import INITIAL, POLICY
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.functions import parts
from hybridrl.errors import DriftError
from hybridrl.metrics import Last, Metrics, from_json, merge, to_json
from hybridrl.models.model_folder import read_settings
from hybridrl.sampler import SamplingParams
from hybridrl.single_controller import Dispatch, ResultLayout, dispatch_by_mesh, register
from hybridrl.workers.build import (
    build_engines,
    build_policy_loss,
    build_reference_engine,
    build_reward_engines,
    build_sampling,
    build_teachers,
    build_train_engine,
)
from hybridrl.workers.checkpointed import CheckpointedWorker, end_process_group
from hybridrl.workers.rollout.assemble import (
    Answered,
    assemble_rollouts,
    describe_staleness,
    require_known_tokens,
)
from hybridrl.workers.sharding.control import ControlGroup
from hybridrl.workers.sharding.manager import ShardingManager
from hybridrl.workers.sharding.manager_client import ManagerClient
from hybridrl.workers.sharding.meter import PeakMeter
from hybridrl.workers.train.checkpoint import Notes
from hybridrl.workers.train.losses import PolicyGradientLoss
from hybridrl.workers.train.policy_engine import PolicyEngine
from hybridrl.workers.train.teachers import Teacher

TRAIN = dispatch_by_mesh("train")
ROLLOUT = dispatch_by_mesh("rollout")
TRAIN_METRICS = replace(
    TRAIN,
    name="TRAIN_METRICS",
    collect=lambda _, parts: merge(parts),
    output_layout=ResultLayout.OTHER,
    # Each rank reports its own seconds and bytes; output ranks report metrics of rows.
    collect_from_all=True,
)


class ActorRolloutWorker(CheckpointedWorker):
    """One rank of the policy. The driver calls generate, compute_logprobs and update, in turn."""

    def __init__(
        self,
        config: ExperimentConfig,
        model_folder: Path,
        servers: ManagerClient | None = None,
    ) -> None:
        """Start both engines, the rollout engine first, on an empty device; a collective call.

        ``servers`` have all requests, if there are any.
        """
        device = self.join_group(config)
        control = ControlGroup(timeout_s=config.rollout.stage_timeout_s)
        self._config = config
        self._loss = build_policy_loss(config)
        self._aggregation = require_part(config.algorithm, parts.AGGREGATION)
        self._needs_squared_probs = config.algorithm.reads("squared_probs_BL")
        self._needs_teacher_logprobs = config.algorithm.reads("teacher_logprobs_BL")
        self._policy_version = 0
        self._carried: Metrics = {}
        meter = PeakMeter(device)
        with meter("build"):
            self._start_rollout(model_folder, servers, meter=meter, control=control)
            # Then what computes beside the rollout engine, and leaves the device to it.
            self._actor = build_train_engine(config, model_folder, device)
            self.sharding.attach_policy(self._actor)
            self._reference = build_reference_engine(
                config, model_folder, device, actor=self._actor
            )
            own = {POLICY: self._actor, INITIAL: self._reference}
            self._teachers = build_teachers(config, model_folder, device, own)
            self._reward_models = build_reward_engines(config, device)
            others = {"reference": self._reference, **self.teachers_of_their_own()}
            for name, model in others.items():
                if isinstance(model, PolicyEngine):  # the policy without its adapter has no memory
                    self.sharding.register(name, model)
            for name, reward_model in self._reward_models.items():
                self.sharding.register(f"reward model {name}", reward_model)
            self._vocab_size = int(read_settings(model_folder)["vocab_size"])
            self.start_work(self._actor, seed=config.seed)

    def _start_rollout(
        self,
        model_folder: Path,
        servers: ManagerClient | None,
        *,
        meter: PeakMeter,
        control: ControlGroup,
    ) -> None:
        """Start the rollout engine, if this rank owns one; a collective call."""
        config = self._config
        engines = build_engines(
            config, model_folder, meter.device, servers=servers, control=control
        )
        # Rank 0 asks the manager for all responses; without one each engine has its own prompts.
        num_asking = self.world_size
        if servers is None and engines.num_engines:
            num_asking //= engines.num_engines
        self.register_mesh(
            "rollout",
            dp_rank=self.rank // num_asking,
            dp_size=self.world_size // num_asking,
            is_output_rank=self.rank % num_asking == 0,
        )
        self.sharding = ShardingManager(
            engines=engines,
            config=config.rollout,
            meter=meter,
            control=control,
            call_timeout_s=config.cluster.call_timeout_s,
            lora=config.lora if config.lora.sends_adapters else None,
        )
        self._sampling = build_sampling(
            config,
            model_folder,
            engine=None if engines.managed is None else engines.managed.engine,
            servers=servers,
            sharding=self.sharding,
            control=control,
        )

    def teachers_of_their_own(self) -> dict[str, Teacher]:
        """Return the teachers that are neither the policy nor its reference, by name."""
        models = [] if self._teachers is None else self._teachers.models
        others = [each for each in models if each not in (self._actor, self._reference)]
        return {f"teacher {n}" if n else "teacher": each for n, each in enumerate(others)}

    @register(ROLLOUT, pad=True)
    def generate(self, prompts: PromptBatch, sampling: SamplingParams) -> RolloutBatch | None:
        """Sample G responses to each of n prompts with the newest weights.

        Ranks that share an engine get the same prompts. Returns n * G rows in prompt order,
        responses to the same prompt adjacent, with the version of the policy that sampled them;
        None on a rank that has no engine. With ``sampling.num_complete`` these are rows of so many
        prompts, and the others continue in a later call.
        """
        with self.sharding.rollout_phase():
            answered = self._sampling.sample(prompts, sampling, version=self._policy_version)
        return self._assemble(answered, has_versions=self._config.oversamples)

    @register(ROLLOUT)
    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams
    ) -> RolloutBatch | None:
        """Send the newest weights, admit prompts, and wait for a batch of those admitted so far.

        Returns P * G rows with versions, those to one prompt adjacent; None but on the first rank.
        """
        with self.sharding.rollout_phase():
            answered = self._sampling.exchange(prompts, sampling, version=self._policy_version)
        samples = [] if answered is None else answered.samples
        sampled = [each.weight_version for each in samples if len(each.token_ids)]
        first = min(sampled, default=self._policy_version)
        limit = self._config.trainer.max_staleness
        if self._policy_version - first > limit * self._config.algorithm.num_updates_per_step:
            raise DriftError(
                f"a response began with weights of version {first}, and the policy is at version "
                f"{self._policy_version}, more than trainer.max_staleness={limit} steps later; "
                "nothing of this batch is used"
            )
        return self._assemble(answered, has_versions=True)

    def _assemble(self, answered: Answered | None, *, has_versions: bool) -> RolloutBatch | None:
        self._carried = merge([self._carried, self._sampling.take_metrics()])
        if answered is None:
            return None
        rollouts = assemble_rollouts(
            answered.prompts,
            answered.samples,
            policy_version=self._policy_version,
            has_versions=has_versions,
        )
        require_known_tokens(rollouts, vocab_size=self._vocab_size)
        return leave_experts(rollouts)

    @register(TRAIN_METRICS)
    def take_agent_metrics(self) -> Metrics:
        """Return and forget the metrics of conversations: an evaluation's count in no step."""
        taken = {name: m for name, m in self._carried.items() if name.startswith("agent/")}
        self._carried = {name: m for name, m in self._carried.items() if name not in taken}
        return taken

    @register(TRAIN)
    def compute_logprobs(self, rollouts: RolloutBatch) -> LogprobBatch:
        """Score the rollouts before the update; what the algorithm does not need is None."""
        self.sharding.require_training()
        temperature = self._config.rollout.temperature
        logprobs = LogprobBatch(batch_size=[len(rollouts)])
        with self.sharding.meter("logprobs"):
            if self._config.algorithm.old_logprobs == "recompute":
                old = self._actor.compute_logprobs(rollouts, temperature=temperature)
                logprobs.old_logprobs_BL = old.logprobs_BL
                if self._needs_squared_probs:
                    half = self._actor.compute_logprobs(rollouts, temperature=temperature / 2)
                    logprobs.squared_probs_BL = squared_probs(
                        old.logprobs_BL, half.logprobs_BL, rollouts.response_mask_BL
                    )
            if self._reference is not None and self._config.algorithm.kl.placement != "none":
                reference = self._reference.compute_logprobs(rollouts, temperature=temperature)
                logprobs.reference_logprobs_BL = reference.logprobs_BL
            if self._teachers is not None and self._needs_teacher_logprobs:
                logprobs.teacher_logprobs_BL = self._teachers.logprobs(rollouts)
        return logprobs

    @register(TRAIN)
    def compute_rewards(self, rows: SupervisedBatch, *, model: str) -> RewardBatch:
        """Score conversations with a reward model, by the name of its reward."""
        self.sharding.require_training()
        with self.sharding.meter("reward"):
            return self._reward_models[model].compute_rewards(rows)

    @register(TRAIN_METRICS)
    def update(self, batch: TrainBatch, *, kl_coefficient: float) -> Metrics:
        """Take ``num_epochs * num_minibatches`` optimizer steps; a ``kl_coefficient`` of 0 is none.

        This rank's rows of each mini-batch are adjacent (see balance_over_ranks). Returns metrics
        of the update, and of the rollout phases since the last one. A DriftError if another policy
        sampled the rollouts, and this step checks it; nothing was learned from them then.
        """
        self.sharding.require_training()
        algorithm = self._config.algorithm
        loss = replace(
            self._loss,
            kl_coefficient=kl_coefficient,
            max_drift_nats=self._config.rollout.canary_max_drift_nats,
            policy_version=self._policy_version,
        )
        # With the sampler's log-probs as old ones, an update moves what the next one is checked by.
        following = replace(loss, max_drift_nats=None) if loss.is_old_the_sampler else loss
        staleness = self._staleness(batch)
        with self.sharding.meter("update"):
            steps = [
                self._step(minibatch, following if epoch or number else loss)
                for epoch in range(algorithm.num_epochs)
                for number, minibatch in enumerate(batch.chunk(algorithm.num_minibatches))
            ]
        carried, self._carried = merge([self._carried, staleness]), {}
        version: Metrics = {"policy/version": Last(self._policy_version)}
        return merge([*steps, version, carried, self.sharding.take_metrics()])

    def _staleness(self, batch: TrainBatch) -> Metrics:
        """Count the steps between the weights that sampled each token and this update."""
        if batch.weight_versions_BL is None:
            return {}
        versions_T = batch.weight_versions_BL.values()[batch.response_mask_BL.values()]
        if not len(versions_T):
            return {}
        per_step = self._config.algorithm.num_updates_per_step
        steps_T = torch.div(self._policy_version - versions_T.double(), per_step)
        return describe_staleness(steps_T)

    def _step(self, minibatch: TrainBatch, loss: PolicyGradientLoss) -> Metrics:
        algorithm = self._config.algorithm
        if self._teachers is not None and algorithm.divergence_coefficient:
            minibatch = self._teachers.teach(minibatch)
        metrics = self._actor.update(
            minibatch,
            loss=loss,
            aggregation=self._aggregation,
            temperature=self._config.rollout.temperature,
            max_response_tokens=self._config.rollout.max_response_tokens,
            beta=algorithm.divergence_beta,
        )
        self._policy_version += 1  # at once: if the next line fails, these weights have changed
        self.sharding.weights_changed(version=self._policy_version)
        return metrics

    def profile(self, stem: Path | None) -> None:
        """Profile the calls as all workers do, and the server of this rank's rollout engine."""
        super().profile(stem)
        self.sharding.profile_engine(stem and Path(f"{stem}.engine-{self.rank}"))

    def checkpointed_engine(self) -> PolicyEngine:
        """Return the policy's training engine."""
        self.sharding.require_training()
        return self._actor

    def notes(self) -> Notes:
        """Return the version, and the metrics of an evaluation since the last update."""
        self._carried = merge([self._carried, self.sharding.take_metrics()])
        return {"policy_version": self._policy_version, "metrics": to_json(self._carried)}

    def take_up(self, notes: Mapping[str, Any]) -> None:
        """Restore the version; the next rollout phase sends the weights."""
        self._policy_version = notes["policy_version"]
        self._carried = from_json(notes["metrics"])
        self.sharding.weights_changed(version=self._policy_version)

    @register(Dispatch.ONE_TO_ALL)
    def export_adapter(self, folder: Path) -> None:
        """Write the policy's adapter as a peft folder, atomically."""
        self.checkpointed_engine().export_adapter(folder)

    def close(self) -> None:
        """End tools and rollout engine, and leave the process group."""
        super().close()
        self._sampling.close()
        self.sharding.shutdown()
        end_process_group()
