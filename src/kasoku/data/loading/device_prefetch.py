"""Batches on their way to the device, ahead of their turn."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kasoku.core.trace import Trace
from kasoku.data.decode import nvjpeg
from kasoku.data.loading.executor import RawBatch

Moving = tuple[RawBatch, Any]  # tensors on their way to the device, and the event that they are there


class DevicePrefetch:
    """Copies to the device, on a stream of their own, so that computing goes on meanwhile."""

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        self.device, self.trace = device, trace
        make: Any = torch.cuda.Stream
        self.stream = make(device) if device.type == "cuda" else None

    def start(
        self, images_NHWC: torch.Tensor, y_N: torch.Tensor, index_N: torch.Tensor, jpegs: nvjpeg.Jpegs | None
    ) -> Moving:
        """Begins to copy on the current stream, to be read after `arrive`; what the device decoded joins it there."""
        batch, aside = [images_NHWC, y_N, index_N], self.stream is not None
        with self._noted(images_NHWC.nbytes):
            if aside:
                batch = [t if t.is_pinned() else t.pin_memory() for t in batch]
            there = [t.to(self.device, non_blocking=aside) for t in batch]
            if jpegs:
                jpegs.fill(there[0], index_N)
            return (there[0], there[1], there[2]), self.stream and self.stream.record_event()

    def arrive(self, moving: Moving) -> RawBatch:
        """Has what is computed from here on wait for the copies; the host does not."""
        batch, event = moving
        if event is not None:
            with self._noted(0):
                now = torch.cuda.current_stream(self.device)
                now.wait_event(event)
                for tensor in batch:
                    tensor.record_stream(now)  # its memory is not reused before
        return batch

    def _noted(self, bytes: int) -> AbstractContextManager[None]:
        return self.trace.span("copy", bytes=bytes) if self.trace else nullcontext()
