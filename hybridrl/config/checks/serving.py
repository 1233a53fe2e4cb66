"""Rules about rollout servers; silent without them."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.checks.passed_arguments import refuse_own_arguments
from hybridrl.config.checks.rollout import TAKEN, TYPED
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import HALVES, PlacedGroup
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

_BUILT_TYPES = ("regular", "prefill", "decode", "placeholder")
_TRANSFER = "disaggregation_transfer_backend"
_PARTNERS = {"prefill": ("decode",), "decode": ("prefill",), "encoder": ("prefill", "regular")}
"""Groups of which a model needs one beside a group of this type."""


def check_servers_have_the_devices(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Groups take all devices of the servers, no more and no fewer."""
    serving, num_nodes = config.serving, config.cluster.num_nodes
    num_asked = sum(group.config.num_devices for group in serving.placed_groups)
    if not serving.models or num_asked == config.num_server_devices:
        return
    key = "serving.num_devices_per_node"
    has_engines = num_asked > 0 or serving.has_external_policy
    fits = has_engines and num_asked % num_nodes == 0
    yield ConfigError(
        key,
        serving.num_devices_per_node,
        f"{num_nodes} nodes have {config.num_server_devices} devices for servers, and the groups "
        f"of serving.models ask for {num_asked} together",
        fix="" if fits else f"make num_devices of the groups add up to {config.num_server_devices}",
        remedies=[(f"{key}={num_asked // num_nodes}",)] if fits else [],
    )


def check_engines_fill_their_groups(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An engine lies on one node, or on all devices of several; a group has no share of one."""
    per_node = max(1, config.serving.num_devices_per_node)  # 0 is refused above
    for group in config.serving.placed_groups:
        per_engine = group.config.devices_per_engine
        if group.config.num_devices % per_engine:
            rule = f"must divide the {group.config.num_devices} devices of the group"
        elif (first := _across_nodes(group, per_node)) is not None:
            rule = f"from device {first} on, an engine would lie on two nodes of {per_node} devices"
        else:
            continue
        key = f"{group.key}.devices_per_engine"
        yield ConfigError(key, per_engine, rule, remedies=[(f"{key}=1",)])


def _across_nodes(group: PlacedGroup, per_node: int) -> int | None:
    """Return the first device of an engine that lies neither on one node nor on all of several."""
    size = group.config.devices_per_engine
    end = group.first_device + group.config.num_devices
    for first in range(group.first_device, end, size):
        is_whole = size % per_node == 0 and first % per_node == 0
        if first % per_node + size > per_node and not is_whole:
            return first
    return None


def check_one_model_is_the_policy(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Exactly one model gets the weights of the trainer."""
    models = config.serving.models
    policies = [name for name, model in models.items() if model.path is None]
    if not models or len(policies) == 1:
        return
    if policies:
        yield ConfigError(
            f"serving.models.{policies[1]}.path",
            None,
            f"the policy is served as {policies[0]} already; null is the policy",
            fix=f"set serving.models.{policies[1]}.path to the folder of a frozen model",
        )
        return
    name = next(iter(models))
    yield ConfigError(
        f"serving.models.{name}.path",
        models[name].path,
        "no model is the policy, so nothing could be sampled for training",
        remedies=[(f"serving.models.{name}.path=null",)],
    )


def check_models_have_engines(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Each model has an engine that answers, and each half of a request has its other half."""
    for name, model in config.serving.models.items():
        if model.urls:
            continue
        key = f"serving.models.{name}.groups"
        types = {group.worker_type for group in model.groups.values()}
        if types <= {"placeholder"}:
            rule = "the model has no engine"
            remedies = [(f"{key}.{group}.worker_type=regular",) for group in model.groups][:1]
            fix = "" if remedies else f"set {key}.main.num_devices"
            yield ConfigError(key, sorted(model.groups), rule, fix=fix, remedies=remedies)
        for group, section in model.groups.items():
            partners = _PARTNERS.get(section.worker_type, ())
            if partners and types.isdisjoint(partners):
                yield ConfigError(
                    f"{key}.{group}.worker_type",
                    section.worker_type,
                    f"a request needs a group of type {' or '.join(partners)} of the same model",
                    remedies=[(f"{key}.{group}.worker_type=regular",)],
                )


def check_group_arguments(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Arguments of a group are SGLang's, as those of ``rollout.engine_args``."""
    for group in config.serving.placed_groups:
        key, given = f"{group.key}.engine_args", group.config.engine_args
        if given and config.rollout.engine != "sglang":
            reset = resetting(key, given, {})
            rule = f"would be ignored: rollout.engine={config.rollout.engine} has none"
            yield ConfigError(key, dict(given), rule, instruction(reset), remedies=[reset])
        else:
            yield from refuse_own_arguments(given, key, typed=TYPED, taken=TAKEN)


def check_topology_is_built(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Encoders are not built; docs/serving.md."""
    for group in config.serving.placed_groups:
        if group.config.worker_type not in _BUILT_TYPES:
            key = f"{group.key}.worker_type"
            rule = "is not built: encoders read images, and the models that hybridrl trains do not"
            remedies = [(f"{key}=regular",)]
            yield ConfigError(key, group.config.worker_type, rule, remedies=remedies)


def check_halves_use_one_transfer(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Keys and values leave prefill engines in the way in which decode engines fetch them."""
    for name, model in config.serving.models.items():
        backends = {
            group: {**config.rollout.engine_args, **section.engine_args}.get(_TRANSFER)
            for group, section in model.groups.items()
            if section.worker_type in HALVES
        }
        if len(set(backends.values())) > 1:
            choosing = [g for g in backends if _TRANSFER in model.groups[g].engine_args]
            group = choosing[0]
            key = f"serving.models.{name}.groups.{group}.engine_args.{_TRANSFER}"
            named = ", ".join(f"{g}: {value or 'its default'}" for g, value in backends.items())
            yield ConfigError(
                key,
                backends[group],
                f"the halves of a request hand keys and values on in one way ({named})",
                fix=f"set rollout.engine_args.{_TRANSFER} for both, and ~{key}",
                remedies=[(f"~{key}",)] if len(choosing) == 1 else [],
            )


def check_engines_can_share_devices(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An engine of several devices is an SGLang server; the key of fused engines has no effect."""
    if not config.serving.models:
        return
    for group in config.serving.placed_groups:
        key, size = f"{group.key}.devices_per_engine", group.config.devices_per_engine
        if config.rollout.engine != "hf":
            continue
        if size > 1:
            rule = "rollout.engine=hf computes on one device"
            yield ConfigError(key, size, rule, remedies=[(f"{key}=1",), ("rollout=sglang",)])
        if group.config.worker_type in HALVES:
            key = f"{group.key}.worker_type"
            rule = "rollout.engine=hf has no halves: SGLang alone hands keys and values on"
            yield ConfigError(key, group.config.worker_type, rule, remedies=[("rollout=sglang",)])
    key, size = "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size
    if size > 1 and not config.serving.colocated:
        yield ConfigError(
            key,
            size,
            "would be ignored: devices_per_engine of a group sets the devices of its engines",
            remedies=[(f"{key}=1",)],
        )


def check_weights_have_a_receiver(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Without servers no weights leave the ranks."""
    if config.serving.weights != "files" and not config.has_servers:
        yield ConfigError(
            "serving.weights",
            config.serving.weights,
            "would be ignored: the ranks of the policy have the rollout engines",
            remedies=[("serving.weights=files",), ("serving=own", "serving.weights=broadcast")],
        )


def check_servers_hold_full_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Weights reach servers as files of a full model; an adapter is merged before."""
    if config.has_servers and config.lora.sends_adapters:
        yield ConfigError(
            "lora.sync",
            config.lora.sync,
            "servers get full weights, and no adapter",
            remedies=[("lora.sync=merged",), ("serving=none",)],
        )


RULES = (
    check_servers_have_the_devices,
    check_engines_fill_their_groups,
    check_one_model_is_the_policy,
    check_models_have_engines,
    check_group_arguments,
    check_topology_is_built,
    check_weights_have_a_receiver,
    check_engines_can_share_devices,
    check_halves_use_one_transfer,
    check_servers_hold_full_models,
)
