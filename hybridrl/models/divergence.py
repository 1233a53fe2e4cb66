"""Divergence of a student's next-token distribution from a teacher's, and its gradient.

Legend: S scored tokens, C tokens of a chunk, K likeliest tokens of the teacher, J columns, V
vocabulary, E events that two distributions are compared on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

_LARGEST_SUM = -1e-7
"""nats; of K tokens together: float32 knows no probability nearer to 1. The rest is then taken for
1e-7, and one of 1e-6 is known to some percent."""


@dataclass(frozen=True, slots=True)
class TeacherTokens:
    """The likeliest tokens of a teacher at each of S positions."""

    logprobs_SK: Tensor  # float32 nats, of the distribution over the full vocabulary
    ids_SK: Tensor | None  # int32; None: K is the vocabulary, in its order

    @classmethod
    def of_columns(cls, columns_JS: Tensor, num_tokens: int) -> Self:
        """Read ``columns``: J is K, or 2 K with ids."""
        ids_SK = columns_JS[num_tokens:].T.int() if len(columns_JS) > num_tokens else None
        return cls(columns_JS[:num_tokens].T.contiguous(), ids_SK)

    def columns(self) -> Tensor:
        """Return one tensor, float32 [J, S], as engines compute it; float32 holds ids to 2^24."""
        ids = [] if self.ids_SK is None else [self.ids_SK.T.float()]
        return torch.cat([self.logprobs_SK.T, *ids])

    def __getitem__(self, index_S: Tensor | slice) -> Self:
        """Return those of some positions."""
        ids_SK = None if self.ids_SK is None else self.ids_SK[index_S]
        return type(self)(self.logprobs_SK[index_S], ids_SK)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares a student with a teacher, position by position.

    Events are the teacher's K likeliest tokens, and all others as one, whose probability is the
    rest. With K of V the divergence is the exact one; with fewer it is never larger than that.
    """

    teacher: TeacherTokens  # on the host, if it is large: a chunk at a time goes to the device
    beta: float

    def of_named(self, student_SK: Tensor) -> Tensor:
        """Return the divergences, float32 [S] nats, from log-probs of the teacher's tokens."""
        teacher_SK = self.teacher.logprobs_SK.to(student_SK.device)
        named = _with_others(teacher_SK), _with_others(student_SK)
        return generalized_jsd(*named, beta=self.beta)

    def divergences(self, chunk: slice, student_CV: Tensor) -> Tensor:
        """Return those of a chunk, [C], from the log-probs of all tokens, whose ids are None."""
        teacher_CV = self.teacher[chunk].logprobs_SK.to(student_CV.device)
        return generalized_jsd(teacher_CV, student_CV, beta=self.beta)

    def slopes(self, chunk: slice, student_CV: Tensor, grads_C: Tensor) -> Tensor:
        """Return the gradient of ``divergences`` at the logits behind the log-probs, [C, V]."""
        with torch.enable_grad():
            student_CV = student_CV.detach().requires_grad_()
            divergences_C = self.divergences(chunk, student_CV)
            (grads_CV,) = torch.autograd.grad(divergences_C, student_CV, grads_C)
        return grads_CV - student_CV.detach().exp().mul_(grads_CV.sum(dim=1, keepdim=True))


def generalized_jsd(teacher_CE: Tensor, student_CE: Tensor, *, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649, eq. 1), [C] nats.

    ``beta KL(teacher || M) + (1 - beta) KL(student || M)``, where M is the mixture
    ``beta teacher + (1 - beta) student``. At both ends that is 0, and the KL divergences which it
    approaches up to a factor are taken, as in TRL: ``beta=0`` is the forward one,
    ``KL(teacher || student)``, and ``beta=1`` the reverse one.

    Args:
        teacher_CE: log-probs of events, whose probabilities sum to 1.
        student_CE: likewise, of the same events.
    """
    if beta == 0.0:
        return _kl(teacher_CE, student_CE)
    if beta == 1.0:
        return _kl(student_CE, teacher_CE)
    mixture_CE = torch.logaddexp(teacher_CE + math.log(beta), student_CE + math.log1p(-beta))
    return beta * _kl(teacher_CE, mixture_CE) + (1 - beta) * _kl(student_CE, mixture_CE)


def _kl(from_CE: Tensor, to_CE: Tensor) -> Tensor:
    return (from_CE.exp() * (from_CE - to_CE)).sum(dim=1)


def _with_others(logprobs_CK: Tensor) -> Tensor:
    """Append the log-prob of all other tokens together, [C, K + 1]."""
    named_C1 = torch.logsumexp(logprobs_CK, dim=1, keepdim=True).clamp(max=_LARGEST_SUM)
    return torch.cat([logprobs_CK, torch.log(-torch.expm1(named_C1))], dim=1)
