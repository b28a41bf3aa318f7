"""The checksums of raw images on this machine, compared in the background.

Note: a crop reads only some rows of a raw image, so the checksum of the whole takes about as long as the crop itself.
It is compared once an epoch by a thread that the system lets run only while no other wants the core.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress


class BackgroundCheck:
    """Looks once an epoch for images that have changed.

    Args:
        images: their number.
        intact: whether the image with this number still has its checksum.
        name: of an image, for messages.
    """

    def __init__(self, images: int, intact: Callable[[int], bool], name: Callable[[int], str]) -> None:
        self.images, self.intact, self.name = images, intact, name
        self.changed: set[int] = set()
        self._reads = itertools.count()
        self._thread: threading.Thread | None = None

    def note_read(self) -> None:
        """Counts the read of an image; the first one of each epoch starts a check, unless the last one still runs."""
        if next(self._reads) % self.images == 0 and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run_idle, name="kasoku-checksums", daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Compares all checksums; names an image that has changed at once, as it may have been trained on."""
        for index in range(self.images):
            if index not in self.changed and not self.intact(index):
                self.changed.add(index)
                print(f"kasoku: {self.name(index)}: its bytes have changed since it was packed", file=sys.stderr)

    def _run_idle(self) -> None:
        """The main function of the thread."""
        with suppress(OSError, AttributeError):  # on Linux, of this thread alone
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with suppress(OSError):
            self.run()
