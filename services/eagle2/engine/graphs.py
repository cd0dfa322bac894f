"""Recorded forwards: all launches of a step as one CUDA graph, one for each of a few numbers of rows.

A step of a large model launches a thousand kernels, and at small batches launching them takes longer than running
them. A recorded step is launched at once. It reads its rows from memory that stays where it is; context lengths, paths
and slots are data there, so the number of rows is all that a recording depends on. Rows are padded up to it: padding
belongs to no sequence, has no slot and writes nothing that is read.

Where there are no CUDA graphs a recording runs its function anew each time, over the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle2.models.rows import Rows

_WARM_UPS = 2
_ALIGNMENT = 4  # numbers: 16 bytes, by which Triton tells pointers apart


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Up to what forwards are recorded; what is larger runs launch by launch.

    max_rows: rows of a forward. max_sequences: sequences in it. max_context: positions of a slot table. max_path:
    nodes on a path, the node itself included.
    """

    max_rows: int
    max_sequences: int
    max_context: int
    max_path: int


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are recorded, ascending: from 16 on, padding is at most a third of the rows."""
    buckets, size = [1, 2, 4, 8], 16
    while size < max_rows:
        buckets += [size, size + size // 2]
        size *= 2
    return (*(bucket for bucket in buckets if bucket < max_rows), max_rows)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on ``device``; where that is a GPU nobody waits for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Recording:
    """What a function launches, launched again by ``replay``; its result stays in the same memory.

    The function reads nothing back from the device and depends on shapes alone. It runs a few times before it is
    recorded, so that kernels are compiled and libraries are set up.
    """

    def __init__(self, run: Callable[[], Tensor], device: torch.device, memory: GraphMemory) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        if device.type != "cuda":
            return
        # On the stream that is recorded: a library's handles belong to a stream, and may not be made while recording.
        memory.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(memory.stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(memory.stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device.
        with torch.cuda.graph(self._graph, pool=memory.pool, stream=memory.stream, capture_error_mode="thread_local"):
            self._result = run()

    def replay(self) -> Tensor:
        """The function's result. It is overwritten by the next replay of any recording in the same memory."""
        if self._graph is None:
            return self._run()
        assert self._result is not None
        self._graph.replay()
        return self._result


class GraphMemory:
    """What recordings that never run at the same time share: their stream, and memory for what they compute."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = torch.cuda.graph_pool_handle()


class Staging:
    """Whole numbers on their way to the device: written on the host, sent as one copy that nobody waits for."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        # Two by turns, so that one can be written while the other is still being sent.
        self._hosts = [torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(2)]
        self._sent = [torch.cuda.Event() if self._pinned else None for _ in range(2)]
        self._turn = 0

    def begin(self) -> NDArray[np.int32]:
        """The host's side, to be written."""
        self._turn = 1 - self._turn
        if (sent := self._sent[self._turn]) is not None:
            sent.synchronize()  # the copy before last: over, but for a host that runs far ahead
        array: NDArray[np.int32] = self._hosts[self._turn].numpy()
        return array

    def send(self, count: int) -> None:
        """Copy the first ``count`` numbers."""
        self.on_device[:count].copy_(self._hosts[self._turn][:count], non_blocking=True)
        if (sent := self._sent[self._turn]) is not None:
            sent.record()


class Places:
    """Where named arrays lie in one run of numbers, in the order in which they are added."""

    def __init__(self) -> None:
        self.end = 0
        self._places: dict[str, tuple[int, tuple[int, ...]]] = {}

    def add(self, name: str, *shape: int) -> None:
        self._places[name] = self.end, shape
        self.end += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT

    def of_tensor(self, name: str, numbers: Tensor) -> Tensor:
        begin, shape = self._places[name]
        return numbers[begin : begin + int(np.prod(shape))].view(shape)

    def of_array(self, name: str, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        begin, shape = self._places[name]
        return numbers[begin : begin + int(np.prod(shape))].reshape(shape)


class ForwardGraphs:
    """Recorded forwards of one model over flat batches.

    forward: rows, and their features (T, H) where ``features`` says how wide and of which dtype they are -> (T, H).
    """

    def __init__(
        self,
        forward: Callable[[Rows, Tensor | None], Tensor],
        device: torch.device,
        limits: GraphLimits,
        *,
        features: tuple[int, torch.dtype] | None = None,
        memory: GraphMemory | None = None,
    ) -> None:
        self._forward, self._device, self._limits = forward, device, limits
        self._memory = memory or GraphMemory(device)
        self.buckets = row_buckets(limits.max_rows)
        self._places = {bucket: self._places_of(bucket) for bucket in self.buckets}
        self._staging = Staging(self._places[self.buckets[-1]].end, device)
        self._features: Tensor | None = None
        if features is not None:
            self._features = torch.zeros(limits.max_rows, features[0], dtype=features[1], device=device)
        self._recordings: dict[int, Recording] = {}

    @torch.inference_mode()
    def run(self, rows: Rows, features: Tensor | None = None) -> Tensor | None:
        """The forward of ``rows``, which are on the host; None where it is beyond the limits.

        The result is overwritten by the next run.
        """
        bucket = next((bucket for bucket in self.buckets if bucket >= len(rows)), None)
        limits = self._limits
        if (
            bucket is None
            or len(rows.starts) - 1 > limits.max_sequences
            or rows.tables.shape[1] > limits.max_context
            or rows.paths.shape[1] > limits.max_path
        ):
            return None
        self._fill(rows, bucket)
        if self._features is not None:
            assert features is not None
            self._features[: len(rows)].copy_(features, non_blocking=True)
            self._features[len(rows) : bucket].zero_()
        return self._recording(bucket).replay()[: len(rows)]

    @torch.inference_mode()
    def record_all(self) -> None:
        """Record every number of rows now, rather than when it is first met."""
        for bucket in self.buckets:
            if bucket not in self._recordings:
                self._fill(_NO_ROWS, bucket)
                self._recording(bucket)

    def _places_of(self, bucket: int) -> Places:
        limits, places = self._limits, Places()
        for name in ("tokens", "positions", "slots", "lengths", "path_lengths"):
            places.add(name, bucket)
        places.add("starts", limits.max_sequences + 1)
        places.add("paths", bucket, limits.max_path)
        # Last, so that only the tables that are there need to be sent.
        places.add("tables", limits.max_sequences, limits.max_context)
        return places

    def _fill(self, rows: Rows, bucket: int) -> None:
        numbers, places, count = self._staging.begin(), self._places[bucket], len(rows)
        for name, padding in (("tokens", 0), ("positions", 0), ("slots", -1), ("lengths", 0), ("path_lengths", 0)):
            array = places.of_array(name, numbers)
            array[:count] = getattr(rows, name).numpy()
            array[count:] = padding
        starts = places.of_array("starts", numbers)
        sequences = len(rows.starts) - 1
        starts[: sequences + 1] = rows.starts.numpy()
        starts[sequences + 1 :] = count
        if count:
            places.of_array("paths", numbers)[:count, : rows.paths.shape[1]] = rows.paths.numpy()
            places.of_array("tables", numbers)[:sequences, : rows.tables.shape[1]] = rows.tables.numpy()
        unused = (self._limits.max_sequences - sequences) * self._limits.max_context
        self._staging.send(places.end - unused)

    def _recording(self, bucket: int) -> Recording:
        recording = self._recordings.get(bucket)
        if recording is None:
            run = self._runner(bucket)
            recording = self._recordings[bucket] = Recording(run, self._device, self._memory)
        return recording

    def _runner(self, bucket: int) -> Callable[[], Tensor]:
        places, numbers = self._places[bucket], self._staging.on_device
        views = {name: places.of_tensor(name, numbers) for name in Rows.__slots__}
        features = None if self._features is None else self._features[:bucket]

        def run() -> Tensor:
            wide = {name: views[name].long() for name in ("tokens", "positions")}
            return self._forward(Rows(**(views | wide)), features)

        return run


_NOTHING = torch.zeros(0, dtype=torch.int32)
_NO_ROWS = Rows(
    tokens=_NOTHING,
    positions=_NOTHING,
    slots=_NOTHING,
    starts=torch.zeros(1, dtype=torch.int32),
    tables=_NOTHING.view(0, 0),
    lengths=_NOTHING,
    paths=_NOTHING.view(0, 0),
    path_lengths=_NOTHING,
)
