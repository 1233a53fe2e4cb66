"""The policy on any training back end: scores tokens, learns from rollouts and from examples.

Legend: B rows of a batch, L tokens of a row, S scored (response) tokens.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from hybridrl.algorithms.aggregate import sequence_mean_token_sum
from hybridrl.algorithms.load import Part
from hybridrl.batch import (
    PreferenceBatch,
    RolloutBatch,
    ScoreBatch,
    SupervisedBatch,
    TrainBatch,
    row_offsets,
)
from hybridrl.errors import ModelError
from hybridrl.metrics import Max, Metrics
from hybridrl.models.packed_model import SCORES, Asked, PackedTokens
from hybridrl.workers.train.backend import Backend, Compute, Output
from hybridrl.workers.train.collectives import Ranks
from hybridrl.workers.train.export import write_adapter_folder
from hybridrl.workers.train.losses import (
    PairValues,
    PolicyGradientLoss,
    PreferenceObjective,
    loss_of_microbatch,
    supervised_loss,
)
from hybridrl.workers.train.microbatcher import MicroBatch
from hybridrl.workers.train.model_engine import ModelEngine
from hybridrl.workers.train.protocol import TokenLossInputs, TrainState, WeightSet

_ROW_MEAN = Part.of(sequence_mean_token_sum)  # rows weigh the same, however long they are


class PolicyEngine(ModelEngine):
    """A language model that scores tokens and, unless it is a reference, learns."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend, area="policy")
        self.weight_sets = backend.weight_sets
        self._constants: Metrics = {}
        if backend.adapter is not None:
            specs = backend.weight_specs(WeightSet.ADAPTER)
            num_trained = sum(math.prod(spec.shape) for spec in specs)
            self._constants = {"policy/trained_parameters": Max(num_trained)}

    def compute_logprobs(
        self,
        rows: RolloutBatch | SupervisedBatch | PreferenceBatch,
        *,
        temperature: float,
        use_adapter: bool = True,
    ) -> ScoreBatch:
        """Score this rank's rows with the current weights, without gradient; values on the host.

        Temperature divides the logits. Both columns are 0 where the mask is False. Without its
        adapter the model is the loaded one.
        """
        self._require("compute_logprobs()", TrainState.PARAMETERS)
        compute = scores_at(temperature)
        with nullcontext() if use_adapter else self.backend.without_adapter():
            logprobs_BL, entropy_BL = self._compute_columns(rows, compute, num_columns=2)
        return ScoreBatch(
            logprobs_BL=logprobs_BL, entropy_BL=entropy_BL, batch_size=rows.batch_size
        )

    def top_logprobs(
        self,
        rows: TrainBatch,
        *,
        num_tokens: int,
        vocab_size: int,
        temperature: float,
        use_adapter: bool = True,
    ) -> Tensor:
        """Return the likeliest tokens as columns of ``TeacherTokens``, [J, tokens of all rows].

        Without gradient, on the host, 0 where the mask is False. See ``compute_logprobs``.
        """
        self._require("top_logprobs()", TrainState.PARAMETERS)

        compute = scores_at(temperature, Asked(num_likeliest=num_tokens))
        num_columns = num_tokens if num_tokens == vocab_size else 2 * num_tokens
        microbatches = self.backend.microbatches(rows)
        with nullcontext() if use_adapter else self.backend.without_adapter():
            return self.backend.forward(microbatches, compute, num_columns=num_columns)

    def update(
        self,
        batch: TrainBatch,
        *,
        loss: PolicyGradientLoss,
        aggregation: Part,
        temperature: float,
        max_response_tokens: int,
        beta: float = 0.0,
    ) -> Metrics:
        """Take one optimizer step on the union of all ranks' rows, or skip it.

        ``beta`` is that of the divergence from a teacher, of rows with its likeliest tokens.
        """

        def weighted_loss(
            microbatch: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            logprobs_S, entropy_S, *divergences = output
            index_S, offsets = microbatch.token_index_S, row_offsets(batch.token_ids_BL)
            positions_S = index_S - offsets[torch.searchsorted(offsets, index_S, right=True) - 1]

            def at_scored(column_BL: Tensor) -> Tensor:
                return column_BL.values()[index_S].to(logprobs_S.device)

            old_BL, reference_BL = batch.old_logprobs_BL, batch.reference_logprobs_BL
            weights_BL, versions_BL = batch.sampler_weights_BL, batch.weight_versions_BL
            inputs = TokenLossInputs(
                current_logprobs_T=logprobs_S,
                entropy_T=entropy_S if loss.needs_entropy_gradient else entropy_S.detach(),
                weights_T=weights_S,
                advantages_T=at_scored(batch.advantages_BL),
                sampler_logprobs_T=at_scored(batch.sampler_logprobs_BL),
                old_logprobs_T=logprobs_S.detach() if old_BL is None else at_scored(old_BL),
                reference_logprobs_T=None if reference_BL is None else at_scored(reference_BL),
                rows=microbatch.rows,
                positions_T=positions_S.to(logprobs_S.device),
                sampler_weights_T=None if weights_BL is None else at_scored(weights_BL),
                weight_versions_T=None if versions_BL is None else at_scored(versions_BL),
                divergences_T=divergences[0] if divergences else None,
            )
            return loss(inputs)

        return self._take_step(
            batch,
            scores_at(
                temperature, Asked(needs_entropy_gradient=loss.needs_entropy_gradient, beta=beta)
            ),
            weighted_loss,
            aggregation=aggregation,
            max_response_tokens=max_response_tokens,
        )

    def fit(self, batch: SupervisedBatch) -> Metrics:
        """Take one optimizer step on the mean negative log-likelihood of the masked tokens."""

        def weighted_loss(
            _: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            logprobs_S, _entropy_S = output
            return supervised_loss(logprobs_S, weights_S)

        return self._take_step(batch, scores_at(1.0), weighted_loss)

    def fit_pairs(self, batch: PreferenceBatch, objective: PreferenceObjective) -> Metrics:
        """Take one optimizer step on the mean loss of all ranks' pairs, or skip it."""
        reference_B = batch.reference_logprobs_B

        def loss_of(sums_P2: Tensor, lengths_P2: Tensor, index_P: Tensor) -> PairValues:
            reference_P2 = None
            if reference_B is not None:
                reference_P2 = reference_B.to(sums_P2).view(-1, 2)[index_P]
            return objective(sums_P2, reference_P2, lengths_P2)

        def weighted_loss(
            microbatch: MicroBatch, output: Output, weights_S: Tensor
        ) -> tuple[Tensor, Metrics]:
            logprobs_S, _ = output
            return loss_of_microbatch(microbatch, logprobs_S, weights_S, loss_of)

        return self._take_step(batch, scores_at(1.0), weighted_loss, aggregation=_ROW_MEAN)

    def export_adapter(self, folder: Path) -> None:
        """Write a peft folder, atomically; see ``write_adapter_folder``."""
        if self.backend.adapter is None:
            raise ModelError(
                f"cannot write {folder}: the policy has no adapter; export the full model, or "
                "train with lora.enabled=true"
            )
        # At once: rank 0 would wait for ranks that meet the error when they gather.
        self._require("export_adapter()", TrainState.PARAMETERS)
        write_adapter_folder(
            folder,
            self.full_weights(WeightSet.ADAPTER),
            adapter=self.backend.adapter,
            base_model=self.backend.folder,
            ranks=Ranks(self.backend.device),
        )

    def _model_metrics(self, metrics: Metrics) -> Metrics:
        return self._constants | metrics


class BaseModelReference:
    """A policy without its adapter, as its own reference: it has no memory of its own."""

    def __init__(self, policy: PolicyEngine) -> None:
        self._policy = policy

    def compute_logprobs(
        self, rows: RolloutBatch | SupervisedBatch | PreferenceBatch, *, temperature: float
    ) -> ScoreBatch:
        """See ``PolicyEngine``."""
        return self._policy.compute_logprobs(rows, temperature=temperature, use_adapter=False)

    def top_logprobs(
        self, rows: TrainBatch, *, num_tokens: int, vocab_size: int, temperature: float
    ) -> Tensor:
        """See ``PolicyEngine``."""
        return self._policy.top_logprobs(
            rows,
            num_tokens=num_tokens,
            vocab_size=vocab_size,
            temperature=temperature,
            use_adapter=False,
        )


def scores_at(temperature: float, asked: Asked = SCORES) -> Compute:
    """Return the function that scores tokens, or what else is asked of the head."""

    def compute(model: nn.Module, tokens: PackedTokens) -> Output:
        output: Output = model(tokens, temperature, asked)
        return output

    return compute
