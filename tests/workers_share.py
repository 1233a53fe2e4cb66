"""How the workers of `pytest -n 2` divide the tests: by file, and the contract by layout."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.contract.layouts import ENGINES

_LAYOUTS = sorted(
    (layout.name for engine in ENGINES.values() for layout in engine.layouts), key=len
)


class ByFile(LoadScopeScheduling):
    """One worker has all tests of a file, since they share ranks, servers and runs.

    Tests of the contract share the ranks of a layout across files, those of SGLang its servers.
    Files keep their order, so that the long ones, which come first, do not leave one worker alone
    at the end.
    """

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """Return a name that a test has in common with those that its worker has, too."""
    file, _, test = nodeid.partition("::")
    if file.startswith("tests/contract/"):
        return next((name for name in reversed(_LAYOUTS) if name in test), file)
    return "sglang" if file.startswith("tests/sglang/") else file
