"""Sequences that begin alike form trees: what several begin with is computed once.

In lexicographic order each sequence shares most with its neighbours. So the tokens that neighbours
share say all: two sequences begin with as many as the fewest between them.

Legend: N tokens of all rows, J layers with experts, K experts that a token goes through, L tokens
that two sequences may share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from torch.nn.functional import pad

_LEAST_TOKENS = 64
"""A shared prefix ends where a prompt does, or so many tokens later: fewer are not worth attention
to one more segment. Responses to a prompt often begin with the same few words."""


@dataclass(frozen=True, slots=True)
class BatchSequence:
    """A sequence with a response."""

    row: int  # of the batch
    begin: int  # its first token among the flat values
    num_tokens: int  # tokens that are computed: all but the last
    num_prompt_tokens: int  # tokens before the first response token
    tree: bytes  # sequences of different trees share nothing


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences that are laid out together, all with the same first tokens."""

    num_shared: int
    """Those tokens. A sequence that shares none is a tree by itself, and this its length."""

    branches: dict[int, int]
    """How many tokens each sequence, by its number, shares with the one before it; the first one
    ``num_shared``."""

    members: list[int]
    """The numbers in the given order."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Which tokens the sequences of a batch share."""

    place: Mapping[int, int]
    """Of each sequence in the lexicographic order."""

    shared: Sequence[int]
    """By place: first tokens that a sequence shares with the one before it."""

    @classmethod
    def of(
        cls,
        sequences: Mapping[int, BatchSequence],
        marked_N: Tensor,
        experts_NJK: Tensor | None,
    ) -> SharedPrefixes:
        """Compare the sequences of a batch.

        Args:
            sequences: by number.
            marked_N: int64, token ids, of images with their identities.
            experts_NJK: tokens that went through other experts are not shared.
        """

        def key(number: int) -> tuple[bytes, bytes]:
            sequence = sequences[number]
            end = sequence.begin + sequence.num_tokens
            return sequence.tree, marked_N[sequence.begin : end].numpy().tobytes()

        order = sorted(sequences, key=key)
        neighbours = pairwise(sequences[number] for number in order)
        shared = [_count_shared(*pair, marked_N, experts_NJK) for pair in neighbours]
        return cls({number: place for place, number in enumerate(order)}, [0, *shared])

    def branches(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return, of some sequences, how many tokens each shares with the one before it."""
        branches, bound = {}, 0
        for number in sorted(numbers, key=self.place.__getitem__):
            place = self.place[number]
            branches[number] = min(self.shared[bound : place + 1]) if bound else 0
            bound = place + 1
        return branches

    def trees(self, numbers: Sequence[int], sequences: Mapping[int, BatchSequence]) -> list[Tree]:
        """Return the trees of some sequences, in the order of their first ones in ``numbers``."""
        of_trees: list[dict[int, int]] = []
        for number, num_shared in self.branches(numbers).items():
            if not num_shared:
                of_trees.append({})
            of_trees[-1][number] = num_shared
        given = {number: index for index, number in enumerate(numbers)}
        trees = []
        for branches in of_trees:
            first, *others = branches
            num_shared = min(map(branches.__getitem__, others), default=sequences[first].num_tokens)
            members = sorted(branches, key=given.__getitem__)
            trees.append(Tree(num_shared, branches | {first: num_shared}, members))
        return sorted(trees, key=lambda tree: given[tree.members[0]])


def _count_shared(
    one: BatchSequence, other: BatchSequence, marked_N: Tensor, experts_NJK: Tensor | None
) -> int:
    if one.tree != other.tree:
        return 0
    num_tokens = min(one.num_tokens, other.num_tokens)
    own, others = (slice(each.begin, each.begin + num_tokens) for each in (one, other))
    differs_L = marked_N[own] != marked_N[others]
    if experts_NJK is not None:
        differs_L |= (experts_NJK[own] != experts_NJK[others]).flatten(1).any(1)
    num_shared = int(pad(differs_L, (0, 1), value=True).int().argmax())
    ends = (one.num_prompt_tokens, other.num_prompt_tokens)
    end = max((end for end in ends if end <= num_shared), default=0)
    return num_shared if num_shared - end >= _LEAST_TOKENS else end
