"""Rules about models whose servers run elsewhere (``serving.models.NAME.urls``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridrl import env
from hybridrl.config.checks.messages import error, removal
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.errors import ConfigError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SIGNALS = ("kill", "stop")
_NOT_SHOWN = "..."
"""In place of what may be a secret."""


def check_external_servers(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A URL has a scheme and a host, and no secret: the run folder keeps it."""
    for name, model in config.serving.external.items():
        key = f"serving.models.{name}"
        for url in model.urls:
            if flaw := _flaw_of(url):
                fix = f"set {key}.urls=[http://HOST:PORT]"
                yield error(config, f"{key}.urls", flaw, fix=fix, got=_without_secret(url))
        if repeated := sorted({url for url in model.urls if model.urls.count(url) > 1}):
            kept = f"{key}.urls=[{','.join(dict.fromkeys(model.urls))}]"
            yield error(config, f"{key}.urls", f"{repeated[0]} stands there twice", kept)
        if model.groups:
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


def _without_secret(url: str) -> str:
    scheme, _, place = url.partition("://")
    return f"{scheme}://{_NOT_SHOWN}@{place.rpartition('@')[2]}" if "@" in place else url


def check_external_policy(config: ExperimentConfig) -> Iterator[ConfigError]:
    """Servers elsewhere that sample for training are SGLang's, never sleep and are not ended."""
    rollout, serving = config.rollout, config.serving
    if not serving.has_external_policy:
        return
    if rollout.engine != "sglang":
        rule = f"servers of SGLang answer for the policy (serving.models.{serving.policy}.urls)"
        yield error(config, "rollout.engine", rule, "rollout=sglang")
    elif rollout.engine_args and not serving.placed_groups:
        key = "rollout.engine_args"
        rule = "would be ignored: the servers run already; type them where these are started"
        yield error(config, key, rule, removal(key, rollout.engine_args))
    if serving.colocated:
        rule = "servers that run elsewhere answer for the policy, and have devices of their own"
        remedy = "serving.colocated=false rollout.sleep=false"
        yield error(config, "serving.colocated", rule, remedy)
    for name, fault in serving.faults.items():
        if fault.kind in _SIGNALS:
            key = f"serving.faults.{name}.kind"
            rule = "the run sends no signal to servers that others started"
            yield error(config, key, rule, f"{key}=cut")


def check_key_variables(config: ExperimentConfig) -> Iterator[ConfigError]:
    """A key is in an environment variable of the driver: files and logs have its name alone."""
    for name, model in config.serving.models.items():
        key, variable = f"serving.models.{name}.key_variable", model.key_variable
        if variable is not None and not _VARIABLE.fullmatch(variable):
            rule = (
                "must be the name of an environment variable, in capital letters, and not the key "
                "itself: the run folder keeps it"
            )
            fix = f"type export SGLANG_KEY=..., and set {key}=SGLANG_KEY"
            yield error(config, key, rule, fix=fix, got=_NOT_SHOWN)
        elif variable is not None and not model.urls:
            yield error(config, key, "would be ignored: the model has no urls", f"~{key}")


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


RULES = (check_external_servers, check_external_policy, check_key_variables, check_keys_are_set)
