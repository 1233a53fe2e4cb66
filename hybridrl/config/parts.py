"""The parts of a run: functions that the configuration names, most of them of the algorithm.

A part is found by its name in the tables below, or by ``path/to/file.py:function``. Both are read
from their source, so that no check needs torch. ``algorithms/load.py`` imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import hybridrl
from hybridrl.config.limits import ArgumentValue
from hybridrl.config.paths import flaw_of_file
from hybridrl.config.signatures import Signature, SignatureError, read_signature
from hybridrl.errors import suggest_name

_PACKAGE = Path(hybridrl.__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class PartKind:
    """One kind of part."""

    noun: str
    """As messages call it."""

    key: str
    """Dotted key that names it."""

    args_key: str | None
    """Dotted key that holds its numbers; None if parts of this kind have none."""

    built_in: Mapping[str, str]
    """Module below ``hybridrl.algorithms``, by name of the function in it."""

    inputs: frozenset[str]
    """Inputs that a part may name; docs/how-to/algorithm.md describes them."""

    presets: Mapping[str, tuple[str, Mapping[str, ArgumentValue]]] = field(default_factory=dict)
    """By a name of verl: the built-in part, and its numbers."""

    def read(self, spelled: str) -> Signature:
        """Read the signature of the part that a user named.

        Raises:
            SignatureError: there is no such part, or it asks for inputs that nobody has.
        """
        if spelled in self.presets:
            spelled, _ = self.presets[spelled]
        if spelled in self.built_in:
            return _read_built_in(self.built_in[spelled], spelled)
        path, colon, name = spelled.rpartition(":")
        if not colon:
            rule = f"neither a built-in {self.noun} nor path/to/file.py:function"
            names = [*self.built_in, *self.presets]
            raise SignatureError(rule, suggest_name(spelled, names))
        if flaw := flaw_of_file(path):
            raise SignatureError(flaw, "correct it; the form is path/to/file.py:function")
        signature = read_signature(Path(path), name)
        if unknown := [given for given in signature.inputs if given not in self.inputs]:
            rule = f"{name} asks for {unknown[0]}, and no {self.noun} gets it"
            fix = f"name some of {', '.join(sorted(self.inputs))}; put numbers after a single *"
            raise SignatureError(rule, fix)
        return signature

    def reads(self, spelled: str, name: str) -> bool:
        """Return whether a part asks for an input; False for a part that cannot be read."""
        try:
            return name in self.read(spelled).inputs
        except SignatureError:
            return False


def absolute(spelled: str) -> str:
    """Return the name of a part with the absolute path of its file, if it has one."""
    path, colon, name = spelled.rpartition(":")
    return f"{Path(path).absolute()}:{name}" if colon else spelled


@cache
def _read_built_in(module: str, name: str) -> Signature:
    return read_signature(_PACKAGE / "algorithms" / f"{module.replace('.', '/')}.py", name)


def _by_name(modules: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each function, from names separated by spaces by module."""
    return {name: module for module, names in modules.items() for name in names.split()}


ADVANTAGE = PartKind(
    noun="advantage",
    key="algorithm.advantage",
    args_key="algorithm.advantage_args",
    built_in=_by_name(
        {
            "advantages.grpo": "grpo grpo_passk",
            "advantages.rloo": "rloo",
            "advantages.gae": "gae",
            "advantages.bi_level_gae": "bi_level_gae",
            "advantages.turns": "turn_grpo turn_reinforce",
            "advantages.reinforce": "reinforce reinforce_plus_plus reinforce_plus_plus_baseline",
            "advantages.remax": "remax",
            "advantages.gpg": "gpg",
            "advantages.opo": "opo",
            "advantages.optimal_token_baseline": "optimal_token_baseline",
            "advantages.gdpo": "gdpo",
            "advantages.opmd": "opmd",
            "advantages.distillation": "distillation",
        }
    ),
    inputs=frozenset(
        {
            *("rewards_B", "rewards_BL", "group_B", "response_mask_BL"),
            *("old_logprobs_BL", "reference_logprobs_BL", "sampler_logprobs_BL"),
            *("values_BL", "greedy_rewards_B", "teacher_logprobs_BL", "squared_probs_BL"),
            *("reward_parts_BK", "reward_weights_K"),
        }
    ),
)

POLICY_LOSS = PartKind(
    noun="policy loss",
    key="algorithm.policy_loss",
    args_key="algorithm.policy_loss_args",
    built_in=_by_name(
        {
            "policy_losses.ppo": "ppo_clip",
            "policy_losses.sequence": "gspo rloo_clip gmpo vespo",
            "policy_losses.reinforce": "reinforce cispo sapo dro",
            "policy_losses.divergence": "dppo_tv dppo_kl",
            "policy_losses.covariance": "clip_cov kl_cov",
        }
    ),
    inputs=frozenset(
        {
            *("current_logprobs_T", "old_logprobs_T", "sampler_logprobs_T"),
            *("advantages_T", "entropy_T", "rows"),
        }
    ),
)

AGGREGATION = PartKind(
    noun="aggregation",
    key="algorithm.loss_aggregation",
    args_key=None,
    built_in=_by_name(
        {
            "aggregate": "token_mean token_sum sequence_mean_token_mean sequence_mean_token_sum "
            "sequence_mean_fixed_length prompt_mean_token_mean"
        }
    ),
    inputs=frozenset(
        {
            *("response_lengths_B", "num_tokens_global", "num_sequences_global"),
            *("max_response_tokens", "group_tokens_B", "num_prompts_global"),
        }
    ),
)

KL = PartKind(
    noun="KL estimator",
    key="algorithm.kl.estimator",
    args_key=None,
    built_in=_by_name({"kl": "k1 k2 k3 absolute"}),
    inputs=frozenset({"logprobs_T", "reference_logprobs_T"}),
)

TOKEN_MASK = PartKind(
    noun="token mask",
    key="algorithm.token_mask",
    args_key="algorithm.token_mask_args",
    built_in=_by_name({"token_masks": "off_policy_mask top_entropy_mask"}),
    inputs=POLICY_LOSS.inputs,
)

_GEOMETRIC = "0.999 <= seq_mean_k1 <= 1.001"
_K3 = "seq_mean_k3 <= 0.01"

ROLLOUT_CORRECTION = PartKind(
    noun="rollout correction",
    key="algorithm.rollout_correction",
    args_key="algorithm.rollout_correction_args",
    built_in=_by_name({"rollout_correction": "importance"}),
    inputs=frozenset({"old_logprobs_T", "sampler_logprobs_T", "rows"}),
    presets={
        "decoupled_token_is": ("importance", {"level": "token"}),
        "decoupled_seq_is": ("importance", {"level": "sequence"}),
        "decoupled_token_icepop": (
            "importance",
            {"level": "token", "outside": "mask", "low": 0.5, "high": 5.0},
        ),
        "decoupled_seq_is_rs": (
            "importance",
            {"level": "sequence", "reject": "0.5 <= seq_sum_k1 <= 2"},
        ),
        "decoupled_geo_rs": ("importance", {"level": "none", "reject": _GEOMETRIC}),
        "decoupled_geo_rs_seq_tis": ("importance", {"level": "sequence", "reject": _GEOMETRIC}),
        "decoupled_geo_rs_token_tis": ("importance", {"level": "token", "reject": _GEOMETRIC}),
        "decoupled_k3_rs": ("importance", {"level": "none", "reject": _K3}),
        "decoupled_k3_rs_seq_tis": ("importance", {"level": "sequence", "reject": _K3}),
        "decoupled_k3_rs_token_tis": ("importance", {"level": "token", "reject": _K3}),
    },
)

GROUP_FILTER = PartKind(
    noun="group filter",
    key="algorithm.group_filter",
    args_key="algorithm.group_filter_args",
    built_in=_by_name({"group_filter": "zero_variance mean_within"}),
    inputs=frozenset({"rewards_B", "group_B"}),
)

ROW_FILTER = PartKind(
    noun="row filter",
    key="algorithm.row_filter",
    args_key="algorithm.row_filter_args",
    built_in={},
    inputs=frozenset(
        {
            *("rewards_B", "group_B", "response_lengths_B", "is_truncated_B"),
            *("token_ids_BL", "response_mask_BL", "sampler_logprobs_BL"),
        }
    ),
)

PREFERENCE_LOSS = PartKind(
    noun="preference loss",
    key="dpo.loss",
    args_key="dpo.loss_args",
    built_in=_by_name(
        {
            "preference_losses": "sigmoid robust hinge ipo sigmoid_norm exo_pair nca_pair "
            "sppo_hard apo_zero apo_down simpo orpo"
        }
    ),
    inputs=frozenset(
        {
            *("chosen_logprobs_P", "rejected_logprobs_P"),
            *("chosen_logratios_P", "rejected_logratios_P"),
            *("chosen_lengths_P", "rejected_lengths_P"),
        }
    ),
)

METRICS_FUNCTION = PartKind(
    noun="function of metrics",
    key="tracking.function",
    args_key=None,
    built_in={},
    inputs=frozenset({"step", "metrics"}),
)

KINDS = (
    ADVANTAGE,
    POLICY_LOSS,
    TOKEN_MASK,
    AGGREGATION,
    KL,
    ROLLOUT_CORRECTION,
    GROUP_FILTER,
    ROW_FILTER,
    PREFERENCE_LOSS,
    METRICS_FUNCTION,
)
