"""The threads of the CPU kernels: numba's own, one kernel at a time."""

from __future__ import annotations

import threading
import warnings

import numba
import torch
from numba.core.errors import NumbaIRAssumptionWarning

# Multiply-adds from which a second thread pays for being woken.
_WORK_FOR_THREADS = 1_000_000
# Numba's own thread pool, since an OpenMP one would spin beside torch's. It allows one call at a time, hence the lock.
numba.config.THREADING_LAYER = "workqueue"  # type: ignore[attr-defined]
# Said while inlined choices between two values are compiled; the compiler goes on correctly.
warnings.filterwarnings("ignore", category=NumbaIRAssumptionWarning)
kernel_lock = threading.Lock()
_thread_state = threading.local()


def kernel_threads(work: int) -> int:
    """Set and return the threads of the next kernel: as many as torch has, but one for a little work.

    ``work``: multiply-adds. Numba keeps the number per calling thread.
    """
    available: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    wanted = min(torch.get_num_threads(), available) if work >= _WORK_FOR_THREADS else 1
    if getattr(_thread_state, "count", None) != wanted:
        numba.set_num_threads(wanted)
        _thread_state.count = wanted
    return wanted
