"""Memory is foretold from two sizes, and read where the system says it."""

import mmap
from pathlib import Path

import pytest
import torch

from kasoku.core.hardware import resident_bytes
from kasoku.tune import measurement as memory
from kasoku.tune.measurement import MemoryForecast, available_bytes, extrapolate, out_of_memory

GIB = 2**30


def test_two_sizes_foretell_a_third_on_their_line():
    assert extrapolate([(8, 100), (16, 180)], 64) == 100 + 10 * 56
    assert extrapolate([(8, 5), (16, 100), (32, 260)], 33) == 270
    assert extrapolate([(8, 100), (16, 90)], 64) == 90, "it never falls"


def test_a_size_that_would_not_fit_is_told_before_it_is_tried(monkeypatch: pytest.MonkeyPatch):
    resident = [1 * GIB]
    monkeypatch.setattr(memory, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GIB)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    seen = MemoryForecast(torch.device("cpu"))
    for batch, peak in ((8, 1 * GIB), (16, 2 * GIB)):
        assert seen.fits(10**6), "nothing is known yet"
        seen.begin()
        resident[0] = peak
        seen.look()
        seen.note(batch)
    assert seen.fits(40)  # 5 GiB, of which 2 are taken
    assert not seen.fits(56)
    assert seen.fits(12), "what is smaller than what fitted fits"
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert not seen.fits(40), "another rank on this machine grows as well"


def files(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_a_container_has_less_than_its_machine(tmp_path: Path):
    proc = files(tmp_path / "proc", meminfo="MemTotal: 9000 kB\nMemAvailable:    2000 kB\n")
    free = files(tmp_path / "free", memory_max="max\n", memory_current="5\n")
    bound = files(tmp_path / "bound", memory_max="1000000\n", memory_current="600000\n")
    (bound / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available_bytes(proc, free) == 2000 * 1024
    assert available_bytes(proc, tmp_path / "none") == 2000 * 1024
    assert available_bytes(proc, bound) == 500_000
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_what_this_process_holds_is_read():
    before = resident_bytes()
    if not before:
        pytest.skip("this system has no /proc")
    held = mmap.mmap(-1, 64 * 2**20)  # what malloc gives may be resident already
    held.write(bytes(len(held)))
    assert resident_bytes() - before > 32 * 2**20
    del held


def test_only_want_of_memory_is_taken_for_it():
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert out_of_memory(MemoryError())
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if ..."))
    assert not out_of_memory(RuntimeError("shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("out of memory"))
