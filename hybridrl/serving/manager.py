"""The rollout manager: an actor without a device that holds the servers and samples with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridrl import log
from hybridrl.batch import PromptBatch, RolloutBatch, leave_experts
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.diagnostics import trace
from hybridrl.errors import PhaseError
from hybridrl.metrics import Max, Metrics, merge
from hybridrl.models.architecture import read_architecture
from hybridrl.models.image_settings import read_image_settings
from hybridrl.sampler import Program, RequestParams, Sample, SamplingParams
from hybridrl.serving.background import BackgroundSampling, SampleBuffer
from hybridrl.serving.engine_handle import Launch
from hybridrl.serving.engine_pool import EnginePool
from hybridrl.serving.finished_groups import FinishedGroups
from hybridrl.serving.frozen import ApiKeys, ExternalModel, FrozenModel
from hybridrl.serving.plan import plan_own_engines
from hybridrl.serving.recovery import Recovery
from hybridrl.serving.requests import PolicyRequests
from hybridrl.serving.server import RolloutServer, Transfer
from hybridrl.serving.teaching import ServedTeachers
from hybridrl.single_controller.payload import install_reducers
from hybridrl.workers.build import build_agent_rollout
from hybridrl.workers.rollout.assemble import Answered, assemble_rollouts
from hybridrl.workers.rollout.prefixes import KnownPrefixes
from hybridrl.workers.rollout.protocol import Receiver
from hybridrl.workers.rollout.single_turn import single_turn
from hybridrl.workers.sharding.managed_engine import ManagedEngine
from hybridrl.workers.sharding.manager_client import NOBODY, Answer, Lent
from hybridrl.workers.sharding.weight_files import AdaptedWeights, Sent, WeightSource


class RolloutManager:
    """The actor: a server for each model, and the programs that sample with the policy's."""

    def __init__(
        self,
        config: ExperimentConfig,
        model_folder: Path,
        launches: Mapping[str, Launch],
        keys: ApiKeys,
    ) -> None:
        """Start nothing yet; ``launches`` start the processes of engines, by model."""
        install_reducers()
        run_folder = Path(config.trainer.run_dir)
        log.configure_server(run_folder, log.MANAGER)
        if run_folder.is_dir():
            trace.process.write_to(run_folder, "rollout manager", num_processes=4)
        self._config = config
        self._agent = build_agent_rollout(config, model_folder)
        self._vocab_size = read_architecture(model_folder).vocab_size
        self._requests = PolicyRequests(
            config,
            vocab_size=self._vocab_size,
            images=read_image_settings(model_folder),
            key=keys.own,
        )
        self._router = self._requests.router
        plans = {plan.model: plan for plan in plan_own_engines(config)}
        policy = config.serving.policy
        self._policy = RolloutServer(plans[policy], launches[policy], config=config.rollout)
        self._transfer = Transfer()
        self._updating: Future[None] = Future()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._recovery = Recovery(
            self._policy, health_timeout_s=config.serving.health_timeout_s, key=keys.own
        )
        self._ahead: BackgroundSampling | None = None
        self._evaluated: list[PromptBatch] = []
        self._frozen = {
            name: ExternalModel(config, name, keys=keys)
            if name in config.serving.external
            else FrozenModel(config, plans[name], launches[name], key=keys.own)
            for name in config.serving.frozen
            if name not in config.idle_models
        }
        teachers = [name for name in config.algorithm.served_teachers if name in self._frozen]
        self._teachers = ServedTeachers([self._frozen[name] for name in teachers])
        self._teaching = ExitStack()
        """Of groups that are sampled ahead."""

    def start(self) -> None:
        """Start all engines of all models, and the router."""
        if self._router is not None:
            self._router.start()
        self._policy.start()
        if self._config.samples_ahead:
            trainer, pool = self._config.trainer, self._pool(-1)
            buffer = SampleBuffer(
                num_prompts=trainer.num_prompts_per_step, max_staleness=trainer.max_staleness
            )
            self._ahead = BackgroundSampling(
                self._policy,
                pool,
                self._make_program,
                buffer,
                requests=self._requests,
                recovery=self._recovery,
                on_update=self._config.serving.on_update,
            )
        for model in self._frozen.values():
            model.start()
        if self._ahead is not None:
            self._teaching.enter_context(self._teachers.opened())

    def need_weights(self, version: int) -> bool:
        """Return whether the engines of the policy lack them; lost ones get those of the others."""
        return self._policy.version != version

    def begin_update(self, version: int) -> Mapping[int, Receiver]:
        """Stop all engines of the policy for a broadcast, and return those that join, by index."""
        self._transfer.end(Sent(reason="another update begins"))
        self._transfer = transfer = Transfer()
        self._updating = self._thread.submit(self.update, transfer, version)
        either: list[Future[Any]] = [transfer.receivers, self._updating]
        wait(either, return_when=FIRST_COMPLETED)
        if not transfer.receivers.done():
            self._updating.result()  # raises, unless there is nothing to do
            return {}
        return transfer.receivers.result()

    def end_update(self, sent: Sent) -> None:
        """Let the engines serve what was sent; see ``ManagerClient.update``."""
        self._transfer.end(sent)
        self._updating.result()

    def update(self, source: WeightSource | Transfer, version: int) -> None:
        """Bring all engines of the policy to these weights; see ``ManagerClient.update``."""
        ahead, most = self._ahead, self._config.num_adapters
        if isinstance(source, AdaptedWeights) and ahead is not None:  # noqa: SIM102 - it is added
            if ahead.add_adapter(source, version=version, most=most):
                return
        with nullcontext() if ahead is None else ahead.updating(version):
            if self._router is not None:
                self._router.hide()
            self._policy.update(source, version=version)

    def sample(
        self, prompts: PromptBatch, sampling: SamplingParams, version: int, lent: Lent = NOBODY
    ) -> tuple[list[Sample], Metrics]:
        """Sample with all engines; see ``ManagerClient.sample``."""
        self._recovery.lend(lent.get(self._policy.model, ()))
        for name, frozen in self._frozen.items():
            frozen.recovery.lend(lent.get(name, ()))
        program = self._make_program(prompts, sampling)
        if self._ahead is not None:
            return self._ahead.run(program), {}
        pool = self._pool(version)
        engines = self._policy.serving_engines().values()

        # No method: Ray would run all methods of the actor in its own event loop.
        async def run() -> list[Sample]:
            async with self._requests.open(pool, engines, version=version) as pool.ask:
                return await program(pool)

        begin = time.perf_counter()
        watching = self._recovery.monitor.watching()
        with self._teachers.opened(), self._recovery.filling(pool), watching:
            samples = asyncio.run(run())
        seconds: Metrics = {"time/sample_s": Max(time.perf_counter() - begin)}
        return samples, merge([pool.take_metrics(), self._take_metrics()]) | seconds

    def exchange(
        self, prompts: PromptBatch | None, sampling: SamplingParams, version: int
    ) -> tuple[Answered, Metrics]:
        """Admit prompts, and wait for a batch; see ``ManagerClient.exchange``."""
        step = version // self._config.algorithm.num_updates_per_step
        answered, metrics = self._require_ahead().exchange(prompts, sampling, step=step)
        return answered, merge([metrics, self._take_metrics()])

    def begin_evaluation(self, tasks: Sequence[tuple[PromptBatch, SamplingParams]]) -> None:
        """Sample beside the next step; see ``ManagerClient.begin_evaluation``."""
        self._evaluated = [prompts for prompts, _ in tasks]
        programs = [self._make_program(*task) for task in tasks]
        self._require_ahead().begin_evaluation(programs)

    def end_evaluation(self) -> list[RolloutBatch]:
        """Wait for the responses; see ``ManagerClient.end_evaluation``."""
        answers = zip(self._evaluated, self._require_ahead().end_evaluation(), strict=True)
        version = self._policy.version
        return [leave_experts(assemble_rollouts(*each, policy_version=version)) for each in answers]

    def finished_groups(self) -> FinishedGroups:
        """Return the groups that wait for a step; see ``ManagerClient.finished_groups``."""
        return {} if self._ahead is None else self._ahead.finished_groups()

    def keep_groups(self, groups: FinishedGroups) -> None:
        """Take finished groups of a checkpoint; see ``ManagerClient.keep_groups``."""
        if self._ahead is not None:
            self._ahead.keep_groups(groups)

    def _require_ahead(self) -> BackgroundSampling:
        if self._ahead is None:
            raise PhaseError("trainer.max_staleness=0: nothing is sampled ahead")
        return self._ahead

    def _make_program(
        self, prompts: PromptBatch, sampling: SamplingParams
    ) -> Program[list[Sample]]:
        make = self._agent.program if self._agent else single_turn
        return self._teachers.taught(make, prompts, sampling)

    def _pool(self, version: int) -> EnginePool:
        pool = self._policy.pool(
            max_context_tokens=self._config.max_context_tokens,
            vocab_size=self._vocab_size,
            version=version,
        )
        if self._agent is not None and self._router is None:
            pool.prefixes = KnownPrefixes()
        return pool

    def _take_metrics(self) -> Metrics:
        """Describe the time since the last call, but of engines the phase before: they serve."""
        engines = self._policy.serving_engines().values()
        futures = [
            engine.act(ManagedEngine.take_metrics) for engine in engines if engine.is_alive()
        ]
        done, _ = wait(futures, timeout=self._config.rollout.stage_timeout_s)
        of_engines = [future.result() for future in done if future.exception() is None]
        of_agent = {} if self._agent is None else self._agent.take_metrics()
        of_requests = self._requests.take_metrics()
        return merge([self._recovery.take_metrics(), *of_engines, of_requests, of_agent])

    def profile(self, stem: Path | None) -> None:
        """Let the engines of the policy profile themselves; see ``ManagerClient.profile``."""
        self._policy.profile(stem)

    def lost_engines(self) -> Mapping[str, Collection[int]]:
        """Return, by model, the lost ones of those that were lent last, by their order."""
        of_frozen = {name: model.recovery.lost() for name, model in self._frozen.items()}
        return {self._policy.model: self._recovery.lost(), **of_frozen}

    def ask(
        self, model: str, contexts: Sequence[Tensor], params: RequestParams, timeout_s: float
    ) -> list[Answer]:
        """Answer contexts with a frozen model; see ``FrozenModel.ask``."""
        return self._frozen[model].ask(contexts, params, timeout_s=timeout_s)

    def shutdown(self) -> None:
        """End engines and tools."""
        self._transfer.end(Sent(reason="the run ends"))
        if self._ahead is not None:
            self._ahead.end()
        self._teaching.close()
        for model in self._frozen.values():
            model.shutdown()
        self._recovery.lend(())
        self._policy.shutdown()
        if self._router is not None:
            self._router.end()
        if self._agent is not None:
            self._agent.close()
        trace.process.end()
