"""`kasoku ARGUMENTS` in a process of its own without the 3 s of its imports: forked from the server of helpers.ranks.

The process has the environment, the folder, the output and the exit code of `python -m kasoku`, and so have the ranks
that it starts. Tests of imports, of the interpreter's end and of launchers start a real interpreter instead.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers.ranks import context


class Forked:
    """Has the methods of subprocess.Popen that tests use; its output is kept, or goes to `inherited` descriptors."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, *, inherited: bool = False
    ) -> None:
        self.args = ["kasoku", *words]
        self._files = [] if inherited else [_unnamed_file(self) for _ in range(2)]
        cores = os.sched_getaffinity(0)
        where = (str(cwd or Path.cwd()), dict(env), cores, inherited)
        self._process = context.Process(target=_command, args=(self.args, where, _Outputs(self._files or [1, 2])))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, ...]:
        """What it wrote to stdout and to stderr."""
        self.wait(timeout)
        return tuple(os.pread(file, os.fstat(file).st_size, 0).decode() for file in self._files)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def rank(words: Sequence[str], env: Mapping[str, str], process_group: int) -> Forked:
    """A rank of `kasoku launch local` in this process, for local_launch.subprocess.Popen."""
    assert process_group == 0
    return Forked(words[3:], env, inherited=True)


def _unnamed_file(owner: object) -> int:
    """The descriptor of a new file that lives as long as its owner."""
    descriptor, name = tempfile.mkstemp()
    Path(name).unlink()
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


class _Outputs:
    """Descriptors for stdout and stderr that travel to the process."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors: Sequence[Any] = descriptors

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(descriptor) for descriptor in self.descriptors]

    def __setstate__(self, sent: list[Any]) -> None:
        self.descriptors = [each.detach() for each in sent]


def _command(words: list[str], where: tuple[str, dict[str, str], set[int], bool], outputs: _Outputs) -> None:
    folder, environment, cores, group = where
    for descriptor, source in enumerate(outputs.descriptors, 1):
        os.dup2(source, descriptor)
    os.sched_setaffinity(0, cores)
    os.chdir(folder)
    if group:
        os.setpgid(0, 0)
    sys.path[:] = [place for place in sys.path if not place.startswith(str(Path(__file__).parents[1]))]
    sys.exit(_run(words, environment))


def _run(words: list[str], environment: Mapping[str, str]) -> int:
    from kasoku.__main__ import main
    from kasoku.distributed import local_launch

    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    local_launch.subprocess = SimpleNamespace(Popen=_Rank)  # type: ignore[assignment]
    return main()


class _Rank:
    """A rank of `kasoku launch local`, forked from it."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], process_group: int) -> None:
        assert threading.active_count() == 1, threading.enumerate()  # a fork has no other threads
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setpgid(0, process_group)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = _run(["kasoku", *words[3:]], env)
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
