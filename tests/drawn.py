"""How many cases a property test draws: few by day, many by night."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

BY_NIGHT = "by_night"
"""The profile of hypothesis under ``make test-nightly``."""

Test = TypeVar("Test", bound=Callable[..., object])


def register_profiles() -> None:
    """Cases have no deadline: cores are shared."""
    settings.register_profile("by_day", deadline=None)
    settings.register_profile(BY_NIGHT, deadline=None)
    settings.load_profile("by_day")


def cases(*, by_day: int, by_night: int, **others: Any) -> Callable[[Test], Test]:
    """Draw so many cases; ``make test-nightly`` runs the test again, with its own number.

    ``others`` are settings of hypothesis.
    """
    is_night = settings.get_current_profile_name() == BY_NIGHT
    draws = settings(max_examples=by_night if is_night else by_day, **others)
    return lambda test: pytest.mark.drawn(draws(test))
