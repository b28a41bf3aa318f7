"""What a worker does with a few images of a batch, in a thread or in a process of its own."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import torch

from kasoku.core.errors import InputError
from kasoku.data.datasets.base import GoneError, Items
from kasoku.data.decode import nvjpeg
from kasoku.data.decode.decode import crop
from kasoku.data.loading.pipeline import Crop
from kasoku.data.loading.workers import ProcessPool

Bad = dict[int, str]  # row of a chunk -> what is wrong with its image

_SPLIT: list[Items] = []  # of a process that decodes


def decode_chunk(
    out_NHWC: np.ndarray,
    index: list[int],
    crops: list[Crop],
    read: Callable[[int], bytes | np.ndarray],
    name: Callable[[int], str],
    jpegs: nvjpeg.Jpegs | None = None,
) -> Bad:
    """Crops images into out_NHWC; returns what is wrong with those that cannot be read or decoded.

    A source that is gone is no bad image: GoneError is raised.
    """
    bad: Bad = {}
    for row, (image, box) in enumerate(zip(index, crops, strict=True)):
        try:
            source = read(image)
            if jpegs is None or not jpegs.take(image, source, box, name=name(image)):
                crop(source, box, out_NHWC[row], name=name(image))
        except GoneError:
            raise
        except InputError as error:
            bad[row] = str(error)
    return bad


def submit_to_process(
    pool: ProcessPool, index: list[int], crops: list[Crop], size: tuple[int, int]
) -> Future[tuple[np.ndarray, Bad]]:
    """A chunk that a process decodes; where the processes ended, `result` raises."""
    try:
        return pool.submit(_decode_in_process, index, crops, size)
    except BrokenProcessPool as error:
        failed: Future[tuple[np.ndarray, Bad]] = Future()
        failed.set_exception(error)
        return failed


def result(chunk: Future[Any]) -> Any:
    """What a thread or a process returned. Raises InputError where the process itself failed."""
    try:
        return chunk.result()
    except (BrokenProcessPool, pickle.PicklingError) as error:
        raise InputError(
            f"processes: one that reads the data set ended ({error}); it must be picklable, fit in memory, and be made "
            'in a script below `if __name__ == "__main__":`'
        ) from error


def bad_images(output: Bad | tuple[np.ndarray, Bad]) -> Bad:
    """The bad images of a chunk, from the output of a thread or of a process."""
    return output[1] if isinstance(output, tuple) else output


def start_process(split: Items) -> None:
    """Runs first in a process that decodes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the training ends its step and saves
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _SPLIT[:] = [split]


def _decode_in_process(index: list[int], crops: list[Crop], size: tuple[int, int]) -> tuple[np.ndarray, Bad]:
    out_NHWC = np.zeros((len(index), *size, 3), np.uint8)
    return out_NHWC, decode_chunk(out_NHWC, index, crops, _SPLIT[0].read, _SPLIT[0].name)
