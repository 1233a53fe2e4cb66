"""Rules about rollout servers: on own devices, on those of the trainer, and run by others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridrl import env
from hybridrl.config.checks.messages import error, refuse_own_arguments
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import ASKED_BY_OTHERS, HALVES, PlacedGroup, ServedModelConfig
from hybridrl.config.topology import Own
from hybridrl.errors import ConfigError
from hybridrl.models.architecture import find_architecture

_DEVICES = "serving.num_devices_per_node"
_COLOCATED = "serving.colocated"
_OWN_DEVICES = "serving.colocated=false rollout.sleep=false"
_PARTNERS = {"prefill": "decode", "decode": "prefill"}
"""The group that a model needs beside a group of this type."""

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SIGNALS = ("kill", "stop")
_NOT_SHOWN = "..."
"""In place of what may be a secret."""


def check_devices(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Groups take all devices of the servers, no more and no fewer, and the trainer's if shared."""
    serving, cluster = config.serving, config.cluster
    if not serving.models:
        return
    num_nodes = cluster.num_nodes
    num_devices = num_nodes * serving.num_devices_per_node
    num_asked = sum(group.config.num_devices for group in serving.placed_groups)
    if num_asked != num_devices:
        rule = (
            f"{num_nodes} nodes have {num_devices} devices for servers, and the groups of "
            f"serving.models ask for {num_asked} together"
        )
        has_engines = num_asked > 0 or serving.has_external_policy
        fits = has_engines and num_asked % num_nodes == 0
        remedy = f"{_DEVICES}={num_asked // num_nodes}" if fits else ""
        fix = "" if fits else f"make num_devices of the groups add up to {num_devices}"
        yield error(config, _DEVICES, rule, remedy, fix=fix)
    if serving.num_devices_per_node < config.num_shared_per_node:
        num_ranks = cluster.num_ranks_per_node
        rule = (
            f"with serving.colocated=true all {num_ranks} devices of the trainer on a node are "
            "devices of the servers, too"
        )
        fix = (
            f"add groups for {num_ranks} devices on each node, or make cluster.num_ranks_per_node="
            f"{serving.num_devices_per_node}, or give the servers own devices: {_OWN_DEVICES}"
        )
        yield error(config, _DEVICES, rule, _OWN_DEVICES, fix=fix)


def check_groups(config: ExperimentConfig) -> Iterator[ConfigError]:
    """An engine lies on one node, or on all of several; its work and its arguments are known."""
    per_node = max(1, config.serving.num_devices_per_node)  # 0 is refused with groups
    for group in config.serving.placed_groups:
        section, sizes = group.config, f"{group.key}.devices_per_engine"
        if section.num_devices % section.devices_per_engine:
            rule = f"must divide the {section.num_devices} devices of the group"
            yield error(config, sizes, rule, f"{sizes}=1")
        elif (first := _across_nodes(group, per_node)) is not None:
            rule = f"from device {first} on, an engine would lie on two nodes of {per_node} devices"
            yield error(config, sizes, rule, f"{sizes}=1")
        if config.rollout.engine == "sglang":
            key = f"{group.key}.engine_args"
            yield from refuse_own_arguments(config, key, like="rollout.engine_args")
            continue
        if section.devices_per_engine > 1:
            rule = "rollout.engine=hf computes on one device"
            yield error(config, sizes, rule, f"{sizes}=1", "rollout=sglang")
        if section.worker_type in ASKED_BY_OTHERS:
            key, alone = f"{group.key}.worker_type", "SGLang alone divides a request"
            rule = f"rollout.engine=hf has no halves, and no encoders: {alone}"
            yield error(config, key, rule, "rollout=sglang")


def _across_nodes(group: PlacedGroup, per_node: int) -> int | None:
    """Return the first device of an engine that lies neither on one node nor on all of several."""
    size = group.config.devices_per_engine
    end = group.first_device + group.config.num_devices
    for first in range(group.first_device, end, size):
        is_whole = size % per_node == 0 and first % per_node == 0
        if first % per_node + size > per_node and not is_whole:
            return first
    return None


def check_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """One model is the policy; each has an engine that answers, and both halves of a request."""
    models = config.serving.models
    policies = [name for name, model in models.items() if model.path is None]
    if len(policies) > 1:
        key = f"serving.models.{policies[1]}.path"
        rule = f"the policy is served as {policies[0]} already; null is the policy"
        yield error(config, key, rule, fix=f"set {key} to the folder of a frozen model")
    elif models and not policies:
        key = f"serving.models.{next(iter(models))}.path"
        rule = "no model is the policy, so nothing could be sampled for training"
        yield error(config, key, rule, f"{key}=null")
    for name, model in models.items():
        key = f"serving.models.{name}.groups"
        if not model.urls:
            yield from _check_requests_are_answered(config, key, model)


def _check_requests_are_answered(
    config: ExperimentConfig, key: str, model: ServedModelConfig
) -> Iterator[ConfigError]:
    types = {group.worker_type for group in model.groups.values()}
    if types <= {"placeholder", "encoder"}:
        names = sorted(model.groups)
        remedy = f"{key}.{next(iter(model.groups))}.worker_type=regular" if names else ""
        fix = "" if names else f"set {key}.main.num_devices"
        yield error(config, key, "the model has no engine", remedy, fix=fix, got=names)
    for name, group in model.groups.items():
        partner = _PARTNERS.get(group.worker_type)
        if partner is not None and partner not in types:
            type_key = f"{key}.{name}.worker_type"
            rule = f"a request needs a group of type {partner} of the same model"
            yield error(config, type_key, rule, f"{type_key}=regular")


def check_encoders(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Encoders have the tower of a policy that sees, each on one device, for good."""
    serving = config.serving
    for group in serving.placed_groups:
        beside = [each for each in serving.placed_groups if each.model == group.model]
        obstacles = {
            "it has a vision tower, and this model sees no images": group.model != serving.policy
            or not _sees(config),
            "it takes weights on one device": group.config.devices_per_engine > 1,
            "its embeddings reach no prefill and decode engines": any(
                each.config.worker_type in HALVES for each in beside
            ),
            "SGLang's encoder gives no memory back, and groups of its model are on devices of the "
            "trainer (serving.colocated=true)": any(map(config.is_on_trainer, beside)),
            "it joins no process group (serving.weights=broadcast)": serving.weights != "files",
        }
        key = f"{group.key}.worker_type"
        for rule, is_true in obstacles.items():
            if is_true and group.config.worker_type == "encoder":
                yield error(config, key, rule, f"{key}=regular")


def check_ways_of_weights(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Complete engines on devices of their own get adapters; all others full weights.

    The process of an engine loads changes: into a server elsewhere from files alone.
    """
    serving = config.serving
    if serving.weight_deltas and serving.has_external_policy and serving.weights == "broadcast":
        rule = "servers that run elsewhere take changes as files, and the other weights do not"
        fixes = ("serving.weights=files", "serving.weight_deltas=false")
        yield error(config, "serving.weight_deltas", rule, *fixes)
    if not config.has_servers or not config.lora.sends_adapters:
        return
    groups = [group for group in serving.placed_groups if group.model == serving.policy]
    is_whole = all(group.config.worker_type == "regular" for group in groups)
    if not is_whole or not isinstance(config.topology, Own):
        rule = (
            "only engines on devices of their own, with groups of worker_type=regular, get an "
            "adapter; these servers get full weights"
        )
        yield error(config, "lora.sync", rule, "lora.sync=merged", "serving=none")
    elif serving.weights != "files":
        rule = "engines read the weights below an adapter from files (lora.sync=adapter)"
        yield error(config, "serving.weights", rule, "serving.weights=files", "lora.sync=merged")


def check_shared_devices(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Groups on devices of the trainer sleep while it computes; others never do."""
    serving, rollout = config.serving, config.rollout
    if not serving.models:
        return
    fused = [group for group in serving.placed_groups if config.is_on_trainer(group)]
    if serving.colocated and not rollout.sleep:
        names = ", ".join(f"{group.model}.{group.name}" for group in fused)
        rule = (
            f"groups {names} and the trainer want the same devices, and rollout.sleep=false gives "
            "none back"
        )
        yield error(config, _COLOCATED, rule, "rollout.sleep=true", "serving.colocated=false")
    for name, fault in serving.faults.items():
        if fused and fault.kind in (*_SIGNALS, "cut"):
            key = f"serving.faults.{name}.kind"
            rule = "the manager ends and cuts no engines of ranks (serving.colocated=true)"
            yield error(config, key, rule, f"{key}=error")


def check_router(config: ExperimentConfig) -> Iterator[ConfigError]:
    """It stands before complete servers of SGLang that the run starts on devices of their own."""
    if not config.has_servers or config.serving.router == "none":
        return
    groups = config.serving.placed_groups
    has_halves = any(group.config.worker_type in HALVES for group in groups)
    obstacles = {
        "it passes requests to SGLang alone": config.rollout.engine != "sglang",
        "it drops the experts of tokens (actor.replay_routing)": config.returns_experts,
        "it drops sampling masks (rollout.sampling_masks)": config.rollout.sampling_masks,
        "engines of ranks are asked through their ranks": config.serving.colocated,
        "it stands before complete servers, and these are halves": has_halves,
        "others run the policy's servers": config.serving.has_external_policy,
        "it drops the ids of prompts with images (prompt_token_ids)": _sees(config),
    }
    for rule, is_true in obstacles.items():
        if is_true:
            yield error(config, "serving.router", rule, "serving.router=none")


def _sees(config: ExperimentConfig) -> bool:
    model = find_architecture(config.model)
    return model is not None and model.tower is not None


def check_led_groups(config: ExperimentConfig) -> Iterator[ConfigError]:
    """On devices of the trainer, the ranks of a node lead the engines."""
    serving = config.serving
    per_node = max(1, serving.num_devices_per_node)  # 0 is refused with groups
    led = [group for group in serving.placed_groups if config.is_on_trainer(group)]
    for group in serving.placed_groups:
        section, key = group.config, group.key
        devices = range(group.first_device, group.first_device + section.num_devices)
        num_shared = sum(device % per_node < config.num_shared_per_node for device in devices)
        if 0 < num_shared < section.num_devices:
            rule = (
                f"{num_shared} of these devices are the trainer's and the others are not; its "
                "engines would sleep and not sleep"
            )
            fix = f"make two groups of it, one for each kind, or set {_OWN_DEVICES}"
            yield error(config, f"{key}.num_devices", rule, _OWN_DEVICES, fix=fix)
        elif num_shared and section.devices_per_engine > config.cluster.num_ranks_per_node:
            rule = (
                f"ranks that share an engine lie on one node, which has "
                f"{config.cluster.num_ranks_per_node}"
            )
            sizes = f"{key}.devices_per_engine"
            yield error(config, sizes, rule, f"{sizes}={config.cluster.num_ranks_per_node}")
    policies = [group for group in led if group.model == serving.policy]
    for model in serving.models:
        halves = [g for g in serving.placed_groups if g.config.worker_type in HALVES]
        kinds = {config.is_on_trainer(half) for half in halves if half.model == model}
        if len(kinds) > 1:
            rule = "halves of a request stand all on devices of the trainer, or all on their own"
            yield error(config, _COLOCATED, rule, _OWN_DEVICES)
    if led and led != policies and config.has_critic and not config.has_critic_pool:
        frozen = next(group for group in led if group not in policies)
        rule = (
            f"group {frozen.name} of {frozen.model} answers until the trainer computes, and a "
            "critic on its devices computes values while rewards are asked for"
        )
        key = "critic.num_ranks_per_node"
        yield error(config, key, rule, f"{key}=1", _OWN_DEVICES)


def check_external_servers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A URL has a scheme and a host, and no secret: the run folder keeps it.

    A key is in an environment variable of the driver: files and logs have its name alone.
    """
    for name, model in config.serving.models.items():
        key = f"serving.models.{name}"
        if model.key_variable is not None and not _VARIABLE.fullmatch(model.key_variable):
            rule = (
                "must be the name of an environment variable, in capital letters, and not the key "
                "itself: the run folder keeps it"
            )
            fix = f"type export SGLANG_KEY=..., and set {key}.key_variable=SGLANG_KEY"
            yield error(config, f"{key}.key_variable", rule, fix=fix, got=_NOT_SHOWN)
        for url in model.urls:
            if flaw := _flaw_of(url):
                scheme, _, place = url.partition("://")
                _, at, host = place.rpartition("@")
                shown = f"{scheme}://{_NOT_SHOWN}@{host}" if at else url
                fix = f"set {key}.urls=[http://HOST:PORT]"
                yield error(config, f"{key}.urls", flaw, fix=fix, got=shown)
        if repeated := sorted({url for url in model.urls if model.urls.count(url) > 1}):
            kept = f"{key}.urls=[{','.join(dict.fromkeys(model.urls))}]"
            yield error(config, f"{key}.urls", f"{repeated[0]} stands there twice", kept)
        if model.urls and model.groups:
            rule = "would be ignored: servers that run already answer for this model"
            fix = f"keep one of both: add ~{key}.urls or ~{key}.groups"
            remedy = f"~{key}.urls" if model.path is None else f"~{key}.groups"
            yield error(config, f"{key}.groups", rule, remedy, fix=fix, got=sorted(model.groups))


def _flaw_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as err:
        return f"not a URL: {err}"
    if parts.username is not None or parts.password is not None:
        return (
            "a URL must have no user or password, which the run folder would keep; a key stands "
            "in an environment variable, which key_variable names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "must be http://HOST:PORT or https://HOST:PORT"
    if parts.path.strip("/") or parts.query or parts.fragment:
        return "must end with the port: SGLang's routes begin there"
    return ""


def check_external_policy(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Servers elsewhere that sample for training are SGLang's, never sleep and are not ended."""
    rollout, serving = config.rollout, config.serving
    if not serving.has_external_policy:
        return
    if rollout.engine != "sglang":
        rule = f"servers of SGLang answer for the policy (serving.models.{serving.policy}.urls)"
        yield error(config, "rollout.engine", rule, "rollout=sglang")
    if _sees(config) and not config.model.freeze_vision:
        rule = "servers that run elsewhere may keep what an older tower made of an image"
        yield error(config, "model.freeze_vision", rule, "model.freeze_vision=true")
    if serving.colocated:
        rule = "servers that run elsewhere answer for the policy, and have devices of their own"
        remedy = "serving.colocated=false rollout.sleep=false"
        yield error(config, "serving.colocated", rule, remedy)
    for name, fault in serving.faults.items():
        if fault.kind in _SIGNALS:
            key = f"serving.faults.{name}.kind"
            rule = "the run sends no signal to servers that others started"
            yield error(config, key, rule, f"{key}=cut")


def check_keys_are_set(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The environment variable of a key has a value that HTTP can carry."""
    for name, model in config.serving.external.items():
        variable = model.key_variable
        if variable is None or not _VARIABLE.fullmatch(variable):
            continue
        value = env.get(variable)
        flaw = "" if value else "is not set"
        if value and not (value.isascii() and value.isprintable() and " " not in value):
            flaw = "has a space, or a character that HTTP does not carry"
        if flaw:
            key, rule = f"serving.models.{name}.key_variable", f"the environment variable {flaw}"
            fix = f"type export {variable}=... with the key of the servers"
            yield error(config, key, rule, fix=fix)
