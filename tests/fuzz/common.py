"""What the kinds of fuzzing share: mutated bytes, commands in this process, and the count of inputs and findings."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kasoku.cli import main

LIMIT_S = 20.0  # of one input
_FOREIGN = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}  # torch's weights_only
_FOREIGN |= {"socket.getaddrinfo", "socket.connect", "urllib.Request"}  # unpickler raises no pickle.find_class
_watching = False
_events: list[str] = []  # of the command that runs


class FindingError(BaseException):  # so that no `except Exception` of kasoku hides it
    """An input that gives neither the right result nor a refusal in one line."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: stops and records code that no input may run."""
    if not _watching or event not in _FOREIGN:
        return
    words = list(arguments[1]) if event == "subprocess.Popen" else []
    # report/environment.py: the commits of two folders, and platform.platform(), which asks for the processor
    if words[:2] + words[3:6] == ["git", "-C", "-c", "core.fsmonitor=false", "describe"] or words == ["uname", "-p"]:
        return
    _events.append(f"{event} {str(arguments)[:200]}")
    raise FindingError(f"runs {_events[0]}")


sys.addaudithook(_watch)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The data with one to three changes: a bit, some bytes, a character, a cut, a stretch twice or away."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data)) if data else 0
        end = at + draw.choice([1, 1, 2, 8, 512])
        kind = draw.choices(["bit", "bytes", "character", "cut", "twice", "away"], weights=[6, 3, 4, 1, 1, 1])[0]
        new = {
            "bit": bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :] if data else b"",
            "bytes": draw.randbytes(end - at) + data[end:],
            "character": draw.choice([b"0", b"9", b"-", b"\xff", b"\0", b"\n", b'"']) + data[at + 1 :],
            "cut": b"",
            "twice": data[at:end] + data[at:],
            "away": data[end:],
        }
        data = data[:at] + new[kind]
    return data


def command(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process; its refusal must be one line.

    Raises FindingError for another end than done or refused, for one that takes longer than LIMIT_S, and for foreign
    code that ran.
    """
    global _watching
    out, err = io.StringIO(), io.StringIO()
    _events.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
        _watching = True
        try:
            code = main(words)
        except SystemExit as error:
            raise FindingError(f"exit {error.code}: {err.getvalue()}") from error
        finally:
            _watching = False
    if _events:
        raise FindingError(f"runs {_events[0]}")
    lines = err.getvalue().splitlines()
    if code not in (0, 2) or (code == 2 and not (lines and lines[-1].startswith("kasoku: "))):
        raise FindingError(f"exit {code}: {err.getvalue()[-2000:]}")
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raises FindingError in what takes too long."""

    def late(*_: object) -> None:
        raise FindingError(f"takes longer than {LIMIT_S:g} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def tried(
    name: str,
    one: Callable[[random.Random], str],
    show: Callable[[], bytes],
    *,
    seed: int,
    until: float,
    most: int,
    keep: Path,
) -> dict[str, Any]:
    """Calls one(draw), which returns how its input ended, until time or inputs are over; show(): the last input."""
    counts, findings = dict[str, int](), 0
    for number in range(most):
        if number and time.monotonic() > until:
            break
        try:
            end = one(random.Random(f"{name} {seed} {number}"))
        except (Exception, FindingError) as error:
            end, findings = "finding", findings + 1
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}-{seed}-{number}").write_bytes(show())
            (keep / f"{name}-{seed}-{number}.txt").write_text(traceback.format_exc())
            where = f"{name} --seed {seed}, input {number}"
            print(f"{where}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        counts[end] = counts.get(end, 0) + 1
    return {"inputs": sum(counts.values()), **counts, "findings": findings}
