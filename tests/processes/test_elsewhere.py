"""Programs in containers and on a server. Here a script stands in for docker."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.agents.tool_calls import ToolCall
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Toolbox, load_tools
from hybridrl.config.checks import agent as agent_checks
from hybridrl.errors import SandboxError
from hybridrl.processes import elsewhere
from hybridrl.processes.sandbox import SandboxLimits, SandboxResult, open_sandbox, require_sandbox
from hybridrl.rewards.code_answers import code
from tests.processes.test_sandbox import refusal
from tests.rewards.rows import inputs, scorer_of
from tests.rewards.test_remote import serving

LIMITS = SandboxLimits(wall_s=2.0, output_kib=64)
ENDLESS = "import time; time.sleep(600)"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "docker"
    source = Path(__file__).with_name("docker.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{source}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DOCKER", str(tmp_path))
    return tmp_path


def run_code(asked: Any, number: int) -> tuple[int, bytes]:
    """What a server of SandboxFusion answers."""
    ran: dict[str, object] = {"status": "Finished", "return_code": None, "execution_time": 0.1}
    command = [sys.executable, "-c", asked["code"]]
    try:
        done = subprocess.run(
            command, input=asked["stdin"], capture_output=True, text=True, check=False,
            timeout=asked["run_timeout"],
        )  # fmt: skip
        ran |= {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    except subprocess.TimeoutExpired:
        ran |= {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}
    status = "Success" if ran["return_code"] == 0 else "Failed"
    answer = {"status": status, "message": "", "compile_result": None, "run_result": ran}
    return 200, json.dumps({**answer, "executor_pod_name": None, "files": {}}).encode()


Answer = Callable[[Any, int], tuple[int, bytes]]
Serve = Callable[[Answer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with serving() as start:
        yield lambda answer: f"http://127.0.0.1:{start(answer).server_port}/run_code"


@pytest.fixture(params=["local", "docker", "http"])
def sandbox(request: pytest.FixtureRequest) -> str:
    if request.param == "local":
        if refusal():
            pytest.skip(refusal())
        return "namespaces"
    if request.param == "docker":
        request.getfixturevalue("docker")
        return "docker:python:3.12-slim"
    start: Serve = request.getfixturevalue("serve")
    return start(run_code)


PROGRAMS: dict[str, tuple[str, str, SandboxResult]] = {
    "result": (
        "import sys\nprint(sum(map(int, open(0).read().split())))\nprint('e', file=sys.stderr)",
        "3\n4\n",
        SandboxResult(stdout="7\n", stderr="e\n", status=0, exceeded=""),
    ),
    "unread input": (
        "print('é')",
        "x" * 10**6,
        SandboxResult(stdout="é\n", stderr="", status=0, exceeded=""),
    ),
    "exit": (
        "raise SystemExit(125)",
        "",
        SandboxResult(stdout="", stderr="", status=125, exceeded=""),
    ),
}


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_program_ends_alike_in_each_sandbox(sandbox: str, program: str) -> None:
    text, stdin, result = PROGRAMS[program]
    require_sandbox(sandbox)
    assert open_sandbox(sandbox, LIMITS).run(text, stdin=stdin) == result


@pytest.mark.parametrize(
    ("program", "limit"),
    [(ENDLESS, "time"), ("print('x' * 10**6)", "output")],
    ids=["endless", "verbose"],
)
def test_a_program_beyond_a_limit_is_no_success(sandbox: str, program: str, limit: str) -> None:
    result = open_sandbox(sandbox, LIMITS).run(program)
    assert limit in result.exceeded
    assert len(result.stdout) <= 1024 * LIMITS.output_kib


CASES = json.dumps([{"stdin": "3 4\n", "stdout": "7\n"}, {"stdin": "-1 1", "stdout": "0"}])
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_code_is_rewarded_alike_in_each_sandbox(sandbox: str) -> None:
    assert code(ADD, CASES, 20.0, sandbox=sandbox) == 1.0
    assert code("print(7)", CASES, 20.0, sandbox=sandbox, score="share") == 0.5
    assert code("import sys\nsys.exit(0)", "assert False", 20.0, sandbox=sandbox) == 0.0
    assert code("def f(x):\n    return x", "assert f(3) == 3", 20.0, sandbox=sandbox) == 1.0


def _ask_tool(sandbox: str, program: str) -> str:
    limits = ToolLimits(timeout_s=30.0, max_chars=200)
    toolbox = Toolbox(load_tools(["python"], sandbox), limits=limits, num_processes=1)
    return asyncio.run(toolbox.call(ToolCall("python", {"code": program}))).text


def test_the_tool_runs_programs_in_each_sandbox(sandbox: str) -> None:
    assert _ask_tool(sandbox, "print(6*7)") == "42\n"
    assert "exit status 1" in _ask_tool(sandbox, "1/0")


def test_a_container_has_no_network_few_rights_and_is_removed(
    docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = open_sandbox("docker:image", LIMITS)
    assert sandbox.run(ENDLESS).exceeded == "wall time or memory"
    (docker / "slow").touch()
    monkeypatch.setattr(elsewhere, "_START_S", 0.0)
    with pytest.raises(SandboxError, match="docker:image started none"):
        sandbox.run("print(1)")
    first, second, removed = map(json.loads, (docker / "calls").read_text().splitlines())
    expected = {"--network=none", "--read-only", "--cap-drop=ALL", "--memory=512m", "--rm"}
    assert expected <= set(first)
    (name,) = [argument for argument in second if argument.startswith("--name=")]
    assert removed == ["rm", "--force", name.removeprefix("--name=")]
    assert open_sandbox("docker:image", LIMITS).run("#" * 10**6).exceeded == "program length"


def test_docker_that_answers_nothing_fails_within_the_time_of_a_tool(
    docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest_s = SandboxLimits().wall_s + elsewhere._START_S + elsewhere._REMOVE_S
    assert longest_s < agent_checks._SANDBOX_S  # the least agent.tool_timeout_s with a sandbox
    for name in ("slow", "hung"):
        (docker / name).touch()
    for name in ("_START_S", "_REMOVE_S"):
        monkeypatch.setattr(elsewhere, name, 0.1)
    with pytest.raises(SandboxError, match="docker:image started none"):
        open_sandbox("docker:image", replace(LIMITS, wall_s=0.1)).run("print(1)")


def _broken(asked: Any, number: int) -> tuple[int, bytes]:
    return 200, b'{"status": "SandboxError", "message": "no pod", "run_result": null}'


def _refusing(asked: Any, number: int) -> tuple[int, bytes]:
    return 503, b"busy"


def _waits(seconds: float) -> Answer:
    def answer(asked: Any, number: int) -> tuple[int, bytes]:
        time.sleep(seconds)
        return run_code(asked, number)

    return answer


def _breaks_after(num_answers: int) -> Answer:
    return lambda asked, number: (run_code if number <= num_answers else _broken)(asked, number)


@pytest.mark.parametrize("answer", [_broken, _refusing, lambda *_: (200, b"[]")])
def test_a_server_that_runs_nothing_is_an_error(serve: Serve, answer: Answer) -> None:
    """Never a reward of 0, and no result that a model would learn from."""
    url = serve(answer)
    with pytest.raises(SandboxError, match=r"ran no program: (Value|Type)Error: "):
        code(ADD, CASES, 20.0, sandbox=url, wall_s=0.5)
    with pytest.raises(SandboxError, match="ran no program"):
        require_sandbox(url)


def test_what_is_down_is_an_error(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="ConnectError"):
        open_sandbox("http://127.0.0.1:9/run_code", LIMITS).run("print(1)")
    (docker / "down").touch()
    with pytest.raises(SandboxError, match=r"started none: .*Cannot connect to the Docker daemon"):
        code(ADD, CASES, 20.0, sandbox="docker:image")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="install docker"):
        require_sandbox("docker:image")
    with pytest.raises(SandboxError, match="sandbox=podman:x is none; use namespaces"):
        require_sandbox("podman:x")


def test_a_server_that_refuses_at_first_is_asked_again(serve: Serve) -> None:
    def answer(asked: Any, number: int) -> tuple[int, bytes]:
        return run_code(asked, number) if number > 2 else _refusing(asked, number)

    assert open_sandbox(serve(answer), LIMITS).run("print(1)").stdout == "1\n"


def test_a_server_that_hangs_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "_START_S", 0.1)
    limits = SandboxLimits(wall_s=0.3)
    with pytest.raises(SandboxError, match="ReadTimeout"):
        open_sandbox(serve(_waits(3.0)), limits).run("print(1)")


def test_many_calls_of_a_tool_end_alike_when_the_sandbox_goes_down(serve: Serve) -> None:
    """As an error of the conversation, which is left out: the model would read it as its own."""
    limits = ToolLimits(timeout_s=30.0, max_chars=200)
    tools = load_tools(["python"], serve(_breaks_after(1)))  # behind the trial
    toolbox = Toolbox(tools, limits=limits, num_processes=1)

    async def call_all() -> list[object]:
        calls = (toolbox.call(ToolCall("python", {"code": "1"})) for _ in range(70))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    results = asyncio.run(call_all())
    assert [result for result in results if not isinstance(result, SandboxError)] == []
    assert any("SandboxError: 'no pod'" in str(result) for result in results)


def test_a_reward_that_waited_too_long_for_a_server_is_an_error(serve: Serve) -> None:
    with pytest.raises(SandboxError, match=r"no time was left; raise reward.timeout_s"):
        code(ADD, CASES, 0.6, sandbox=serve(_waits(0.6)))


def test_a_program_that_takes_all_the_time_gets_the_share_that_it_passed(serve: Serve) -> None:
    hangs_on_negatives = f"n = int(input().split()[0])\nif n < 0: {ENDLESS}\nprint(n)"
    cases = [{"stdin": f"{n}\n", "stdout": f"{n}\n"} for n in (1, -1, -2, 2)]
    assert (
        code(hangs_on_negatives, json.dumps(cases), 1.5, score="share", sandbox=serve(run_code))
        == 0.25
    )


def test_rows_are_left_out_when_the_server_goes_down(serve: Serve) -> None:
    """The reward of a response that was not run is unknown, whatever the others get."""
    args: dict[str, Any] = {"sandbox": serve(_breaks_after(3)), "wall_s": 1.0}
    answers = ['[{"stdin": "", "stdout": "1"}]'] * 3
    with closing(scorer_of("code", args=args, on_error="leave_out", num_processes=1)) as scorer:
        scores = scorer.score(inputs("print(1)", "print(2)", "print(1)", answers=answers))
    assert scores.reward_parts_BK[:2, 0].tolist() == [1.0, 0.0]
    assert scores.is_left_out_B is not None
    assert scores.is_left_out_B.tolist() == [False, False, True]
