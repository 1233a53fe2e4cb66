from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.checks.batch_sizes import BatchSizes

sizes = st.builds(
    BatchSizes,
    num_prompts=st.integers(1, 600),
    num_responses=st.integers(2, 16),
    num_minibatches=st.integers(1, 8),
    num_ranks_per_node=st.sampled_from([1, 2, 3, 4, 8]),
    num_nodes=st.sampled_from([1, 2, 16]),
    tensor_parallel_size=st.sampled_from([1, 2, 4]),
)


@given(sizes)
def test_legal_sizes_divide_as_the_run_will_divide_them(sizes: BatchSizes) -> None:
    num_rows = sizes.num_prompts * sizes.num_responses
    divides = (
        sizes.num_ranks_per_node % sizes.tensor_parallel_size == 0
        and sizes.num_prompts % sizes.num_engines == 0
        and num_rows % (sizes.num_ranks * sizes.num_minibatches) == 0
    )
    assert divides == (not sizes.broken_rules())


@given(sizes.filter(lambda s: s.num_ranks_per_node % s.tensor_parallel_size == 0))
def test_exactly_multiples_of_the_named_number_of_prompts_divide(sizes: BatchSizes) -> None:
    divides = sizes.num_prompts % sizes.prompts_multiple == 0
    assert divides == (not sizes.broken_rules())
