"""Rules about models whose servers run elsewhere (``serving.models.NAME.urls``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridrl import env
from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.serving import ServedModelConfig
from hybridrl.errors import ConfigError

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
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
    """Servers elsewhere serve frozen models alone, and a model has these or groups of its own."""
    for name, model in config.serving.external.items():
        key = f"serving.models.{name}"
        if model.path is None:
            yield ConfigError(
                f"{key}.urls",
                list(model.urls),
                "is not built for the policy: the engines that sample for training are the run's "
                "own (docs/serving.md)",
                fix=f"give {name} groups instead, and add ~{key}.urls",
                remedies=[(f"~{key}.urls",)] if model.groups else [],
            )
        elif model.groups:
            yield ConfigError(
                f"{key}.groups",
                sorted(model.groups),
                "would be ignored: servers that run already answer for this model",
                remedies=[(f"~{key}.groups",)],
            )


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


RULES = (check_urls, check_external_models, check_key_variables, check_keys_are_set)
