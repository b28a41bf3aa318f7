"""glibc's allocator, tuned for training: large activations stay mapped between steps.

Note: why. glibc maps every large block anew and gives it back when it is freed, so each step page-faults all its
activations again. Kept in the heap they are touched once.
"""

import ctypes
import functools
import platform

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_SETTINGS = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 * 2**20))


@functools.cache
def tune_malloc() -> bool:
    """Keeps freed memory in the process; call it before the first tensor. Returns whether it could (glibc on Linux).

    Saves: time: no page faults for activations after the first step.
    Costs: memory freed stays with the process.
    Ref: mallopt(3).
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [bool(mallopt(setting, value)) for setting, value in _SETTINGS]
    return all(taken)
