"""The filter of system calls that bubblewrap puts on a program, as Linux wants it: a classic BPF program.

It makes one program one process, whose memory RLIMIT_AS then bounds as a whole. Without it a program of 1 GiB may start
others, and may hold memory that belongs to no process: files in memory, System V segments, and shared mappings of which
only one page is still mapped.

A refused call returns ENOSYS, as on a kernel that lacks it, so that libraries take their other way. The layout of the
instructions is `struct sock_filter` of linux/filter.h, that of the data `struct seccomp_data` of linux/seccomp.h.
"""

import platform
import struct

from verl_ba.paper.scoring.errors import SandboxError

FIRST_NEW = 424
"""Every call from this number on (Linux 5.1 and later) is refused; they have the same numbers on both architectures.

Among them are io_uring, the second interface for mounts, pidfd_getfd, clone3 and memfd_secret. C libraries do without
them, because they run on older kernels, too. On x86_64 this refuses the calls of the x32 ABI as well."""

# name -> number on (x86_64, aarch64), of arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h; None: not there
REFUSED = {
    # other processes; a thread is made by clone, see below
    "fork": (57, None),
    "vfork": (58, None),
    # memory that neither RLIMIT_AS nor the size of /tmp counts
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "io_setup": (206, 0),
    # namespaces, which would give the capabilities to mount
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    # a network that is not in the network namespace: AF_VSOCK reaches the host of a virtual machine
    "socket": (41, 198),
    # parts of the kernel that have no use here and a history of faults
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}
_CLONE, _MMAP = (56, 220), (9, 222)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH_…

_CLONE_THREAD = 0x00010000
_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_SHARED_ANONYMOUS = 0x21  # the bit that MAP_SHARED and MAP_SHARED_VALIDATE have in common, and MAP_ANONYMOUS

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data; an argument's low half comes first
_ALLOW, _KILL_PROCESS, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 38


def program(machine: str | None = None) -> bytes:
    """Return the filter for this machine (`platform.machine()`), eight bytes per instruction.

    SandboxError: the machine is neither x86_64 nor aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxError(
            f"the sandbox's filter of system calls knows {' and '.join(_ARCHITECTURES)}, and this machine is {machine}. "
            "Set SANDBOX_FUSION_URL to a Sandbox Fusion server"
        )
    column, architecture = _ARCHITECTURES[machine]
    allow, refuse = [(_RETURN, 0, 0, _ALLOW)], [(_RETURN, 0, 0, _ENOSYS)]
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_unless(_JUMP_IF_EQUAL, architecture, [(_RETURN, 0, 0, _KILL_PROCESS)]),  # a 32-bit call on a 64-bit kernel
        (_LOAD, 0, 0, _NUMBER),
        *_if(_JUMP_IF_AT_LEAST, FIRST_NEW, refuse),
    ]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            instructions += _if(_JUMP_IF_EQUAL, number, refuse)
    thread_only = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_AND, 0, 0, _CLONE_THREAD | _NAMESPACES),
        *_unless(_JUMP_IF_EQUAL, _CLONE_THREAD, refuse),
        *allow,
    ]
    not_shared = [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 3),
        (_AND, 0, 0, _SHARED_ANONYMOUS),
        *_if(_JUMP_IF_EQUAL, _SHARED_ANONYMOUS, refuse),
        *allow,
    ]
    instructions += _if(_JUMP_IF_EQUAL, _CLONE[column], thread_only)
    instructions += _if(_JUMP_IF_EQUAL, _MMAP[column], not_shared)
    instructions += allow
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


_Instructions = list[tuple[int, int, int, int]]


def _if(test: int, value: int, then: _Instructions) -> _Instructions:
    return [(test, 0, len(then), value), *then]


def _unless(test: int, value: int, then: _Instructions) -> _Instructions:
    return [(test, len(then), 0, value), *then]
