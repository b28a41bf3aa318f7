"""Fewer bits: what is read is what was written, less what rounding took, and that is known exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kasoku.distributed.async_sgd.worker import CODECS


@given(
    n=st.integers(1, 1100),
    exponent=st.integers(-148, 126),
    seed=st.integers(0, 99),
    wire=st.sampled_from(sorted(CODECS)),
)
def test_what_is_read_and_what_was_taken_are_what_was_written(n: int, exponent: int, seed: int, wire: str):
    code = CODECS[wire]
    x = (torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1) * 2.0**exponent
    x = x.to(torch.float32)
    written, read = torch.full((code.elements(n),), 77, dtype=code.dtype), torch.full((n,), math.nan)
    code.pack(x, written)
    code.unpack(written, read)
    assert torch.equal(read + (x - read), x)
    digits = {"fp32": 24, "bf16": 8, "int8": 6}[wire]
    assert (x - read).abs().max() <= max(
        x.abs().max().item() * 2.0**-digits, 2.0**-126 if wire == "int8" else 2.0**-133
    )
    assert code.exact == (wire == "fp32")


def test_stretches_of_larger_memory_wherever_they_begin():
    code, n = CODECS["int8"], 3 * 65_536 + 300
    x = torch.randn(n + 5, generator=torch.Generator().manual_seed(0))[3:-2]
    written = torch.zeros(code.elements(n) + 8, dtype=code.dtype)
    read = torch.zeros(n + 4)
    code.pack(x, written[3:-5])
    code.unpack(written[3:-5], read[1:-3])
    blocks = [part.abs().max() / 64 for part in torch.split(x, 256)]
    assert all(
        ((a - b).abs() <= most).all() for a, b, most in zip(x.split(256), read[1:-3].split(256), blocks, strict=True)
    )
    assert not written[:3].any()
    assert not written[-5:].any()
    assert not read[[0, -3, -2, -1]].any()


def test_int8_is_as_fine_as_the_largest_of_256_allows():
    x = torch.cat([torch.tensor([127.0, 3.0]), torch.zeros(254), torch.tensor([1.0, -0.25, 0.0])])
    code = CODECS["int8"]
    assert code.elements(len(x)) == len(x) + 2
    written, read = torch.zeros(code.elements(len(x)), dtype=code.dtype), torch.zeros(len(x))
    code.pack(x, written)
    code.unpack(written, read)
    assert torch.equal(read, x)
    assert written[:2].tolist() == [127, 3]
    assert written[256:259].view(torch.int8).tolist() == [64, -16, 0]
    assert written[-2:].tolist() == [127, 121]  # one, and a 64th


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_arrives_so(bad: float):
    x = torch.arange(600, dtype=torch.float32)
    x[300] = bad
    code = CODECS["int8"]
    written, read = torch.zeros(code.elements(600), dtype=code.dtype), torch.zeros(600)
    code.pack(x, written)
    code.unpack(written, read)
    assert not read[256:512].isfinite().any()
    assert read[:256].isfinite().all()
    assert read[512:].isfinite().all()
