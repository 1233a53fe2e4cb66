"""Rules about modes that learn from the rows of a data set, and sample nothing."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.checks.algorithm import check_part
from hybridrl.config.checks.messages import error
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError


def check_rows_of_a_step(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows divide evenly over the data-parallel ranks, and hold no routes of experts."""
    size, num_ranks = config.trainer.num_prompts_per_step, config.num_train_groups
    if size % num_ranks:
        key, legal = "trainer.num_prompts_per_step", -(-size // num_ranks) * num_ranks
        rule = f"must be a multiple of {num_ranks} data-parallel ranks"
        yield error(config, key, rule, f"{key}={legal}")
    if config.megatron_worlds and config.megatron.replay_routing:
        key = "megatron.replay_routing"
        rule = f"mode={config.mode} learns from a file, which holds no routes of experts"
        yield error(config, key, rule, f"{key}=false")


def check_preference_pairs(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Rows of files need a column of rejected answers to be preference pairs."""
    data, key = config.data, "data.rejected_key"
    columns = [source.rejected_key or data.rejected_key for source in data.sources.values()]
    if data.task is not None or all(columns or [data.rejected_key]):
        return
    rule = f"mode={config.mode} learns from pairs of a chosen and a rejected answer"
    fix = (
        "set data=preferences for columns prompt, chosen and rejected; or data.rejected_key="
        "COLUMN, beside data.answer_key for the chosen answer"
    )
    yield error(config, key, rule, f"data.answer_key=chosen {key}=rejected", fix=fix)


def check_preference_loss(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The loss is built in, or a function in a file, and has the numbers that are given to it."""
    for kind, spelled, given in config.dpo.parts:
        yield from check_part(config, kind, spelled, given)


def check_reward_model_has_no_adapter(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Adapters are for language models: a value head has none."""
    if config.lora.enabled:
        rule = "mode=reward_model trains all weights, as the critic does"
        yield error(config, "lora.enabled", rule, "lora=none")


RULES = {
    "sft": (check_rows_of_a_step,),
    "dpo": (check_rows_of_a_step, check_preference_pairs, check_preference_loss),
    "reward_model": (
        check_rows_of_a_step,
        check_preference_pairs,
        check_reward_model_has_no_adapter,
    ),
}
"""By mode; see ``config.offline``."""
