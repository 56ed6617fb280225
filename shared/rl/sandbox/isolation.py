"""Chapter 12. Isolation of a program: an unprivileged user, Linux namespaces, a seccomp filter and resource limits.

Namespaces (user, mount, process, network, IPC, host name) leave the program alone: the root of its file system is empty and read-only,
`/tmp` is its own and small, there is no `/proc`, no other process, no network device. Containers often forbid namespaces. Then the filter
stands alone, and a program can open no file at all. The limits hold in both cases.
"""

import ctypes
import os
import platform
import resource
from contextlib import suppress
from dataclasses import dataclass, fields

from shared.rl.sandbox.filter import Program

NOBODY = 65534
NEW_USER, NEW_MOUNTS, NEW_PROCESSES = 0x10000000, 0x00020000, 0x20000000  # CLONE_NEW*
NEW_NETWORK, NEW_IPC, NEW_HOST_NAME = 0x40000000, 0x08000000, 0x04000000
READ_ONLY, SAFE, REMOUNT, BIND, PRIVATE = 1, 2 | 4 | 8, 32, 4096, 16384 | 1 << 18  # MS_*; SAFE: no setuid, no devices, no execution
DETACH = 2  # MNT_DETACH
SET_DUMPABLE, SET_DEATH_SIGNAL, SET_FILTER, SET_NO_NEW_PRIVILEGES = 4, 1, 22, 38  # PR_*
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPABILITIES_VERSION = 0x20080522
SIGKILL = 9

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        cpu_seconds: of computing, for all its cases together.
        wall_seconds: of a clock, sleeping included.
        memory_mib: of address space, the interpreter's own 40 or so included.
        folder_mib: in its own `/tmp`, which exists where namespaces hold.
        output_kib: of results, as JSON.
        program_kib: of its text.
        open_files: at a time, the four that it has from the start included.
    """

    cpu_seconds: float = 1.0
    wall_seconds: float = 4.0
    memory_mib: int = 256
    folder_mib: int = 16
    output_kib: int = 256
    program_kib: int = 64
    open_files: int = 32

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
                raise ValueError(f"The sandbox's limit {field.name} is {value!r}: give a positive number.")

    def __str__(self) -> str:
        return (f"{self.cpu_seconds:g} s of CPU and {self.wall_seconds:g} s in all, {self.memory_mib} MiB, one process with one thread, "
                f"{self.open_files} open files, {self.output_kib} KiB of results")  # fmt: skip


def check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def mount(source: bytes | None, target: bytes, flags: int, options: bytes | None = None) -> None:
    kind = b"tmpfs" if options else None
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {target.decode()}")


def become_nobody() -> None:
    """Leave the superuser's rights, where this process has them; in a container without a second user it keeps the number 0."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)


def enter_namespaces() -> None:
    """Move this process into namespaces of its own, with an empty, read-only file system.

    Raises:
        OSError: this machine does not let it. This process may stand half inside, which does no harm.
    """
    user, group = os.geteuid(), os.getegid()
    libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # after a change of user /proc/self belongs to root otherwise
    check(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_IPC | NEW_HOST_NAME), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    mount(None, b"/", PRIVATE)
    mount(b"sandbox", b"/tmp", SAFE, b"size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir("tmp")
    check(libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")  # the old root then lies over the new one
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    mount(None, b"/", REMOUNT | BIND | READ_ONLY | SAFE)


def enter_own_folder(mib: int) -> None:
    """Give the next child a process namespace, and it and this process an empty `/tmp`. Both end with them."""
    check(libc.unshare(NEW_PROCESSES | NEW_MOUNTS), "unshare")
    mount(b"sandbox", b"/tmp", SAFE, f"size={mib}m,nr_inodes=1024,mode=700".encode())
    os.chdir("/tmp")


def hide() -> None:
    """Let no process of the same user look into this one's memory (ptrace, /proc), nor into its children's."""
    check(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def end_with_parent() -> None:
    check(libc.prctl(SET_DEATH_SIGNAL, SIGKILL, 0, 0, 0), "prctl")


def confine(limits: Limits, program: Program) -> None:
    """Take all rights from this process for good: limits first, then capabilities, then all system calls but the filter's."""
    cpu = int(limits.cpu_seconds) + 2  # seconds, whole ones: the keeper looks more closely and is earlier
    most = {"CPU": cpu, "AS": limits.memory_mib << 20, "FSIZE": limits.folder_mib << 20, "NOFILE": limits.open_files, "NPROC": 0, "CORE": 0}
    for name, value in most.items():
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "capset")
    end_with_parent()
    check(libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    check(libc.prctl(SET_FILTER, 2, ctypes.byref(program), 0, 0), "seccomp")
