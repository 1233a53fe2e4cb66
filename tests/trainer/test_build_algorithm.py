from __future__ import annotations

from typing import Any, cast

import pytest

from hybridrl.batch import row_lengths
from hybridrl.trainer.build_algorithm import Ingredients, build_policy_optimization
from hybridrl.trainer.train_batch import balance, balance_over_ranks
from tests.config.values import config_of
from tests.workers.train.engines import make_rows

NOTHING = cast(Any, None)
FOUR_RANKS = ("cluster.num_ranks_per_node=4",)


@pytest.mark.parametrize(
    ("overrides", "num_groups"),
    [
        ((), 4),
        (("actor=megatron", "megatron.tensor_parallel_size=2"), 2),
        (("actor=megatron", "megatron.pipeline_parallel_size=4"), 1),
    ],
)
def test_rows_are_balanced_over_data_parallel_ranks(
    overrides: tuple[str, ...], num_groups: int
) -> None:
    config = config_of(*FOUR_RANKS, *overrides)
    given = Ingredients(
        policy=NOTHING,
        engines=NOTHING,
        sampling=NOTHING,
        reward=NOTHING,
        kl=NOTHING,
        batches=NOTHING,
        on_phase=lambda _: None,
    )
    batches = build_policy_optimization(config, given).build_batch
    rows = make_rows(32, max_half=30)
    lengths = row_lengths(rows.token_ids_BL).tolist()
    expected = balance_over_ranks(lengths, dp_size=num_groups, num_minibatches=1)
    ordered = balance(rows, dp_size=batches.dp_size, num_minibatches=batches.num_minibatches)
    arranged = row_lengths(ordered.token_ids_BL).tolist()
    assert arranged == [lengths[row] for row in expected]
