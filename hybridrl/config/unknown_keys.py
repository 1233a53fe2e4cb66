"""Words for an override of a key that does not exist: Hydra itself names none that does."""

from __future__ import annotations

from hybridrl.config.foreign_names import answer_key
from hybridrl.config.load import free_keys, known_keys
from hybridrl.errors import ConfigError, suggest_name


def unknown_key(key: str, value: str) -> ConfigError:
    """Say what is wrong with ``key``, and which known ones are near.

    Args:
        key: dotted, as it was typed.
        value: as it was typed.
    """
    section, dot, name = key.rpartition(".")
    if any(free in (section, key) for free in free_keys()):
        fix = f"write +{key}={value}"
        return ConfigError(key, value, "it is no key of ours but of another program", fix)
    if answer := answer_key(key):
        return ConfigError(key, value, "it is a key of another framework", answer)
    siblings = [known.rpartition(".") for known in (*known_keys(), "recipes")]
    names = [sibling for above, _, sibling in siblings if above == section]
    if not names:  # the section itself is mistyped, or the key stands in another one
        return ConfigError(
            key, value, "there is no such section", suggest_name(key, [*known_keys()])
        )
    hint = suggest_name(name, names)
    return ConfigError(key, value, f"there is no such key{dot and ' in ' + section}", hint)
