"""Puts itself into a sandbox and runs a program there. A script of its own, for Linux.

``python -I -S sandbox_child.py FD``: reads a JSON object from standard input, see `Sandbox.run`.
Standard output and error become the program's. FD gets one line of JSON: ``{"refused": reason}``,
or the program's wait status ``{"status": 0}``.

It takes namespaces of its own (user, mounts, processes, network, System V objects, host name). It
becomes the only user of that user namespace, and sees a new root: the interpreter and the system's
libraries, read-only, and a small /tmp. There is no /proc. A second process, number 1 of its
namespace, starts the program and takes every other process with it when it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Callable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NET = (
    *(0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000),
)
_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
_NOSUID, _NODEV, _DETACH = 2, 4, 2
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_PIVOT_ROOT, _MOUNT_SETATTR = 155, 442  # x86-64
_SET_PDEATHSIG, _SET_SECCOMP, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 22, 24, 38
_FILTER = 2
_CAPABILITY_VERSION, _LAST_CAPABILITY = 0x20080522, 63

_INNER_ID = 1000
_OUTER_ID = 60_001
"""The user that a root's sandbox runs as: the limit of processes does not bind user 0."""

_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_ROOT = "/tmp"  # where the new root is assembled, in a namespace of its own

_DENIED = """
socket 41, shmget 29, semget 64, msgget 68, ptrace 101, syslog 103, pivot_root 155, chroot 161,
acct 163, mount 165, umount2 166, swapon 167, swapoff 168, reboot 169, init_module 175,
delete_module 176, quotactl 179, mq_open 240, kexec_load 246, add_key 248, request_key 249,
keyctl 250, unshare 272, perf_event_open 298, name_to_handle_at 303, open_by_handle_at 304,
setns 308, process_vm_readv 310, process_vm_writev 311, kcmp 312, finit_module 313,
memfd_create 319, kexec_file_load 320, bpf 321, userfaultfd 323, io_uring_setup 425,
io_uring_enter 426, io_uring_register 427, open_tree 428, move_mount 429, fsopen 430,
fsconfig 431, fsmount 432, fspick 433, pidfd_getfd 438, mount_setattr 442, memfd_secret 447
"""
"""System calls of x86-64, with their numbers, that the program gets EPERM for."""


class NotAllowed(Exception):
    """The kernel does not allow a step; says which, and why."""


def main() -> None:
    """Set everything up, then start the program and report how it ended."""
    report = int(sys.argv[1])
    os.set_inheritable(report, False)  # noqa: FBT003
    task = json.load(sys.stdin)
    try:
        if task["level"] == "namespaces":
            _take_namespaces()
            _build_root(task)
        else:
            os.chdir(task["folder"])
            _write_files(".", task)
        child = os.fork()
    except (NotAllowed, OSError) as error:
        os.write(report, json.dumps({"refused": str(error)}).encode() + b"\n")
        return
    if child == 0:
        _be_first_process(report, task)
    os.waitpid(child, 0)


def _be_first_process(report: int, task: dict[str, Any]) -> None:
    """Start the program, wait for it, and end; the kernel then kills what it left behind."""
    _LIBC.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)
    try:
        program = os.fork()
        if program == 0:
            _run(task, report)
        while True:
            pid, status = os.wait()
            if pid == program:
                answer: dict[str, object] = {"status": status}
                break
    except BaseException as error:  # nothing above this frame may run in a second process
        answer = {"refused": str(error)}
    os.write(report, json.dumps(answer).encode() + b"\n")
    if task["level"] == "limits":
        os.kill(0, 9)  # what is left of the group, and this process
    os._exit(0)


def _run(task: dict[str, Any], report: int) -> None:
    try:
        folder = "/tmp" if task["level"] == "namespaces" else "."
        files = "/" if task["level"] == "namespaces" else "./"
        os.dup2(os.open(f"{files}input", os.O_RDONLY), 0)
        os.chdir(folder)
        limits = task["limits"]
        for name, (soft, hard) in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (soft, hard))
        _give_up_rights()
        command = [task["python"], "-I", "-S", "-B", "-X", "utf8", f"{files}program.py"]
        os.execve(task["python"], command, {})
    except BaseException as error:
        os.write(report, json.dumps({"refused": f"{error!r} before the program"}).encode() + b"\n")
    os._exit(127)


def _take_namespaces() -> None:
    """Enter namespaces of its own, as their only user."""
    _check_machine()
    user, group = os.geteuid(), os.getegid()
    is_root = user == 0
    maps = {"uid_map": _OUTER_ID if is_root else user, "gid_map": _OUTER_ID if is_root else group}
    wait_for_maps = _write_maps_from_outside(maps) if is_root else None
    flags = _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_UTS
    _check(_LIBC.unshare(flags), "no namespaces of its own (unshare)")
    if wait_for_maps is not None:
        wait_for_maps()
    else:
        _write("/proc/self/setgroups", "deny")
        for name, outer in maps.items():
            _write(f"/proc/self/{name}", f"{_INNER_ID} {outer} 1")


def _write_maps_from_outside(maps: dict[str, int]) -> Callable[[], None]:
    """Start a process that maps users, for which rights in the outer namespace are needed."""
    receive, send = os.pipe()
    target = os.getpid()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(send)
            os.read(receive, 1)
            for name, outer in maps.items():
                _write(f"/proc/{target}/{name}", f"{_INNER_ID} {outer} 1")
            os._exit(0)
        finally:
            os._exit(1)  # nothing above this frame may run in a second process

    def wait() -> None:
        os.close(send)
        if os.waitpid(helper, 0)[1]:
            raise NotAllowed(f"user {_OUTER_ID} cannot be mapped into a user namespace")

    return wait


def _build_root(task: dict[str, Any]) -> None:
    """Assemble a root of read-only system folders and a small /tmp, and move into it."""
    _check(_LIBC.mount(b"none", b"/", None, _REC | _PRIVATE, None), "mounts cannot be private")
    paths = [path for path in (*_SYSTEM, *_DEVICES, *task["folders"]) if os.path.exists(path)]
    # Opened while this process still owns private folders on the way, as /root.
    sources = {path: os.open(path, os.O_PATH) for path in paths if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in paths if os.path.islink(path)}
    os.setresgid(_INNER_ID, _INNER_ID, _INNER_ID)
    with open("/proc/self/setgroups") as file:
        can_set_groups = file.read().strip() == "allow"
    if os.getgroups() and can_set_groups:
        os.setgroups([])
    os.setresuid(_INNER_ID, _INNER_ID, _INNER_ID)
    os.umask(0o022)
    _mount_tmpfs(_ROOT, "size=4m,nr_inodes=2k,mode=755")
    os.mkdir(f"{_ROOT}/tmp")
    _mount_tmpfs(f"{_ROOT}/tmp", f"size={task['tmp_bytes']},nr_inodes=4k,mode=700")
    for path, source in sources.items():
        _bind(source, _ROOT + path)
    for path, target in links.items():
        os.makedirs(os.path.dirname(_ROOT + path), exist_ok=True)
        os.symlink(target, _ROOT + path)
    _write_files(_ROOT, task)
    _set_attributes(_ROOT, _ATTR_READ_ONLY | _ATTR_NOSUID | _ATTR_NODEV)
    os.chdir(_ROOT)
    _check(_LIBC.syscall(_PIVOT_ROOT, b".", b"."), "no root of its own (pivot_root)")
    _check(_LIBC.umount2(b".", _DETACH), "the old root stays (umount2)")
    os.chdir("/")


def _write_files(folder: str, task: dict[str, Any]) -> None:
    for name, text in (("program.py", task["program"]), ("input", task["stdin"])):
        with open(f"{folder}/{name}", "w", encoding="utf-8", errors="replace") as file:
            file.write(text)


def _bind(source: int, target: str) -> None:
    """Show an open folder or file at ``target``, read-only."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    origin = f"/proc/self/fd/{source}".encode()
    _check(_LIBC.mount(origin, target.encode(), None, _BIND | _REC, None), f"no mount of {target}")
    is_device = "/dev/" in target
    attributes = _ATTR_READ_ONLY | _ATTR_NOSUID | (0 if is_device else _ATTR_NODEV)
    _set_attributes(target, attributes, flags=_AT_RECURSIVE)


def _mount_tmpfs(target: str, options: str) -> None:
    done = _LIBC.mount(b"tmpfs", target.encode(), b"tmpfs", _NOSUID | _NODEV, options.encode())
    _check(done, f"no tmpfs at {target}")


def _set_attributes(path: str, attributes: int, *, flags: int = 0) -> None:
    given = struct.pack("QQQQ", attributes, 0, 0, 0)  # set, clear, propagation, user namespace
    done = _LIBC.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, given, ctypes.c_size_t(len(given))
    )
    _check(done, f"{path} cannot be made read-only (mount_setattr, Linux 5.12)")


def _give_up_rights() -> None:
    """Drop every capability for good, and filter system calls."""
    for capability in range(_LAST_CAPABILITY + 1):
        _LIBC.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _check(_LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "rights can be gained (no_new_privs)")
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _check(_LIBC.capset(header, bytes(24)), "capabilities cannot be dropped (capset)")
    _check_machine()
    code = _filter()
    program = ctypes.create_string_buffer(code)
    argument = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(program))
    done = _LIBC.prctl(_SET_SECCOMP, _FILTER, argument, 0, 0)
    _check(done, "system calls cannot be filtered (seccomp)")


def _filter() -> bytes:
    """Return the filter as the kernel reads it: linux/filter.h."""
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 6
    allow, kill, deny, absent = 0x7FFF0000, 0x80000000, 0x50001, 0x50026

    def step(code: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_so, if_not, operand)

    new_namespaces = (
        _NEW_USER | _NEW_MOUNTS | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_UTS | 0x2000000 | 0x80
    )
    steps = [
        *(step(load, 4), step(equal, 0xC000003E, 1, 0), step(end, kill)),  # x86-64 alone
        *(step(load, 0), step(at_least, 0x40000000, 0, 1), step(end, deny)),  # x32
        # The C library then falls back to clone, whose flags can be read.
        *(step(equal, 435, 0, 1), step(end, absent)),
        *(step(equal, 56, 0, 4), step(load, 16), step(any_bit, new_namespaces, 0, 1)),
        *(step(end, deny), step(end, allow)),
    ]
    for call in _DENIED.split(","):
        steps += [step(equal, int(call.split()[1]), 0, 1), step(end, deny)]
    return b"".join([*steps, step(end, allow)])


def _check_machine() -> None:
    if platform.machine() != "x86_64":
        raise NotAllowed(
            f"system calls are filtered on x86_64 alone, and this is {platform.machine()}"
        )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(done: int, failure: str) -> None:
    if done < 0:
        raise NotAllowed(f"{failure}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
