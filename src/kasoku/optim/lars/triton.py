"""LARS on CUDA: three kernel launches for any number of layers, or six if some tensors allow no 16-byte accesses. No
value is read back to the host.

Note: many tensors in one kernel. A table on the device holds the addresses, the size and the settings of each tensor;
one copy from pinned memory sends it. Each program of the first and the last kernel looks up the tensor that its block
of elements belongs to. Sums are in float64: first within blocks, then over a tensor's blocks in order. So the bits are
the same in every run, and do not depend on the other tensors of the step.

The kernels have not yet run on a GPU: they ran in Triton's interpreter and were compiled for sm_80 and sm_90.
"""

# mypy: disable-error-code="import-untyped, import-not-found, misc, no-untyped-def, no-untyped-call, untyped-decorator"

from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kasoku.core.hardware import is_dense
from kasoku.optim.lars.foreach import Move, Rule

_TYPES = {getattr(torch, name): getattr(tl, name) for name in ("float64", "float32", "bfloat16", "float16")}
_BLOCK = {"cuda": 4096, "cpu": 1 << 17}  # elements of a program; the interpreter is slow, so it gets few programs
_Row = tuple[int, int, int, int, int, float]  # a tensor in the table: three addresses, size, rule, keep


# Triton's interpreter cannot call tl.sum, a compiled function; it is tl.reduce with _sum_combine.


@triton.jit(do_not_specialize=["n"])
def _squares(  # noqa: PLR0913
    table, owner, first, partial, n, W: tl.constexpr, G: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    # Sums of squares of w and g over one block of a tensor.
    block = tl.program_id(0)
    tensor = tl.load(owner + block)
    size = tl.load(table + 3 * n + tensor)
    at = (block - tl.load(first + tensor)) * BLOCK + tl.arange(0, BLOCK)
    w_at = tl.load(table + tensor).to(tl.pointer_type(W)) + at
    g_at = tl.load(table + n + tensor).to(tl.pointer_type(G)) + at
    if FULL:  # lets the compiler use accesses of 16 bytes
        size = size // 8 * 8
        w_at = tl.multiple_of(w_at, 16)
        g_at = tl.multiple_of(g_at, 16)
    live = at < size
    w = tl.load(w_at, mask=live, other=0.0).to(tl.float64)
    g = tl.load(g_at, mask=live, other=0.0).to(tl.float64)
    tl.store(partial + 2 * block, tl.reduce(w * w, 0, tl.standard._sum_combine))
    tl.store(partial + 2 * block + 1, tl.reduce(g * g, 0, tl.standard._sum_combine))


@triton.jit(do_not_specialize=["n", "layers"])
def _trusts(table, values, first, partial, factors, n, layers, CHUNK: tl.constexpr):  # noqa: PLR0913
    # f and d of one tensor; the first `layers` tensors have a trust ratio.
    tensor = tl.program_id(0)
    begin = tl.load(first + tensor)
    end = tl.where(tensor < layers, tl.load(first + tensor + 1), begin)
    w_sum = tl.full((CHUNK,), 0.0, tl.float64)
    g_sum = tl.full((CHUNK,), 0.0, tl.float64)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        w_sum += tl.load(partial + 2 * at, mask=at < end, other=0.0)
        g_sum += tl.load(partial + 2 * at + 1, mask=at < end, other=0.0)
    w = tl.sqrt(tl.reduce(w_sum, 0, tl.standard._sum_combine))
    g = tl.sqrt(tl.reduce(g_sum, 0, tl.standard._sum_combine))
    rule = values + 6 * n + tl.load(table + 4 * n + tensor) * 10
    rate, d0, d1 = tl.load(rule), tl.load(rule + 1), tl.load(rule + 2)
    decay, eta, eps = tl.load(rule + 3), tl.load(rule + 4), tl.load(rule + 5)
    plain = (tensor >= layers) | (w == 0) | (g == 0)
    f = rate * tl.where(plain, 1.0, eta * w / tl.where(plain, 1.0, g + decay * w + eps))
    tl.store(factors + 2 * tensor, f)
    tl.store(factors + 2 * tensor + 1, d0 + d1 * f)


@triton.jit(do_not_specialize=["n"])
def _move(  # noqa: PLR0913
    table, values, owner, first, factors, n, W: tl.constexpr, G: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr
):
    # Updates V and w of one block of a tensor. Starts with the last block, which `_squares` left in the cache.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    tensor = tl.load(owner + block)
    size = tl.load(table + 3 * n + tensor)
    at = (block - tl.load(first + tensor)) * BLOCK + tl.arange(0, BLOCK)
    w_at = tl.load(table + tensor).to(tl.pointer_type(W)) + at
    g_at = tl.load(table + n + tensor).to(tl.pointer_type(G)) + at
    v_at = tl.load(table + 2 * n + tensor).to(tl.pointer_type(W)) + at
    if FULL:
        size = size // 8 * 8
        w_at = tl.multiple_of(w_at, 16)
        g_at = tl.multiple_of(g_at, 16)
        v_at = tl.multiple_of(v_at, 16)
    live = at < size
    exact: tl.constexpr = tl.float64 if W == tl.float64 else tl.float32  # noqa: SIM300
    w = tl.load(w_at, mask=live, other=0.0).to(exact)
    g = tl.load(g_at, mask=live, other=0.0).to(exact)
    v = tl.load(v_at, mask=live, other=0.0).to(exact)
    f, d = tl.load(factors + 2 * tensor).to(exact), tl.load(factors + 2 * tensor + 1).to(exact)
    rule = values + 6 * n + tl.load(table + 4 * n + tensor) * 10
    keep = tl.load(values + 5 * n + tensor)
    out, shrink, of_step, of_v = tl.load(rule + 6), tl.load(rule + 7), tl.load(rule + 8), tl.load(rule + 9)
    step = f * g + d * w
    v = keep.to(exact) * v + step
    w = shrink.to(exact) * w - out.to(exact) * (of_step.to(exact) * step + of_v.to(exact) * v)
    tl.store(v_at, v.to(W), mask=live)
    tl.store(w_at, w.to(W), mask=live)


def step(moves: list[Move]) -> list[Move]:
    """Updates tensors of one device and one pair of dtypes; returns slices, and those not dense or of other dtypes.

    Tensors that allow 16-byte accesses have launches of their own. This depends on each tensor alone, since it fixes
    the order of the tensor's sums.
    """
    rules: dict[int, tuple[int, Rule]] = {}
    parts: dict[bool, tuple[list[_Row], list[_Row]]] = {True: ([], []), False: ([], [])}
    left_out: list[Move] = []
    for move in moves:
        p, g, state, keep, rule, squares = move
        if squares is not None or not (p.dtype in _TYPES and g.dtype in _TYPES and is_dense(p)):
            left_out.append(move)
            continue
        size, w_at, g_at, v_at = p.numel(), p.data_ptr(), g.data_ptr(), state["momentum_buffer"].data_ptr()
        full = size % 8 == 0 and (w_at | g_at | v_at) % 16 == 0
        number, _ = rules.setdefault(id(rule), (len(rules), rule))
        parts[full][rule.eta is None].append((w_at, g_at, v_at, size, number, keep))
    settings = tuple(value for _, rule in rules.values() for value in rule.numbers)
    p, g = moves[0].p, moves[0].g
    device, cuda = p.device, p.is_cuda
    with torch.cuda.device(device) if cuda else nullcontext():
        stream = torch.cuda.current_stream(device).cuda_stream if cuda else 0
        for full, (layers, others) in parts.items():
            if not (layers or others):
                continue
            meta = {"W": _TYPES[p.dtype], "G": _TYPES[g.dtype], "FULL": full, "BLOCK": _BLOCK[device.type]}
            n, (*ints, keeps) = len(layers + others), zip(*layers, *others, strict=True)
            owner, first, starts = _blocks(ints[3], meta["BLOCK"], device, stream)
            table = _table(tuple(ints), keeps + settings, device, stream)
            values = table.view(torch.float64)
            partial = torch.empty(2 * max(1, starts[len(layers)]), dtype=torch.float64, device=device)
            factors = torch.empty(2 * n, dtype=torch.float64, device=device)
            if layers:
                _squares[(starts[len(layers)],)](table, owner, first, partial, n, **meta, num_warps=8)
            _trusts[(n,)](table, values, first, partial, factors, n, len(layers), CHUNK=512, num_warps=4)
            _move[(starts[n],)](table, values, owner, first, factors, n, **meta, num_warps=8)
    return left_out


@lru_cache(maxsize=64)
def _table(ints: tuple[tuple[int, ...], ...], reals: tuple[float, ...], device: torch.device, stream: int) -> Tensor:
    """The table on the device: rows of addresses of w, g and V, sizes, rules and keep factors; then the rules' numbers.

    The cache keeps tables of the last steps on the same stream, so that an unchanged table is not sent again.
    """
    numbers, bits = torch.tensor(ints, dtype=torch.int64), torch.tensor(reals, dtype=torch.float64).view(torch.int64)
    return _sent(torch.cat([numbers.view(-1), bits]), device)


@lru_cache(maxsize=256)
def _blocks(
    sizes: tuple[int, ...], block: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The tensor of each block; the first block of each tensor, on the device and on the host."""
    counts = torch.tensor([triton.cdiv(size, block) for size in sizes])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return _sent(owner, device), _sent(starts, device), tuple(starts.tolist())


def _sent(host: Tensor, device: torch.device) -> Tensor:
    """Copies to the device without a wait; torch reuses the pinned memory only when the copy has ended."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
