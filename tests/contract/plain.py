"""The truth that engines are compared with: transformers and torch, one process, row by row.

Nothing of hybridrl's training is used here.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hybridrl.config.actor import OptimizerConfig

CLIP = 0.2
RESPONSE_CLIP = 0.05


class Plain:
    """A model with torch's AdamW; matrices decay, vectors do not."""

    def __init__(self, model: Any, optimizer: OptimizerConfig) -> None:
        self.model = model.eval()  # no dropout in any of them; the critic's class has one
        groups: dict[bool, list[Any]] = {True: [], False: []}
        for parameter in model.parameters():
            groups[parameter.ndim >= 2].append(parameter)
        self._adamw = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": optimizer.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def step(self, loss: Tensor) -> tuple[float, float]:
        """Take a step; return the loss and the norm of its gradient."""
        self._adamw.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        self._adamw.step()
        return loss.item(), norm.item()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights as they lie in files, whose names may differ from the module's."""
        with TemporaryDirectory() as scratch:
            self.model.save_pretrained(scratch)
            return weights_in(Path(scratch))


def weights_in(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {name: t.clone() for name, t in load_file(file).items()}
    return weights


class PlainPolicy(Plain):
    """A policy; columns are flat over a batch's tokens, 0 where there is no response."""

    def __init__(self, folder: Path, optimizer: OptimizerConfig) -> None:
        super().__init__(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), optimizer)

    def score(self, batch: Any, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, both [sum of L], with gradient."""
        logprobs, entropies = [], []
        masks = None
        if getattr(batch, "mask_counts_BL", None) is not None:  # pairs have none
            masks = iter(batch.mask_ids_BM.values().split(batch.mask_counts_BL.values().tolist()))
        columns = (batch.token_ids_BL, batch.response_mask_BL)
        for tokens, mask in zip(*(column.unbind() for column in columns), strict=True):
            logits = self.model(tokens[None]).logits[0, :-1] / temperature
            if masks is not None:
                for position, ids in enumerate(itertools.islice(masks, len(tokens)), -1):
                    if len(ids):  # of a sampled token, before which these were left
                        is_out = torch.ones(logits.shape[1], dtype=torch.bool)
                        is_out[ids.long()] = False
                        logits[position, is_out] = -1e30
            all_logprobs = torch.log_softmax(logits, dim=-1)
            chosen = all_logprobs.gather(1, tokens[1:, None])[:, 0]
            entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            nothing = torch.zeros(1)
            logprobs.append(torch.cat([nothing, chosen]) * mask)
            entropies.append(torch.cat([nothing, entropy]) * mask)
        return torch.cat(logprobs), torch.cat(entropies)

    def update(
        self,
        batch: Any,
        *,
        temperature: float,
        aggregation: str,
        entropy_coefficient: float,
        clips_responses: bool = False,
    ) -> tuple[float, float]:
        """Take a step of PPO's clipped surrogate (arXiv:1707.06347, 7) with an entropy bonus.

        With ``clips_responses`` the ratio is GSPO's, of whole responses (arXiv:2507.18071).
        """
        logprobs, entropies = self.score(batch, temperature=temperature)
        old = logprobs.detach()
        if batch.old_logprobs_BL is not None:
            old = batch.old_logprobs_BL.values()
        log_ratio, clip = logprobs - old, CLIP
        if clips_responses:
            log_ratio, clip = _means_of_rows(log_ratio, batch.response_mask_BL), RESPONSE_CLIP
        ratio, gains = log_ratio.exp(), batch.advantages_BL.values()
        surrogate = torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
        weights = _token_weights(batch.response_mask_BL, aggregation)
        return self.step(-((surrogate + entropy_coefficient * entropies) * weights).sum())

    def fit(self, batch: Any) -> tuple[float, float]:
        logprobs, _ = self.score(batch, temperature=1.0)
        return self.step(-logprobs.sum() / batch.response_mask_BL.values().sum())

    def prefer(self, batch: Any, *, beta: float, sft_coefficient: float) -> tuple[float, float]:
        """Take a step of DPO (arXiv:2305.18290, 7) on rows 2i, chosen, and 2i + 1, rejected."""
        logprobs, _ = self.score(batch, temperature=1.0)
        masks = batch.response_mask_BL.unbind()
        rows = logprobs.split([len(mask) for mask in masks])
        losses = []
        for at in range(0, len(rows), 2):
            chosen, rejected = (rows[at + n].sum() for n in (0, 1))
            reference = batch.reference_logprobs_B[at] - batch.reference_logprobs_B[at + 1]
            margin = beta * (chosen - rejected - reference)
            losses.append(torch.log1p(torch.exp(-margin)))
            losses[-1] = losses[-1] - sft_coefficient * chosen / masks[at].sum()
        return self.step(torch.stack(losses).mean())


class PlainCritic(Plain):
    def __init__(self, folder: Path, optimizer: OptimizerConfig) -> None:
        model = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, dtype="float32"
        )
        torch.nn.init.zeros_(model.score.weight)
        torch.nn.init.zeros_(model.score.bias)
        super().__init__(model, optimizer)

    def values(self, batch: Any) -> Tensor:
        values = []
        columns = (batch.token_ids_BL, batch.response_mask_BL)
        for tokens, mask in zip(*(column.unbind() for column in columns), strict=True):
            before = self.model(tokens[None]).logits[0, :-1, 0]
            values.append(torch.cat([torch.zeros(1), before]) * mask)
        return torch.cat(values)

    def update(
        self, batch: Any, *, aggregation: str, value_clip: float = 0.0
    ) -> tuple[float, float]:
        """Take a step on half the squared error of response tokens.

        With ``value_clip`` it is the larger one of the value and of one so near to the old one.
        """
        values, returns = self.values(batch), batch.returns_BL.values()
        errors = (values - returns).square()
        if value_clip:
            old = batch.old_values_BL.values()
            near = old + (values - old).clamp(-value_clip, value_clip)
            errors = torch.maximum(errors, (near - returns).square())
        weights = _token_weights(batch.response_mask_BL, aggregation)
        return self.step((errors * weights).sum() / 2)


def _means_of_rows(values: Tensor, mask_BL: Tensor) -> Tensor:
    masks = mask_BL.unbind()
    rows = values.split([len(mask) for mask in masks])
    return torch.cat(
        [
            ((row * mask).sum() / mask.sum()).expand(len(mask))
            for row, mask in zip(rows, masks, strict=True)
        ]
    )


def _token_weights(mask_BL: Tensor, aggregation: str) -> Tensor:
    masks = [mask.float() for mask in mask_BL.unbind()]
    if aggregation == "token_mean":
        return torch.cat(masks) / torch.cat(masks).sum()
    if aggregation == "prompt_mean_token_mean":
        groups = [torch.cat(masks[at : at + 4]) for at in range(0, len(masks), 4)]
        return torch.cat([group / group.sum() for group in groups]) / len(groups)
    assert aggregation == "sequence_mean_token_mean"
    return torch.cat([mask / mask.sum() for mask in masks]) / len(masks)


class PlainRewardModel(Plain):
    """A reward model, and the loss of TRL's RewardTrainer, written anew."""

    def __init__(self, folder: Path, optimizer: OptimizerConfig) -> None:
        loaded = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype="float32"
        )
        if "score.weight" not in weights_in(folder):
            torch.nn.init.zeros_(loaded.score.weight)
        super().__init__(loaded, optimizer)

    def scores(self, rows: list[list[int]]) -> Tensor:
        return torch.stack([self.model(torch.tensor([row])).logits[0, 0] for row in rows])

    def update(
        self, rows: list[list[int]], *, center_coefficient: float, margins: list[float]
    ) -> tuple[float, float]:
        """Take a step on pairs, chosen before rejected; return loss and norm of its gradient."""
        chosen, rejected = self.scores(rows).view(-1, 2).unbind(dim=1)
        loss = torch.log1p(torch.exp(rejected + torch.tensor(margins) - chosen)).mean()
        loss = loss + center_coefficient * ((chosen + rejected) ** 2).mean()
        return self.step(loss)
