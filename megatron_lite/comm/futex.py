"""Sleep on a word of shared memory until somebody changes it: Linux futexes, which Python has no call for.

The kernel compares the word with the value last seen before it puts the caller to sleep, so a change in between is not
missed. A sleeper takes no core from the ranks it waits for, and is woken at once instead of at its next look.
"""

import ctypes

SYS_FUTEX = 202  # x86-64, the only machine with shared boards (comm/shared.py)
WAIT, WAKE, EVERYBODY = 0, 1, (1 << 31) - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Futex:
    """The two calls, on the low 32 bits of the word at an address."""

    def __init__(self, longest: float):
        """A sleeper returns after `longest` seconds at the latest."""
        self.longest = _Timespec(int(longest), int(longest % 1 * 1e9))
        self.limit = ctypes.byref(self.longest)
        self.call = ctypes.CDLL(None).syscall  # lets other threads of this process run meanwhile
        self.call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32,
                              ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]  # fmt: skip

    def wait(self, address: int, seen: int) -> None:
        """Sleep while the word is `seen`. May return early (a signal): look again."""
        self.call(SYS_FUTEX, address, WAIT, seen & 0xFFFFFFFF, self.limit, None, 0)

    def wake(self, address: int) -> None:
        """Wake all who sleep on the word; call it after the change."""
        self.call(SYS_FUTEX, address, WAKE, EVERYBODY, None, None, 0)
