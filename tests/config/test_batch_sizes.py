from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.checks.batch_sizes import (
    check_batch_sizes,
    num_rollout_engines,
    prompts_multiple,
)
from hybridrl.config.experiment import ExperimentConfig, with_value
from hybridrl.config.serving import ServedModelConfig
from tests.config.values import config_of

USUAL = config_of("rollout=sglang")


def _configured(sizes: Mapping[str, int]) -> ExperimentConfig:
    config = USUAL
    for key, size in sizes.items():
        config = with_value(config, key, size)
    return config


configs = st.fixed_dictionaries(
    {
        "trainer.num_prompts_per_step": st.integers(1, 600),
        "rollout.num_responses_per_prompt": st.integers(2, 16),
        "algorithm.num_minibatches": st.integers(1, 8),
        "cluster.num_ranks_per_node": st.sampled_from([1, 2, 3, 4, 8]),
        "cluster.num_nodes": st.sampled_from([1, 2, 16]),
        "rollout.tensor_parallel_size": st.sampled_from([1, 2, 4]),
    }
).map(_configured)


def _lies_within_nodes(config: ExperimentConfig) -> bool:
    return config.cluster.num_ranks_per_node % config.rollout.tensor_parallel_size == 0


@given(configs)
def test_legal_sizes_divide_as_the_run_will_divide_them(config: ExperimentConfig) -> None:
    divides = (
        _lies_within_nodes(config)
        and config.trainer.num_prompts_per_step % num_rollout_engines(config) == 0
        and config.num_rows_per_step % (config.cluster.num_ranks * config.algorithm.num_minibatches)
        == 0
    )
    assert divides == (not list(check_batch_sizes(config)))


@given(configs.filter(_lies_within_nodes))
def test_exactly_multiples_of_the_named_number_of_prompts_divide(config: ExperimentConfig) -> None:
    divides = config.trainer.num_prompts_per_step % prompts_multiple(config) == 0
    assert divides == (not list(check_batch_sizes(config)))


def test_prompts_are_not_divided_by_ranks_where_a_manager_has_the_engines() -> None:
    fused = _configured(
        {
            "trainer.num_prompts_per_step": 512,
            "rollout.num_responses_per_prompt": 3,
            "algorithm.num_minibatches": 1,
            "cluster.num_ranks_per_node": 3,
        }
    )
    assert list(check_batch_sizes(fused))
    served = with_value(fused, "serving.models", {"policy": ServedModelConfig()})
    assert not list(check_batch_sizes(served))
