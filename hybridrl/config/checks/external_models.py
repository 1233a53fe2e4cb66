"""Rules about models whose servers run elsewhere (``serving.models.NAME.urls``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import ServedModelConfig
from hybridrl.config.spelling import resetting
from hybridrl.errors import ConfigError, instruction

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SIGNALS = ("kill", "stop")
_NOT_SHOWN = "..."
"""In place of what may be a secret."""


def check_urls(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A URL has a scheme and a host, and no secret: the run folder keeps it."""
    for name, model in config.serving.external.items():
        key = f"serving.models.{name}.urls"
        for url in model.urls:
            if flaw := _flaw_of(url):
                fix = f"set {key}=[http://HOST:PORT]"
                yield ConfigError(key, _without_secret(url), flaw, fix=fix)
        repeated = sorted({url for url in model.urls if model.urls.count(url) > 1})
        if repeated:
            kept = ",".join(dict.fromkeys(model.urls))
            rule = f"{repeated[0]} stands there twice"
            yield ConfigError(key, list(model.urls), rule, remedies=[(f"{key}=[{kept}]",)])


def _flaw_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"not a URL: {error}"
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


def _without_secret(url: str) -> str:
    scheme, _, place = url.partition("://")
    return f"{scheme}://{_NOT_SHOWN}@{place.rpartition('@')[2]}" if "@" in place else url


def check_external_models(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A model has servers elsewhere, or groups of its own."""
    for name, model in config.serving.external.items():
        key = f"serving.models.{name}"
        if not model.groups:
            continue
        remedy = f"~{key}.urls" if model.path is None else f"~{key}.groups"
        yield ConfigError(
            f"{key}.groups",
            sorted(model.groups),
            "would be ignored: servers that run already answer for this model",
            fix=f"keep one of both: add ~{key}.urls or ~{key}.groups",
            remedies=[(remedy,)],
        )


def check_external_policy_is_sglang(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Servers elsewhere that sample for training are SGLang's, with arguments of their own."""
    rollout = config.rollout
    if not config.serving.has_external_policy:
        return
    if rollout.engine != "sglang":
        yield ConfigError(
            "rollout.engine",
            rollout.engine,
            f"servers of SGLang answer for the policy (serving.models.{config.serving.policy}."
            "urls)",
            remedies=[("rollout=sglang",)],
        )
    elif rollout.engine_args and not config.serving.placed_groups:
        reset = resetting("rollout.engine_args", rollout.engine_args, {})
        yield ConfigError(
            "rollout.engine_args",
            dict(rollout.engine_args),
            "would be ignored: the servers run already; type them where these are started",
            remedies=[reset],
            fix=instruction(reset),
        )


def check_external_policy_shares_no_device(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Servers elsewhere never sleep: they cannot take turns with the trainer."""
    if config.serving.has_external_policy and config.serving.colocated:
        yield ConfigError(
            "serving.colocated",
            got=True,
            rule="servers that run elsewhere answer for the policy, and have devices of their own",
            remedies=[("serving.colocated=false", "rollout.sleep=false")],
        )


def check_external_policy_is_not_ended(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The run never ends a server that others started, not even as a fault on purpose."""
    for name, fault in config.serving.faults.items():
        if config.serving.has_external_policy and fault.kind in _SIGNALS:
            key = f"serving.faults.{name}.kind"
            rule = "the run sends no signal to servers that others started"
            yield ConfigError(key, fault.kind, rule, remedies=[(f"{key}=cut",)])


def check_key_variables(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A key is in an environment variable of the driver: files and logs have its name alone."""
    for name, model in config.serving.models.items():
        key, variable = f"serving.models.{name}.key_variable", model.key_variable
        if variable is None:
            continue
        if not _VARIABLE.fullmatch(variable):
            yield ConfigError(
                key,
                _NOT_SHOWN,
                "must be the name of an environment variable, in capital letters, and not the key "
                "itself: the run folder keeps it",
                fix=f"type export SGLANG_KEY=..., and set {key}=SGLANG_KEY",
            )
        elif not model.urls:
            rule = "would be ignored: the model has no urls"
            yield ConfigError(key, variable, rule, remedies=[(f"~{key}",)])


def check_keys_are_set(config: ExperimentConfig) -> Iterator[ConfigError]:
    """The environment variable of a key has a value that HTTP can carry."""
    for name, model in config.serving.external.items():
        flaw = _flaw_of_key(model)
        if flaw:
            yield ConfigError(
                f"serving.models.{name}.key_variable",
                model.key_variable,
                f"the environment variable {flaw}",
                fix=f"type export {model.key_variable}=... with the key of the servers",
            )


def _flaw_of_key(model: ServedModelConfig) -> str:
    if model.key_variable is None or not _VARIABLE.fullmatch(model.key_variable):
        return ""
    value = env.get(model.key_variable)
    if not value:
        return "is not set"
    is_printable = value.isascii() and value.isprintable() and " " not in value
    return "" if is_printable else "has a space, or a character that HTTP does not carry"


RULES = (
    *(check_urls, check_external_models, check_key_variables, check_keys_are_set),
    *(check_external_policy_is_sglang, check_external_policy_shares_no_device),
    check_external_policy_is_not_ended,
)
