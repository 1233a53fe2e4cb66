"""Rules of the code's structure that no linter states. The layers are in pyproject.toml."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hybridrl
from benchmarks.source_tree import Module, import_cycles, read_modules, swallows, walk

ROOT = Path(hybridrl.__file__).parents[1]
MODULES = read_modules(ROOT / "hybridrl", root=ROOT)

# A heavy or optional package, and the one module that may import it.
ONE_DOOR = {
    "hydra": "hybridrl.main",
    "omegaconf": "hybridrl.main",
    "sglang": "hybridrl.workers.rollout.sglang.transports",
    "megatron": "hybridrl.workers.train.megatron.megatron_core",
    "peft": "hybridrl.models.adapter",
    "mcp": "hybridrl.agents.mcp_tools",
    "liger_kernel": "hybridrl.models.packed_model",
}
AT_MOST_ONE_FILE = [
    "wandb",
    "mlflow",
    "trackio",
    "swanlab",
    "prometheus_client",
    "tensorboard",
    "math_verify",
    "plotly",
]
LIFE_CYCLE = ("release", "resume", "pause", "drain", "continue_generation")


def importers_of(package: str) -> set[str]:
    return {m.name for m in MODULES if any(name.split(".")[0] == package for name in m.imports)}


def names(modules: list[Module]) -> list[str]:
    return [module.name for module in modules]


@pytest.mark.parametrize(("package", "door"), ONE_DOOR.items())
def test_a_heavy_package_is_imported_through_one_door(package: str, door: str) -> None:
    assert importers_of(package) <= {door}


@pytest.mark.parametrize("package", AT_MOST_ONE_FILE)
def test_an_optional_package_is_imported_by_one_file(package: str) -> None:
    assert len(importers_of(package)) <= 1, importers_of(package)


@pytest.mark.shows("2.4", "3.8", "5.2")
def test_only_the_sharding_manager_drives_the_life_cycle_of_an_engine() -> None:
    # Adapters in workers/rollout carry the verbs out, so they may hand them on.
    allowed = ("hybridrl.workers.sharding", "hybridrl.workers.rollout")
    callers = {
        f"{module.name}:{call.lineno} {ast.unparse(call.func)}"
        for module in MODULES
        if not module.name.startswith(allowed)
        for call in module.calls_of(*LIFE_CYCLE)
        if isinstance(call.func, ast.Attribute)
    }
    assert callers == set()


def test_the_environment_is_read_and_written_in_env_alone() -> None:
    users = [
        module
        for module in MODULES
        if module.name != "hybridrl.env"
        and any(
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv", "putenv")
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            for node in module.nodes
        )
    ]
    assert names(users) == []


def test_durations_and_deadlines_are_kept_on_a_clock_that_does_not_jump() -> None:
    # A wall clock is set back and forth; it may date what is written, and nothing else.
    dated = {
        "hybridrl.run.trackers",
        "hybridrl.agents.proxy_server",  # dates its answers
        "hybridrl.diagnostics.trace",  # lays rows of several machines beside each other
    }
    wall_clocks = (".time.time", ".time.time_ns", ".datetime.now", ".datetime.utcnow")
    readers = {
        module.name
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.Attribute) and f".{ast.unparse(node)}".endswith(wall_clocks)
    }
    from_imports = {
        module.name
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and {"time", "time_ns"} & {alias.name for alias in node.names}
    }
    assert readers <= dated
    assert from_imports == set()


def test_no_import_goes_in_a_circle() -> None:
    assert import_cycles(MODULES) == []


def test_nothing_is_imported_inside_a_function_or_class() -> None:
    places = {
        f"{module.name}:{node.lineno}"
        for module in MODULES
        for block in (*module.functions, *module.classes)  # methods are functions, too
        for node in walk(block)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert places == set()


def test_no_product_code_asserts() -> None:
    asserting = [m for m in MODULES if any(isinstance(node, ast.Assert) for node in m.nodes)]
    assert names(asserting) == []


def test_no_handler_swallows_every_exception() -> None:
    places = {
        f"{module.name}:{node.lineno}"
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    }
    assert places == set()


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert [module.name for module in MODULES if drawers & set(module.name.split("."))] == []


def test_the_layers_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
