"""Chapter 12. A seccomp filter: the system calls that a program may make, as a list of what is allowed; the others fail with EACCES.

Python takes that error, unlike EPERM, for a kernel without the call, and tries another. Not on the list are, among others, clone, fork and
execve (so one process with one thread), socket, kill, ptrace, prctl, mount and prlimit. Files may be opened only where namespaces hold,
so where none is in sight but the program's own. The filter is classic BPF: it sees numbers of calls and of arguments, never a path that a
pointer leads to.
"""

import ctypes
import platform

# Numbers for x86_64 and aarch64, from the kernel's tables; None where an architecture lacks the call.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "readv": (19, 65), "writev": (20, 66), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "dup": (32, 23), "dup2": (33, None), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160),
    "gettimeofday": (96, 169), "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "pselect6": (270, 72), "ppoll": (271, 73), "dup3": (292, 24),
    "getrandom": (318, 278),
}  # fmt: skip
FILES = {
    "open": (2, None), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "pread64": (17, 67), "pwrite64": (18, 68),
    "access": (21, None), "fsync": (74, 82), "ftruncate": (77, 46), "getcwd": (79, 17), "chdir": (80, 49), "rename": (82, None),
    "mkdir": (83, None), "rmdir": (84, None), "unlink": (87, None), "readlink": (89, None), "umask": (95, 166), "getdents64": (217, 61),
    "openat": (257, 56), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "readlinkat": (267, 78), "faccessat": (269, 48), "renameat2": (316, 276), "statx": (332, 291), "faccessat2": (439, 439),
}  # fmt: skip
FCNTL = (72, 25)
COMMANDS = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC: F_SETOWN would let the kernel send signals to others
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and AUDIT_ARCH
X32 = 0x40000000  # on x86_64 a second numbering of the calls begins here

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
KILL, REFUSE, ALLOW = 0x80000000, 0x00050000 | 13, 0x7FFF0000  # SECCOMP_RET_KILL_PROCESS, _ERRNO | EACCES, _ALLOW
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data, little endian


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = [("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(Instruction))]


def seccomp_program(files: bool, machine: str | None = None) -> Program:
    """The filter in BPF.

    Args:
        files: whether calls are allowed that open, list, make and delete files.
        machine: "x86_64" or "aarch64"; None for this one.

    Raises:
        OSError: another machine, or another system than Linux.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES or platform.system() != "Linux":
        raise OSError(f"there is no filter for {platform.system()} on {machine}")
    column, architecture = MACHINES[machine]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    lines += [(JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in [*ALLOWED.values(), *(FILES.values() if files else ())]:
        if numbers[column] is not None:
            lines += [(JUMP_EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ALLOW)]
    # fcntl: its command is argument 1, an int, so the lower half of eight bytes.
    lines += [(JUMP_EQUAL, 0, 1 + 2 * len(COMMANDS), FCNTL[column]), (LOAD, 0, 0, ARGUMENTS + 8)]
    for command in COMMANDS:
        lines += [(JUMP_EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW)]
    lines += [(RETURN, 0, 0, REFUSE)]
    return Program(len(lines), (Instruction * len(lines))(*(Instruction(*line) for line in lines)))
