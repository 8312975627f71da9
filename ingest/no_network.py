"""Takes the network from this process and its children, without rights of any kind: for code that reads hostile files.

On Linux a seccomp filter refuses to make sockets, so that a library in C has none either; it cannot be taken off again
(kernel documentation, userspace-api/seccomp_filter). Everywhere an audit hook refuses what Python would do with sockets.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2  # prctl(2)
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 13  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EACCES
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF: ld abs word, jeq, jge, ret
_NUMBER_AT, _MACHINE_AT = 0, 4  # offsets in seccomp_data
_IO_URING = 425  # io_uring_setup(2), which makes sockets without socket(2)
_X32 = 0x40000000  # calls of the x32 interface of x86-64
# machine → its AUDIT_ARCH, and the numbers of socket(2) and socketpair(2)
_MACHINES = {"x86_64": (0xC000003E, (41, 53)), "aarch64": (0xC00000B7, (198, 199))}


def cut_network() -> bool:
    """No sockets from here on, for all threads started later. Whether the system enforces it, or only Python does."""
    enforced = _filter()
    sys.addaudithook(_refuse)
    return enforced


def _refuse(event: str, arguments: object) -> None:
    if event.startswith("socket."):
        raise PermissionError("a parser has no network")


def _filter() -> bool:
    """Install the filter, where this machine has one."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return False
    program = _program(*_MACHINES[platform.machine()])
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    unused = ctypes.c_ulong(0)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), unused, unused, unused):
        return False
    pointer = ctypes.create_string_buffer(head)
    return bool(libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER_MODE), pointer, unused, unused) == 0)


def _program(machine: int, calls: tuple[int, ...]) -> bytes:
    """Refuses the calls, and any call made through another of the machine's interfaces."""
    refused = (*calls, _IO_URING)
    steps = [
        (_LOAD, 0, 0, _MACHINE_AT),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, len(refused) + 1, 0, _X32),
        *((_EQUAL, len(refused) - place, 0, call) for place, call in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
