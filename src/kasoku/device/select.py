"""Which device a run uses, in which precision, with which techniques: the fast ones by default."""

import ctypes
import functools
import os
import platform
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from kasoku.core import Checked, InputError, Range, Technique
from kasoku.core.hardware import computes_bf16, cores
from kasoku.device.channels_last import ChannelsLast
from kasoku.device.compile import Compile
from kasoku.device.cpu_kernels import CpuKernels, pays
from kasoku.device.cuda_graphs import Graphs
from kasoku.device.half_precision import DTYPES, Autocast, LossScale

Kind = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_MALLOC = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 256 * 2**20))


@dataclass(frozen=True)
class Device(Checked):
    """The recipe's [device] table; the defaults are the fast ones.

    Args:
        kind: "auto" takes CUDA, then MPS, then the CPU.
        precision: "auto" takes bf16 where the hardware computes it, fp16 with loss scaling on older CUDA, else fp32.
        channels_last: lay images out with channels last.
        compile: compile the forward of each block.
        graphs: replay CUDA graphs.
        threads: CPU threads, from 0 to 4096; 0: all cores the process may use, shared among the ranks of this host.
        malloc: tune glibc's allocator on a CPU.
        kernels: compute some operations by kasoku's own C code, on CPUs where it is faster than torch's.
        deterministic: the same bits on every run, also on CUDA; slower there.
        hang_timeout_s: a rank without a step for this long has hung; 0 or more; 0: the larger of 60 s and 10 median
            steps. A rank that waits for its input has two minutes more.
    """

    kind: Kind = "auto"
    precision: Precision = "auto"
    channels_last: bool = True
    compile: bool = False
    graphs: bool = False
    threads: Annotated[int, Range("0 takes all cores", at_least=0, at_most=4096)] = 0
    malloc: bool = True
    kernels: bool = True
    deterministic: bool = False
    hang_timeout_s: Annotated[float, Range("0 chooses seconds by the steps", at_least=0)] = 0.0


@dataclass(frozen=True)
class Chosen:
    """What a run uses: the device, the precision of its convolutions, techniques to apply; `summary` says why."""

    device: torch.device
    precision: Literal["fp32", "bf16", "fp16"]
    techniques: tuple[Technique, ...]
    threads: int
    summary: str

    @property
    def dtype(self) -> torch.dtype:
        """What convolutions and matrix products compute in."""
        return DTYPES.get(self.precision, torch.float32)


def choose(settings: Device, *, local_rank: int = 0, local_size: int = 1) -> Chosen:
    """Chooses and sets up the device: thread count, allocator, determinism or autotuning of kernels.

    Args:
        settings: the recipe's [device] table.
        local_rank: of this process among those on this host.
        local_size: how many there are; they share the cores.

    Raises:
        InputError: for a device that is not there.
    """
    device = _device(settings.kind, local_rank)
    threads = settings.threads or max(1, cores() // local_size)
    torch.set_num_threads(threads)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports inductor: 2 s
        torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    precision, why = _precision(settings.precision, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    half = [] if precision == "fp32" else [Autocast(precision)]
    by_c = settings.kernels and not settings.compile and (device.type, precision) == ("cpu", "bf16") and pays(threads)
    wanted: dict[str, tuple[bool, type[Technique]]] = {  # by their names in the summary
        "channels_last": (settings.channels_last, ChannelsLast),
        "loss scaling": (precision == "fp16", LossScale),
        "compiled blocks": (settings.compile, Compile),
        "CUDA graphs": (settings.graphs, Graphs),
        "C kernels": (by_c and settings.channels_last, CpuKernels),
    }
    techniques = {name: kind() for name, (is_wanted, kind) in wanted.items() if is_wanted}
    words = [f"{name} ({threads} thread{'s' * (threads > 1)})", f"{precision} ({why})", *techniques]
    if settings.malloc and device.type == "cpu" and tune_malloc():
        words.append("malloc tuned")
    if settings.deterministic:
        words.append("deterministic")
    return Chosen(device, precision, (*half, *techniques.values()), threads, ", ".join(words))


def _device(kind: Kind, local_rank: int) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if kind == "auto":
        kind = "cuda" if cuda else "mps" if mps else "cpu"
    if kind == "cuda":
        if not cuda:
            built = torch.version.cuda is not None
            reason = "torch finds no GPU or driver" if built else "this torch is built without CUDA"
            raise InputError(f'kind="cuda": {reason}: use "auto" or "cpu", or a machine and a torch with CUDA')
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise InputError(f"local rank {local_rank}: this host has {count} GPUs: start at most {count} ranks on it")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if kind == "mps" and not mps:
        raise InputError('kind="mps": torch finds no Apple GPU here: use "auto" or "cpu"')
    return torch.device(kind)


def _precision(wanted: Precision, device: torch.device) -> tuple[Literal["fp32", "bf16", "fp16"], str]:
    fast = computes_bf16(device)
    if wanted == "bf16" and not fast:
        return wanted, "as asked, though this device does not compute it: slow"
    if wanted != "auto":
        return wanted, "as asked"
    if fast:
        return "bf16", "computed by the hardware"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return "fp16", "no bf16 on this GPU"
    return "fp32", "no fast half precision known here"


@functools.cache
def tune_malloc() -> bool:
    """Keeps freed memory in the process; call it before the first tensor. Returns whether it could (glibc on Linux).

    Note: why. glibc maps every large block anew and gives it back when it is freed, so each step page-faults all its
    activations again. Kept in the heap they are touched once.

    Saves: time: no page faults for activations after the first step.
    Costs: memory freed stays with the process.
    Ref: mallopt(3).
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [bool(mallopt(setting, value)) for setting, value in _MALLOC]
    return all(taken)
