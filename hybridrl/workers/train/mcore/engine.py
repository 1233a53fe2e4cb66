"""The policy's training engines on megatron-core: the one that learns, and the reference.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from hybridrl.batch import RolloutBatch, ScoreBatch, SupervisedBatch, TrainBatch
from hybridrl.config.actor import ActorConfig
from hybridrl.metrics import Metrics
from hybridrl.workers.train.mcore.architecture import Architecture
from hybridrl.workers.train.mcore.learner import StagedLearner
from hybridrl.workers.train.mcore.megatron_core import TransformerConfig
from hybridrl.workers.train.mcore.model import PolicyStage
from hybridrl.workers.train.mcore.parallel import Parallel
from hybridrl.workers.train.mcore.routing import require_routes
from hybridrl.workers.train.mcore.setting import MegatronContext
from hybridrl.workers.train.mcore.stages import BuildStage, StagedModel
from hybridrl.workers.train.packing import Pack
from hybridrl.workers.train.policy_engine import LearningPolicy
from hybridrl.workers.train.policy_rows import count_pack, loss_inputs
from hybridrl.workers.train.protocol import TokenLoss, TrainState, WeightSet

Adapt = Callable[[PolicyStage], None]
"""Changes a stage that has no values yet."""


class _ScoresTokens(StagedModel):
    """What a policy that learns and one that does not have in common."""

    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch, *, temperature: float
    ) -> ScoreBatch:
        """Score this rank's rows; see ``ScoringEngine.compute_logprobs``. Values lie on the host.

        Temperature divides the logits. Both columns are 0 where the mask is False.
        """
        self._require("compute_logprobs()", TrainState.PARAMETERS)

        def forward(stage: nn.Module, pack: Pack) -> Tensor:
            scores: Tensor = stage(pack.tokens, temperature)
            return scores

        logprobs_BL, entropy_BL = self.compute_rows(
            rows.token_ids_BL,
            rows.response_mask_BL,
            forward,
            num_columns=2,
            routed_experts_BLJK=self._routes(rows),
        )
        return ScoreBatch(
            logprobs_BL=logprobs_BL, entropy_BL=entropy_BL, batch_size=rows.batch_size
        )

    def _routes(self, _rows: RolloutBatch | TrainBatch | SupervisedBatch) -> Tensor | None:
        """Return the experts that tokens are to go through; None leaves it to the model."""
        return None


class MegatronScorer(_ScoresTokens):
    """A policy that scores tokens and does not learn, as the reference; a ``ScoringEngine``.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size.
        setting: parallel sizes and device.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: see ``StagedModel``.
    """

    def __init__(
        self, model_folder: Path, *, config: ActorConfig, setting: MegatronContext
    ) -> None:
        super().__init__(model_folder, _policy_stages(config), config=config, setting=setting)


class MegatronEngine(LearningPolicy, _ScoresTokens, StagedLearner):
    """The policy with its optimizer; a ``TrainEngine``.

    Args:
        model_folder: Hugging Face folder.
        config: types, token budget, chunk size, optimizer.
        setting: parallel sizes and device.
        num_total_steps: optimizer steps of the run, where the schedule ends.
        adapt: changes a stage before it is loaded; what it freezes does not learn.

    Raises:
        ModelError: the folder is not usable.
        ConfigError: see ``StagedModel``.
    """

    weight_parts: tuple[WeightSet, ...] = (WeightSet.BASE,)
    """Passes of a weight sync; see ``TrainEngine.weight_parts``."""

    def __init__(
        self,
        model_folder: Path,
        *,
        config: ActorConfig,
        setting: MegatronContext,
        num_total_steps: int,
        adapt: Adapt | None = None,
    ) -> None:
        StagedLearner.__init__(
            self,
            model_folder,
            _policy_stages(config, adapt),
            config=config,
            setting=setting,
            num_total_steps=num_total_steps,
            area="policy",
        )

    def update(
        self,
        batch: TrainBatch,
        *,
        loss: TokenLoss,
        aggregation: str,
        temperature: float,
        max_response_tokens: int,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows; see ``TrainEngine.update``."""
        self._require("update()", *TrainState)

        def forward(stage: nn.Module, pack: Pack) -> Tensor:
            scores: Tensor = stage(
                pack.tokens, temperature, needs_entropy_gradient=loss.needs_entropy_gradient
            )
            return scores

        def loss_share(pack: Pack, scores_2S: Tensor, weights_S: Tensor) -> tuple[Tensor, Metrics]:
            logprobs_S, entropy_S = scores_2S
            inputs = loss_inputs(
                batch,
                pack,
                weights_S=weights_S,
                current_logprobs_S=logprobs_S,
                entropy_S=entropy_S if loss.needs_entropy_gradient else entropy_S.detach(),
            )
            share, metrics = loss(inputs)
            return share, metrics | (count_pack(pack) if self.leads else {})

        return self._take_step(
            self._packing.cut(
                batch.token_ids_BL,
                batch.response_mask_BL,
                routed_experts_BLJK=self._routes(batch),
            ),
            forward,
            loss_share,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )

    def _routes(self, rows: RolloutBatch | TrainBatch | SupervisedBatch) -> Tensor | None:
        if not self._parallel.config.replay_routing:
            return None
        if isinstance(rows, SupervisedBatch):
            return require_routes(None, self._architecture)
        return require_routes(rows.routed_experts_BLJK, self._architecture)


def _policy_stages(config: ActorConfig, adapt: Adapt | None = None) -> BuildStage:
    def build(
        transformer: TransformerConfig,
        architecture: Architecture,
        parallel: Parallel,
        vp_stage: int | None,
    ) -> PolicyStage:
        stage = PolicyStage(
            transformer,
            architecture,
            parallel=parallel,
            vp_stage=vp_stage,
            chunk_tokens=config.logprob_chunk_tokens,
        )
        if adapt is not None:
            adapt(stage)
        return stage

    return build
