"""Memory of pulled tensors, used again by a later pull once nobody looks at it any more.

Fresh memory costs a page fault every 4 KiB, which is a good part of a pull's time on a fast link. A buffer comes back by itself
when the last view of it is gone, so an engine that still copies, or a peer that is still being sent to, keeps what it reads.

Refuses to hold more idle memory than `idle_bytes_max`.
"""

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Buffers:
    """Thread safe. `idle_bytes_max` may be set at any time."""

    def __init__(self, idle_bytes_max: int = 0) -> None:
        self.idle_bytes_max = idle_bytes_max
        self._lock = threading.Lock()
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        # Views may die inside any lock of any thread, so what they give back is only noted there.
        self._returned: deque[Bytes] = deque()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._idle_bytes

    def take(self, nbytes: int) -> memoryview:
        """Writable memory of any content. Raises MemoryError."""
        with self._lock:
            self._collect()
            fitting = self._idle.get(nbytes)
            memory = fitting.pop() if fitting else None
            if memory is not None:
                self._idle_bytes -= nbytes
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
        # Every view of the lease keeps the lease, and none of them the memory alone.
        lease = memory.view()
        weakref.finalize(lease, self._returned.append, memory).atexit = False
        return lease.data

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._idle.setdefault(memory.nbytes, []).append(memory)
            self._idle_bytes += memory.nbytes
        while self._idle_bytes > self.idle_bytes_max:
            largest = max(size for size, idle in self._idle.items() if idle)
            self._idle[largest].pop()
            self._idle_bytes -= largest
