"""This rank's stages of a decoder on megatron-core, from packed tokens to log-probs or values.

Legend: T packed tokens, S scored tokens, H hidden, D size of a head. With sequence parallelism a
rank has T divided by the tensor-parallel size of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from hybridrl.config.actor import ActorConfig, ModelKind
from hybridrl.models.architecture import Architecture
from hybridrl.models.load import WeightFiles
from hybridrl.models.logprobs import VocabShard
from hybridrl.models.packed_model import SCORES, Asked, PackedTokens, score_tokens
from hybridrl.planning.split import padded_vocabulary
from hybridrl.workers.train.backend import choose_kernel
from hybridrl.workers.train.megatron.architecture import Shapes, inverse_frequencies
from hybridrl.workers.train.megatron.checkpoint import load_weights
from hybridrl.workers.train.megatron.configuration import (
    log_warnings_once,
    token_multiple,
    transformer_config,
)
from hybridrl.workers.train.megatron.context import Duty, MegatronContext
from hybridrl.workers.train.megatron.layers import decoder_layers, mark_shards
from hybridrl.workers.train.megatron.lora import StageAdapter
from hybridrl.workers.train.megatron.megatron_core import (
    AttnBackend,
    ColumnParallelLinear,
    LanguageModelEmbedding,
    LanguageModule,
    ModelType,
    TransformerBlock,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_transformer_layer_offset,
    parallel_state,
)
from hybridrl.workers.train.megatron.parallel import Parallel, start_parallel
from hybridrl.workers.train.megatron.routing import LoadBalance, PackedRows, Routing
from hybridrl.workers.train.megatron.shard_map import ShardMap, global_name, is_of_adapter
from hybridrl.workers.train.microbatcher import MicroBatcher


class Stages:
    """The layers of this rank: one stage of a pipeline, or several virtual ones.

    Parameters have no values before ``fill``; until then they may move into other memory. The head
    of a reward model has a bias if that of the files has one.
    """

    models: list[PackedStage]  # in the order in which micro-batches go through them

    def __init__(
        self,
        architecture: Architecture,
        tensors: Shapes,
        *,
        config: ActorConfig,
        context: MegatronContext,
        duty: Duty,
        adapter: StageAdapter | None,
        kind: ModelKind = "policy",
    ) -> None:
        megatron, device = context.megatron, context.device
        self._config = config
        self._adapter = adapter
        self._kind = kind
        self.parallel = start_parallel(context)
        self.shard_map = ShardMap(architecture, self.parallel.rank, tensors)
        self.transformer = transformer_config(architecture, context, config, duty=duty)
        if dist.get_rank() == 0:
            log_warnings_once(megatron, device)
        num_virtual = megatron.num_virtual_stages
        self.batcher = MicroBatcher(
            kernel=choose_kernel(context.model.attention, config.compute_dtype, device)
            if self.transformer.attention_backend is AttnBackend.local
            else "varlen",
            max_tokens=config.max_tokens_per_microbatch,
            ranks=self.parallel.data,
            device=device,
            multiple=token_multiple(self.transformer),
            share=self.parallel.token_share,
            group_size=megatron.pipeline_parallel_size if num_virtual > 1 else 1,
        )
        self.models = [
            self._build(number).to(device)
            for number in (range(num_virtual) if num_virtual > 1 else [None])
        ]
        for model in self.models:
            mark_shards(model)

    def fill(self, folder: Path) -> None:
        """Give parameters their values from the Hugging Face folder of this architecture."""
        load_weights(dict(self.named_tensors()), WeightFiles(folder), self.shard_map)
        if self._adapter is not None:
            self._adapter.fill(self.adapter_tensors(), self.shard_map)

    def named_tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under megatron-core's names with global layer numbers."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield global_name(name, model.first_layer), parameter

    def model_tensors(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that a Hugging Face folder contains."""
        return {name: p for name, p in self.named_tensors() if not is_of_adapter(name)}

    def adapter_tensors(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters that an adapter's folder contains."""
        return {name: p for name, p in self.named_tensors() if is_of_adapter(name)}

    def _build(self, vp_stage: int | None) -> PackedStage:
        architecture = self.shard_map.architecture
        if self._kind != "policy":
            return CriticStage(
                self.transformer,
                architecture,
                self.parallel,
                vp_stage=vp_stage,
                has_bias=self._kind == "critic" or architecture.classifier == "token",
            )
        stage = PolicyStage(
            self.transformer,
            architecture,
            self.parallel,
            vp_stage=vp_stage,
            chunk_tokens=self._config.logprob_chunk_tokens,
        )
        if self._adapter is not None:
            stage.requires_grad_(requires_grad=False)
            self._adapter.inject(stage.decoder, stage.first_layer, self.shard_map)
        return stage


class PackedStage(LanguageModule):
    """The layers of one (virtual) pipeline stage; subclasses add the head of the last one.

    Parameters are named as in megatron-core's GPTModel. ``vp_stage`` is the number of the virtual
    stage on this rank; None where there is one stage.
    """

    model_type = ModelType.encoder_or_decoder  # megatron-core's schedules read it

    balance: LoadBalance | None  # None outside of an optimizer step, and in a dense model

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        parallel: Parallel,
        *,
        vp_stage: int | None,
        is_tied: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.architecture = architecture
        self.parallel = parallel
        self.vp_stage = vp_stage
        self.balance = None
        self.share_embeddings_and_output_weights = is_tied
        virtual = {"ignore_virtual": False, "vp_stage": vp_stage}
        self.pre_process = parallel_state.is_pipeline_first_stage(**virtual)
        self.post_process = parallel_state.is_pipeline_last_stage(**virtual)
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=padded_vocabulary(architecture.vocab_size, tp_size=parallel.tensor.size),
                max_sequence_length=architecture.max_positions,
                position_embedding_type="rope",
            )
        self.decoder = TransformerBlock(
            config=config,
            spec=decoder_layers(config, architecture, vp_stage=vp_stage),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        self.first_layer: int = get_transformer_layer_offset(config, vp_stage=vp_stage)
        self.inverse_frequencies = nn.Buffer(
            inverse_frequencies(architecture).to(parallel.device), persistent=False
        )

    def set_input_tensor(self, input_tensor: Sequence[Tensor | None]) -> None:
        """Take the output of the stage before; megatron-core's schedules call it."""
        self.decoder.set_input_tensor(input_tensor[0])

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        """Compute this stage's layers [T, 1, H]."""
        embedded_T1H = None
        if self.pre_process:
            embedded_T1H = self.embedding(input_ids=tokens.token_ids_T[None], position_ids=None)
            if self.config.recompute_granularity is not None and torch.is_grad_enabled():
                # Recomputed layers learn only if their input has a gradient. The output of a frozen
                # embedding has none.
                embedded_T1H.requires_grad_()
        angles_TD = tokens.positions_T[:, None] * self.inverse_frequencies
        hidden_T1H: Tensor = self.decoder(
            hidden_states=embedded_T1H,
            attention_mask=None,
            rotary_pos_emb=torch.cat([angles_TD, angles_TD], dim=1)[:, None, None],
            packed_seq_params=PackedRows(layout=tokens.layout, routing=self._route(tokens)),
        )
        return hidden_T1H

    def _route(self, tokens: PackedTokens) -> Routing | None:
        """Describe a micro-batch to the routers of this stage."""
        if self.architecture.experts is None:
            return None
        num_all = len(tokens.token_ids_T)
        begin, end = 0, num_all
        if self.config.sequence_parallel:  # ranks have equal parts of the tokens
            rank, size = self.parallel.tensor.rank, self.parallel.tensor.size
            begin, end = rank * num_all // size, (rank + 1) * num_all // size
        device, experts_TJK = self.parallel.device, tokens.experts_TJK
        if experts_TJK is not None:
            last_layer = self.first_layer + len(self.decoder.layers)
            experts_TJK = experts_TJK[begin:end, self.first_layer : last_layer].to(device)
        return Routing(
            is_real_T=torch.arange(begin, end, device=device) < num_all - tokens.num_padding,
            num_tokens=tokens.num_row_tokens,
            experts_TJK=experts_TJK,
            first_layer=self.first_layer,
            balance=self.balance,
        )

    def all_hidden(self, hidden_T1H: Tensor, *, is_shared: bool) -> Tensor:
        """Return the hidden states of all tokens [T, H] from those of this rank.

        ``is_shared`` is True if each tensor-parallel rank computes another part of the head: their
        gradients are summed. It is False if all compute the same.
        """
        if self.config.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=is_shared
            )
        return hidden_T1H[:, 0]


class PolicyStage(PackedStage):
    """A stage of a policy; the last one scores tokens."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        parallel: Parallel,
        *,
        vp_stage: int | None,
        chunk_tokens: int,
    ) -> None:
        is_tied = architecture.is_tied
        super().__init__(config, architecture, parallel, vp_stage=vp_stage, is_tied=is_tied)
        if self.post_process:
            self.output_layer = PolicyHead(
                config,
                architecture,
                parallel,
                chunk_tokens=chunk_tokens,
                has_weight=not (self.pre_process and is_tied),
            )
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()

    def forward(self, tokens: PackedTokens, temperature: float, asked: Asked = SCORES) -> Tensor:
        """Return hidden states, or on the last stage what ``PolicyModel`` does, [columns, S]."""
        hidden_T1H = self.hidden_states(tokens)
        if not self.post_process:
            return hidden_T1H
        hidden_SH = self.all_hidden(hidden_T1H, is_shared=True).index_select(0, tokens.scored_S)
        if not self.config.sequence_parallel:
            hidden_SH = copy_to_tensor_model_parallel_region(hidden_SH)
        tied = self.share_embeddings_and_output_weights
        columns: Tensor = self.output_layer(
            hidden_SH,
            *(tokens, temperature, asked),
            tied_weight=self.shared_embedding_or_output_weight() if tied else None,
        )
        return columns


class PolicyHead(ColumnParallelLinear):
    """The output embedding, whose rows the tensor-parallel ranks share.

    It never holds the logits of all tokens: see ``models/logprobs.py``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        parallel: Parallel,
        *,
        chunk_tokens: int,
        has_weight: bool,
    ) -> None:
        num_rows = padded_vocabulary(architecture.vocab_size, tp_size=parallel.tensor.size)
        config = copy(config)
        # Autograd gives this weight its gradient; megatron-core's own kernel for it is Apex's.
        config.gradient_accumulation_fusion = False
        super().__init__(
            config.hidden_size,
            num_rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=not has_weight,
        )
        self._chunk_tokens = chunk_tokens
        num_own_rows = num_rows // parallel.tensor.size
        begin = parallel.tensor.rank * num_own_rows
        self._num_rows = max(min(architecture.vocab_size - begin, num_own_rows), 0)
        self._shard = None
        if parallel.tensor.size > 1:
            self._shard = VocabShard(begin, self.tp_group)

    def forward(
        self,
        hidden_SH: Tensor,
        tokens: PackedTokens,
        temperature: float,
        asked: Asked,
        *,
        tied_weight: Tensor | None,
    ) -> Tensor:
        """Return columns on the device, float32 [columns, S]."""
        weight_VH = self.weight if tied_weight is None else tied_weight
        output = score_tokens(
            hidden_SH,
            weight_VH[: self._num_rows],  # without the padding of the vocabulary
            *(tokens, temperature, asked),
            chunk_tokens=self._chunk_tokens,
            shard=self._shard,
        )
        return output.to(hidden_SH.device) if isinstance(output, Tensor) else torch.stack(output)


class CriticStage(PackedStage):
    """A stage of a critic or of a reward model; the last one values states."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        parallel: Parallel,
        *,
        vp_stage: int | None,
        has_bias: bool = True,
    ) -> None:
        super().__init__(config, architecture, parallel, vp_stage=vp_stage)
        if self.post_process:
            self.score = ValueHead(config, parallel.device, has_bias=has_bias)

    def forward(self, tokens: PackedTokens) -> Tensor:
        """Return hidden states, or on the last stage the value of each scored state, [S]."""
        hidden_T1H = self.hidden_states(tokens)
        if not self.post_process:
            return hidden_T1H
        hidden_TH = self.all_hidden(hidden_T1H, is_shared=False)
        values_S: Tensor = self.score(hidden_TH.index_select(0, tokens.scored_S))
        return values_S


class ValueHead(nn.Module):
    """One number for each state; begins as zeros, and every tensor-parallel rank has all of it."""

    def __init__(
        self, config: TransformerConfig, device: torch.device, *, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        )
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, hidden_SH: Tensor) -> Tensor:
        """Return values, float32 [S] reward units."""
        bias = None if self.bias is None else self.bias.float()
        return linear(hidden_SH.float(), self.weight.float(), bias)[:, 0]
