"""What programs in the sandbox try, and what they get. Each ends within its limits."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hybridrl.errors import SandboxError
from hybridrl.processes.sandbox import Sandbox, SandboxLimits, SandboxResult

LIMITS = SandboxLimits(
    cpu_s=1.0, wall_s=5.0, memory_mib=256, processes=6, files_mib=2, output_kib=64
)
PTRACE, UNSHARE, SYSLOG, MEMFD = 101, 272, 103, 319  # x86-64
VSOCK = 40


def refusal() -> str:
    try:
        Sandbox(LIMITS).check()
    except SandboxError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())


def run(program: str, *, stdin: str = "", limits: SandboxLimits = LIMITS) -> SandboxResult:
    return Sandbox(limits).run(textwrap.dedent(program), stdin=stdin)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Things of this machine that a program may reach for, all open to everybody."""
    secret = Path("/var/tmp") / f"secret-{os.getpid()}"
    secret.write_text("ESCAPED")
    secret.chmod(0o666)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(["sleep", "60"]) as victim,
    ):
        yield {"secret": str(secret), "port": server.getsockname()[1], "pid": victim.pid}
        assert victim.poll() is None
        victim.kill()
    assert secret.read_text() == "ESCAPED"
    secret.unlink()


SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {
    "read a file outside": "print(open({secret!r}).read())",
    "read it through a symbolic link": (
        "import os\nos.symlink({secret!r}, 'link')\nprint(open('link').read())"
    ),
    "climb out of the root": "print(open('/../../..' + {secret!r}).read())",
    "write outside": "open({secret!r}, 'w').write('x')\nprint('ESCAPED')",
    "write to the interpreter": (
        "import os\nopen(os.path.dirname(os.__file__) + '/x.py', 'w')\nprint('ESCAPED')"
    ),
    "change the root": "open('/x', 'w')\nprint('ESCAPED')",
    "change its own program": "open('/program.py', 'a')\nprint('ESCAPED')",
    "read the processes": "import os\nos.listdir('/proc')\nprint('ESCAPED')",
    "connect to this machine": (
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('ESCAPED')"
    ),
    "open a raw socket": (
        "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('ESCAPED')"
    ),
    "reach the host of a virtual machine": (
        f"import socket\nsocket.socket({VSOCK}, socket.SOCK_STREAM)\nprint('ESCAPED')"
    ),
    "signal a process outside": "import os\nos.kill({pid}, 9)\nprint('ESCAPED')",
    "trace a process outside": (
        SYSCALL + f"print(libc.syscall({PTRACE}, 16, {{pid}}, 0, 0) or 'ESCAPED')"
    ),
    "trace its parent": SYSCALL + f"print(libc.syscall({PTRACE}, 16, 1, 0, 0) or 'ESCAPED')",
    "be traced by its parent": (
        SYSCALL + f"print('ESCAPED' if libc.syscall({PTRACE}, 0, 0, 0, 0) == 0 else '')"
    ),
    "find a folder that is not read-only": (
        "import os\nfor path in ('/', '/usr', os.path.dirname(os.__file__)):\n"
        "    if not os.statvfs(path).f_flag & os.ST_RDONLY:\n        print('ESCAPED', path)"
    ),
    "make a user namespace": (SYSCALL + f"print(libc.syscall({UNSHARE}, 0x10000000) or 'ESCAPED')"),
    "clone into a user namespace": (
        SYSCALL + "print('ESCAPED' if libc.syscall(56, 0x10000011, 0, 0, 0, 0) > 0 else '')"
    ),
    "read the kernel's log": SYSCALL + f"print(libc.syscall({SYSLOG}, 10, 0, 0) + 1 and 'ESCAPED')",
    "use memory as a file": SYSCALL + f"print(libc.syscall({MEMFD}, b'x', 0) + 1 and 'ESCAPED')",
    "mount": SYSCALL + "print(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) or 'ESCAPED')",
    "become another user": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "raise a limit": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))\nprint('ESCAPED')"),
    "use a device": "import os\nos.mknod('/tmp/vda', 0o60666, 65024)\nprint('ESCAPED')",
    "use an inherited file": (
        "import os\nfor fd in range(3, 60):\n    try:\n        os.fstat(fd)\n"
        "    except OSError:\n        continue\n"
        "    if not os.path.samestat(os.fstat(fd), os.stat('/program.py')):\n"
        "        print('ESCAPED', fd)"
    ),
    "read the environment": (
        "import os\nprint('ESCAPED' if set(os.environ) - {{'LC_CTYPE'}} else '')"
    ),
}


@pytest.mark.shows("R5.7")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_escape_attempt_fails(name: str, outside: dict[str, object]) -> None:
    result = run(ATTACKS[name].format(**outside))
    assert "ESCAPED" not in result.stdout
    assert not result.exceeded


HOGS = {
    "processor time": ("while True: pass", "processor time"),
    "processor time, signal ignored": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "processor time",
    ),
    "sleep": ("import time\ntime.sleep(600)", "wall time"),
    "output": ("while True: print('x' * 1000)", "output"),
    "error output": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
}


@pytest.mark.parametrize("name", HOGS)
def test_a_program_that_never_ends_is_killed(name: str) -> None:
    program, exceeded = HOGS[name]
    wall_s = 0.5 if name == "sleep" else 30.0  # others may have the processor
    result = run(program, limits=replace(LIMITS, wall_s=wall_s))
    assert (result.exceeded, result.status < 0) == (exceeded, True)
    assert max(len(result.stdout), len(result.stderr)) <= 64 * 1024


def test_memory_files_and_processes_are_bounded() -> None:
    result = run(
        """
        import os, time
        try:
            bytearray(1 << 30)
        except MemoryError:
            print("memory")
        written = 0
        for name in range(40):  # 40 MiB in files of 1 MiB
            try:
                with open(str(name), "wb") as file:
                    file.write(bytes(1 << 20))
                written += 1
            except OSError:
                print("files", written <= 2)
                break
        started = 1
        for _ in range(100):
            try:
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                started += 1
            except BlockingIOError:
                print("processes", started)
                break
        """
    )
    assert result.stdout.split("\n") == ["memory", "files True", "processes 6", ""]
    big = run("open('big', 'wb').write(bytes(3 << 20))\nprint('ESCAPED')")
    assert "ESCAPED" not in big.stdout


@pytest.mark.shows("R5.7")
def test_a_fork_bomb_ends_and_leaves_nothing() -> None:
    before = {process.pid for process in psutil.process_iter()}
    result = run(
        """
        import os, sys
        while True:
            try:
                os.fork()
                os.setsid()
            except OSError:
                pass
        """
    )
    assert result.exceeded in ("processor time", "wall time")
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "/program.py" in (p.info["cmdline"] or [])]


@pytest.mark.shows("R5.7")
def test_a_daemon_ends_with_its_program() -> None:
    marker = f"86399.{os.getpid()}"
    program = f"""
        import os, subprocess, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv("/bin/sleep", ["sleep", "{marker}"])
            os._exit(0)
        time.sleep(0.2)
        """
    assert run(program).status == 0
    running = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", marker] not in running


def test_a_program_may_kill_itself_and_its_parent_without_harm() -> None:
    assert run("import os\nos.kill(1, 9)\nos.kill(1, 15)\nprint('lives')").stdout == "lives\n"
    assert "No such process" in run("import os\nos.kill(-1, 9)").stderr  # it is alone
    assert run("import os\nos.kill(os.getpid(), 11)").status == -11


def test_a_program_has_standard_input_a_library_and_a_folder() -> None:
    program = """
        import asyncio, json, subprocess, sys, threading
        open("note", "w").write(sys.stdin.read())
        print(json.dumps(open("note").read()), subprocess.check_output(["echo", "hi"]))
        asyncio.run(asyncio.sleep(0))
        thread = threading.Thread(target=print, args=("ä",)); thread.start(); thread.join()
        """
    assert run(program, stdin="1\n2").stdout == "\"1\\n2\" b'hi\\n'\nä\n"
    assert run("import sys\nsys.exit(3)").status == 3


UNSHARE_COMMAND = shutil.which("unshare")


@pytest.mark.skipif(UNSHARE_COMMAND is None, reason="util-linux")
def test_where_namespaces_are_forbidden_it_is_refused() -> None:
    program = """
        from hybridrl.processes.sandbox import Sandbox, SandboxLimits
        try:
            Sandbox(SandboxLimits()).check()
        except Exception as error:
            print(type(error).__name__, error)
        print(Sandbox(SandboxLimits(), "limits").run("print('ran')").stdout)
        """
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = [str(UNSHARE_COMMAND), "-r", "sh", "-c", shell, sys.executable]
    done = subprocess.run(
        [*command, textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "SandboxError programs cannot be held in a sandbox on this machine" in done.stdout
    assert "no namespaces of its own (unshare): No space left on device" in done.stdout
    assert "sandbox=limits" in done.stdout
    assert done.stdout.endswith("ran\n\n")
