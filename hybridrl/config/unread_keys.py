"""Keys of a command that its mode does not read: steps and rows, which each mode has of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridrl.config.experiment import OFFLINE_MODES
from hybridrl.errors import ConfigError

_OF_SAMPLING = {"num_steps": "trainer.num_steps", "batch_size": "trainer.num_prompts_per_step"}
"""Keys of the modes that sample, by the name that other modes have for them."""


def find_unread_keys(mode: str, typed: Sequence[str]) -> Iterator[ConfigError]:
    """Yield an error for each key that was typed and that only another mode reads.

    Recipes may set such keys: they are not typed.

    Args:
        typed: overrides of the command line.
    """
    own = {name: f"{mode}.{name}" for name in _OF_SAMPLING}
    if mode == "train":
        own = _OF_SAMPLING
    elif mode not in OFFLINE_MODES:
        return  # they start nothing, or read the settings of several modes
    names = {key: name for name, key in _OF_SAMPLING.items()}
    for override in typed:
        key, _, value = override.lstrip("+~").partition("=")
        section, _, name = key.partition(".")
        is_of_other = section in OFFLINE_MODES and section != mode
        is_of_sampling = key in names and key not in own.values()
        if is_of_other or is_of_sampling:
            alike = own.get(names.get(key, name))
            fix = f"set {alike}={value}" if alike else "leave it out"
            other = f"; mode={section} reads it" if is_of_other else ""
            yield ConfigError(key, value, f"mode={mode} does not read it{other}", fix)
