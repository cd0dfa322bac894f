"""What all tests share: few threads, and nothing that reaches for the network."""

from __future__ import annotations

import os
from pathlib import Path

# Set before torch is imported anywhere: the machines that run tests have few cores, and tests run beside servers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides when it is imported. Without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
