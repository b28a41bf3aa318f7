"""The checksums of raw images on this machine, compared in the background.

Note: a crop reads only some rows of a raw image, so the checksum of the whole takes about as long as the crop itself.
It is compared once an epoch by a process that uses cores only while they are idle, and a fiftieth of one where none is.
A thread would not do: one that waits for a core keeps the interpreter's lock. This file is also the program of that
process, which imports only the standard library.
"""

import array
import fcntl
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

ROW = 5  # numbers of an image: its own, its file's, offset and bytes in that, CRC-32

_PAUSE = 49  # times the work, where less than half a core is idle
_LOOK_S = 0.2  # between two looks at that


class BackgroundCheck:
    """Looks once an epoch for images that have changed.

    Args:
        files: paths of the shards.
        rows: ROW numbers (int64) for each image, in the order of its shards.
        name: of the image with this number, for messages.
    """

    def __init__(self, files: Sequence[str], rows: bytes, name: Callable[[int], str]) -> None:
        self.changed: set[int] = set()
        self._files, self._rows, self._name = files, rows, name
        self._thread: threading.Thread | None = None
        self._late = False  # and that has been said

    def start(self) -> None:
        """Starts a check in a thread, unless the last one still runs."""
        if self._thread and self._thread.is_alive():
            if not self._late:
                late = "no core is idle, so comparing the checksums of raw images takes several epochs"
                print(f"kasoku: {late}; `kasoku pack --verify` compares all at once", file=sys.stderr)
            self._late = True
        elif self._rows:
            self._thread = threading.Thread(target=self.run, name="kasoku-checksums", daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Compares all checksums; names an image that has changed at once, as it may have been trained on."""
        pipe, command = subprocess.PIPE, [sys.executable, "-I", "-S", __file__]
        with (
            suppress(OSError),  # no process can be started
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process,
        ):
            if process.stdin and process.stdout:
                process.stdin.write(json.dumps([os.getpid(), *self._files]).encode() + b"\n" + self._rows)
                process.stdin.close()
                for index in map(int, process.stdout):
                    if index not in self.changed:
                        self.changed.add(index)
                        said = f"kasoku: {self._name(index)}: its bytes have changed since it was packed"
                        print(said, file=sys.stderr)


def _idle_s() -> float:
    """Core-seconds that were idle or ours until now; 0 where the system does not say."""
    try:
        with open("/proc/stat") as file:
            return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK") + time.process_time()
    except (OSError, ValueError, IndexError):
        return 0.0


def _main() -> None:
    """Prints the numbers of images that have changed; ends with its parent, and at once beside another such check."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    head, _, data = sys.stdin.buffer.read().partition(b"\n")
    parent, *files = json.loads(head)
    rows = array.array("q", data)
    images = (rows[at : at + ROW] for at in range(0, len(rows), ROW))
    looked_s, idle_s, pause = time.monotonic(), _idle_s(), _PAUSE
    with open(files[rows[1]], "rb") as first:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of several ranks one looks
        for shard, some in itertools.groupby(images, key=lambda image: image[1]):
            with open(files[shard], "rb") as file:
                for index, _, offset, size, crc32 in some:
                    begin_s = time.monotonic()
                    if os.getppid() != parent:
                        return
                    if begin_s - looked_s > _LOOK_S:
                        earlier_s, idle_s = idle_s, _idle_s()
                        pause = 0 if idle_s - earlier_s > (begin_s - looked_s) / 2 else _PAUSE
                        looked_s = begin_s
                    if zlib.crc32(os.pread(file.fileno(), size, offset)) != crc32:
                        print(index, flush=True)
                    time.sleep(pause * (time.monotonic() - begin_s))


if __name__ == "__main__":
    _main()
