"""The one exception that a user's mistake raises, what others say in one line, and whose error an error is.

An error is kasoku's, or that of a model, data source, loss, technique or import that the user named.
"""

import difflib
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

# Packages that kasoku calls itself, and those that they call: an error that is raised in one of them is its caller's.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "PIL", "safetensors", "rich", "tomli_w", "tensorboard"}
_LIBRARIES |= {"fsspec", "aiohttp", "onnx", "onnxscript", "onnx_ir", "plotly", "jinja2", "optuna", "triton", "pynvml"}
_LIBRARIES |= {"torchvision", "sympy", "mpmath", "networkx", "google", "grpc", "absl", "werkzeug", "narwhals", "yarl"}
_LIBRARIES |= {"sqlalchemy", "alembic", "colorlog", "packaging", "s3fs", "gcsfs", "botocore", "aiobotocore", "pygments"}


class InputError(ValueError):
    """Something the user gave cannot be used: one line that says what we got, what is allowed, what to do.

    The command prints the line without a traceback and exits with 2. `gone`: a source no longer answers; it may be
    back later, so what was trained until then is saved. `resumable`: the training has a checkpoint to go on from.
    `memory_short`: there is none for what was asked.
    """

    gone = resumable = memory_short = False


class CorruptionError(RuntimeError):
    """A device changed bits without an error. Checkpoints of steps after `trusted` may hold wrong weights."""

    def __init__(self, line: str, *, trusted: int) -> None:
        super().__init__(line)
        self.trusted = trusted


def summary(error: BaseException) -> str:
    """What an exception says, in one line of at most 200 letters; the name of its type if it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def one_line(text: str) -> str:
    """The text, with a question mark for each unprintable character, such as the end of a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def first_of(names: Sequence[str], most: int = 10) -> str:
    """The first of these names, with dots where there are more."""
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


def without_password(text: str) -> str:
    """The text, with addresses such as s3://user:password@host without what is before the @."""
    return re.sub(r"(?<!abfs:)(?<!abfss:)//[^/@\s]*@", "//", text)


def say(line: str, rank: int = 0) -> None:
    """Prints a line to standard error, as the command `kasoku` does, unless it is empty; of several ranks only 0."""
    if line and rank == 0:
        print(f"kasoku: {line}", file=sys.stderr)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a refusal: the name that was probably meant, or all of them if they are few."""
    names = list(names)
    if close := difflib.get_close_matches(name, names, n=1):
        return f": did you mean {close[0]}?"
    return f": one of {', '.join(names)}" if len(names) <= 16 else ""


def attributed(error: Exception) -> Exception:
    """The error, or an InputError of one line where it is an error of the user's code, which is its cause."""
    if isinstance(error, InputError | MemoryError | torch.OutOfMemoryError) or not _origin(error)[0]:
        return error
    refused = InputError(f"{described(error)}; --traceback shows the rest")
    refused.__cause__ = error
    return refused


def described(error: Exception) -> str:
    """What failed, how, and if it is the user's code also where, in one line."""
    name, where = _origin(error)
    line = f"{type(error).__name__}: {summary(error)}"
    return (f"{name}: " if name else "") + line + (f" ({where})" if where else "")


def _origin(error: Exception) -> tuple[str, str]:
    """The user's function that failed, or the module, and the place in it; empty for an error of kasoku's.

    The innermost frame that is of no library decides. If it is of kasoku, the error is kasoku's, unless the frame calls
    a class, a function or a network that the user took from a library.
    """
    if isinstance(error, SyntaxError) and error.filename:  # of a module that is imported: no frame is of it
        return "import", f"at {error.filename}:{error.lineno}"
    ours = callee = entry = None
    innermost: tuple[FrameType, int] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "torch")).partition(".")[0]
        if package == "kasoku":
            ours, callee, entry, innermost = frame, None, None, None
        elif package not in _LIBRARIES:
            entry, innermost = entry or frame, (frame, line)
        else:
            callee = callee or frame
    if not entry or not innermost:
        return (_named(ours, callee) if ours else ""), ""
    module, function = entry.f_globals.get("__name__", ""), entry.f_code.co_qualname
    name = f"import of {module}" if function == "<module>" else f"{module}.{function}"
    return name, _place(*innermost)


def _named(ours: FrameType, callee: FrameType | None) -> str:
    """What the user took from a library, if kasoku's frame calls it: the `use` of a Factory, or a network."""
    own, network = ours.f_locals.get("self"), None
    if ours.f_code.co_qualname == "Job.backward":
        network = own.model  # type: ignore[union-attr]
    elif callee and ours.f_globals["__name__"].startswith(("kasoku.training.", "kasoku.device.")):
        network = callee.f_locals.get("self")
    name = str(getattr(own, "use", ""))
    if isinstance(network, nn.Module):
        name = f"{type(network).__module__}.{type(network).__qualname__}"
    return "" if name.startswith("kasoku.") else name


def _place(frame: FrameType, line: int) -> str:
    """The file and line of the error, and the arguments of the function as they were then."""
    code = frame.f_code
    names = [name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name in frame.f_locals]
    values = [f"{name} is {_shown(frame.f_locals[name])}" for name in names if name != "self"]
    return f"at {code.co_filename}:{line}" + (f", where {', '.join(values)}" if values else "")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    simple = value is None or isinstance(value, bool | int | float | str)
    return repr(value)[:40] if simple else type(value).__name__
