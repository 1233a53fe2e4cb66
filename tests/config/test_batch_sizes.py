from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.checks.batch_sizes import BatchSizes, nearest_legal

sizes = st.builds(
    BatchSizes,
    num_prompts=st.integers(1, 600),
    num_responses=st.integers(2, 16),
    num_minibatches=st.integers(1, 8),
    num_ranks_per_node=st.sampled_from([1, 2, 3, 4, 8]),
    num_nodes=st.sampled_from([1, 2, 16]),
    tensor_parallel_size=st.sampled_from([1, 2, 4]),
)


def _changed(before: BatchSizes, after: BatchSizes) -> list[str]:
    return [name for name, n in asdict(after).items() if n != asdict(before)[name]]


@given(sizes)
def test_legal_sizes_divide_as_the_run_will_divide_them(sizes: BatchSizes) -> None:
    num_rows = sizes.num_prompts * sizes.num_responses
    divides = (
        sizes.num_ranks_per_node % sizes.tensor_parallel_size == 0
        and sizes.num_prompts % sizes.num_engines == 0
        and num_rows % (sizes.num_ranks * sizes.num_minibatches) == 0
    )
    assert divides == (not sizes.broken_rules())


@given(sizes)
def test_every_proposal_is_legal_and_changes_one_or_two_sizes(sizes: BatchSizes) -> None:
    if not sizes.broken_rules():
        return
    for legal in nearest_legal(sizes):
        assert not legal.broken_rules()
        assert 1 <= len(_changed(sizes, legal)) <= 2
        assert legal.num_ranks_per_node <= sizes.num_ranks_per_node


@given(sizes.filter(lambda s: s.num_ranks_per_node % s.tensor_parallel_size == 0))
def test_where_ranks_fit_their_engines_there_is_always_a_proposal(sizes: BatchSizes) -> None:
    assert not sizes.broken_rules() or nearest_legal(sizes)


def test_the_nearest_proposal_comes_first() -> None:
    sizes = BatchSizes(
        num_prompts=15,
        num_responses=8,
        num_minibatches=1,
        num_ranks_per_node=2,
        num_nodes=1,
        tensor_parallel_size=1,
    )
    proposals = nearest_legal(sizes)
    assert _changed(sizes, proposals[0]) == ["num_prompts"]
    assert proposals[0].num_prompts == 16
    assert proposals[1].num_ranks_per_node == 1


def test_prompts_and_minibatches_are_solved_together() -> None:
    # 10 prompts on 4 ranks: 8 or 12 would do for the engines, but 3 mini-batches leave only 12.
    sizes = BatchSizes(
        num_prompts=10,
        num_responses=8,
        num_minibatches=3,
        num_ranks_per_node=4,
        num_nodes=1,
        tensor_parallel_size=1,
    )
    assert nearest_legal(sizes)[0].num_prompts == 12
    held = nearest_legal(sizes, fixed={"num_prompts"})
    assert all(legal.num_prompts == 10 for legal in held)
