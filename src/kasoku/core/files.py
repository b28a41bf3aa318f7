"""Files and weights that are written whole or not at all, and files that one process locks."""

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from kasoku.core.errors import InputError, say, summary

try:
    import fcntl
except ModuleNotFoundError as missing:
    systems = f"kasoku runs on Linux (macOS: untried), and this is {sys.platform}: on Windows use WSL"
    raise ModuleNotFoundError(systems, name="fcntl") from missing

MANIFEST = "manifest.json"  # in a run folder: the digests of its files
_LARGEST = 1e300  # a JSON file may hold any number of digits
_FULL_BYTES = 1 << 16  # a disk with less is taken for full


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls write(part) on a file beside `path`, flushes it to disk and renames it to `path`."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # left by a process that was killed; or a link to another file
        write(part)
        part.chmod(0o644)  # safetensors makes its files private
        flush(part)
        os.replace(part, path)
    except (OSError, RuntimeError, SafetensorError, UnicodeEncodeError) as error:
        refused = write_error(path, error)  # looks how full the disk is
        part.unlink(missing_ok=True)
        raise refused from error


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Writes a UTF-8 file whole or not at all. `errors`: "replace" writes "?" for names that are not valid Unicode."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8", errors=errors))


def load_weights(model: nn.Module, path: Path) -> None:
    """Fills a model from safetensors. Raises InputError when the file is damaged or of another model."""
    try:
        load_model(model, str(path), strict=True)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
    except RuntimeError as error:
        wrong = f"weights of another model, not of {type(model).__name__}"
        raise InputError(f"{path}: {wrong} ({summary(error)})") from error


def lock(file: IO[Any], in_use: Callable[[], str]) -> None:
    """Locks an open file until it is closed; on a disk without locks it says that it cannot.

    If another process holds it: closes it, and raises InputError with the message in_use().
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = in_use()
        file.close()
        raise InputError(message) from error
    except OSError as error:
        say(f"{file.name}: not locked ({error.strerror}); let no other process use it")


def locked_folder(folder: Path, work: str, *, below: str = "") -> IO[str]:
    """Locks a folder for `work`, such as "training", until the returned file is closed.

    The folder, and the one `below` it, are created if needed.

    Errors: InputError if the folder cannot be written, and if another process works in it.
    """
    try:
        (folder / below).mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise InputError(f"{folder}: cannot write there ({error.strerror}): choose another --out") from error

    def in_use() -> str:
        file.seek(0)
        owner = file.read().strip() or "another process"
        return f"{folder}: in use by a running {work} ({owner}): wait for it, or give --out"

    lock(file, in_use)
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder."""
    try:
        with open(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # without a lock file there is another one
        return isinstance(error, BlockingIOError)
    return False


def open_regular(path: str) -> int:
    """A descriptor to read a regular file. Raises OSError for anything else, at once: a pipe would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with the home folder for ~; pathlib raises an error for ~name without such a user."""
    return Path(os.path.expanduser(path))


def check_regular(folder: Path) -> None:
    """Raises InputError if there is a link, pipe or device in a folder: links lead elsewhere, reading a pipe blocks."""
    folders = [str(folder)]
    while folders:
        with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:  # a training may go on there
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise InputError(f"{entry.path}: a link, pipe or device: remove it, or put a copy there")


def read_json(file: Path) -> dict[str, Any]:
    """The table in a JSON file; empty if there is no such file. Raises InputError if it is damaged."""
    try:
        document = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: damaged ({summary(error)})") from error
    if not isinstance(document, dict):
        raise InputError(f"{file}: damaged (no table)")
    return document


def json_text(document: object) -> str:
    """A document as JSON in lines, the last one ended; null stands for a number that is not finite."""
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1) + "\n"


def is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def flush(path: Path) -> None:
    """Waits until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(file: Path) -> str:
    """The file's SHA-256, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checked_file(folder: Path, name: str) -> Path:
    """A file of a run. Raises InputError if its bytes are not those that the training wrote, or if they are gone.

    A file that is not in the manifest may be missing, and so may one that a killed process wrote for the first time.
    """
    file = folder / name
    known = digests_in(folder).get(name)
    try:
        if known is None or ("" in known and not file.exists()) or digest(file) in known:
            return file
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}): bring it back, or train again") from error
    advice = "bring both back, or train again; to change settings of a run, use --resume with --set"
    raise InputError(f"{file}: its bytes, or those of {MANIFEST}, have changed since the training wrote them: {advice}")


def digests_in(folder: Path) -> dict[str, list[str]]:
    """The digests that each file may have, by its name; none for a run without a manifest."""
    try:
        digests = read_json(folder / MANIFEST)
    except InputError as error:
        raise InputError(f"{error}: if you trust the other files, remove it") from error
    return {name: known if isinstance(known, list) else [] for name, known in digests.items()}


def write_error(path: Path, error: Exception) -> InputError:
    """The error of a file that cannot be written."""
    reason = getattr(error, "strerror", None) or summary(error)
    with suppress(OSError):  # torch and safetensors name no reason
        if shutil.disk_usage(path.parent).free < _FULL_BYTES:
            reason = "no space left on the disk"
    advice = "mend that and go on; what was written before is whole"
    if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "choose a folder that can be written"
    elif not path.parent.is_dir():
        advice = "its folder is gone: choose another"
    return InputError(f"{path}: cannot be written ({reason.replace(f'.{path.name}.part', path.name)}): {advice}")
