"""The whole configuration of one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridrl.config.actor import ActorConfig
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.cluster import ClusterConfig
from hybridrl.config.data import DataConfig
from hybridrl.config.eval import EvalConfig
from hybridrl.config.limits import CountOrZero
from hybridrl.config.lora import LoraConfig
from hybridrl.config.model import ModelConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.sft import SftConfig
from hybridrl.config.tracking import TrackingConfig
from hybridrl.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """Mirrors hydra_configs/config.yaml: one field per section."""

    mode: Literal["train", "check", "sft"]
    """``train`` runs reinforcement learning, ``sft`` supervised fine-tuning, ``check`` validates
    and starts nothing."""

    seed: CountOrZero
    """All randomness of the run derives from it: model init, data order, sampling."""

    model: ModelConfig
    """Weights and tokenizer that the run starts from."""

    actor: ActorConfig
    """How the policy is trained."""

    lora: LoraConfig
    """Adapters instead of the whole model."""

    rollout: RolloutConfig
    """How responses are sampled."""

    algorithm: AlgorithmConfig
    """What is optimised."""

    data: DataConfig
    """Where prompts come from."""

    reward: RewardConfig
    """How responses are scored."""

    cluster: ClusterConfig
    """Machines and processes."""

    trainer: TrainerConfig
    """The driver's loop."""

    eval: EvalConfig
    """Evaluation on held-out prompts."""

    sft: SftConfig
    """Supervised fine-tuning."""

    tracking: TrackingConfig
    """Where metrics go."""

    @property
    def num_rows_per_step(self) -> int:
        """Responses B = P x G that one step samples."""
        return self.trainer.num_prompts_per_step * self.rollout.num_responses_per_prompt

    @property
    def max_row_tokens(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens
