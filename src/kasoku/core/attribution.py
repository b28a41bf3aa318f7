"""Whose error it is: kasoku's, or that of a model, data source, loss, technique or import that the user named."""

import sys
import traceback
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kasoku.core.errors import InputError, summary

# Packages that kasoku calls itself, and those that they call: an error that is raised in one of them is its caller's.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "PIL", "safetensors", "rich", "tomli_w", "tensorboard"}
_LIBRARIES |= {"fsspec", "aiohttp", "onnx", "onnxscript", "onnx_ir", "plotly", "jinja2", "optuna", "triton", "pynvml"}
_LIBRARIES |= {"torchvision", "sympy", "mpmath", "networkx", "google", "grpc", "absl", "werkzeug", "narwhals", "yarl"}
_LIBRARIES |= {"sqlalchemy", "alembic", "colorlog", "packaging", "s3fs", "gcsfs", "botocore", "aiobotocore", "pygments"}


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
