"""How busy a device is, and the memory in use on it, as training logs them."""

import math
import time
from collections.abc import Iterator

import pytest
import torch

from kasoku.core import hardware
from kasoku.core.hardware import Utilization, memory_in_use, resident_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def spent(monkeypatch) -> Iterator[list[float]]:
    """[wall time, CPU time] of the process, as the test sets them."""
    spent = [0.0, 0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: spent[0])
    monkeypatch.setattr(time, "process_time", lambda: spent[1])
    return spent


def test_a_cpu_is_used_by_its_share_of_the_cores_since_the_last_reading(spent):
    usage = Utilization(CPU, 4)
    spent[:] = [2.0, 6.0]
    assert usage.read() == pytest.approx(6 / 2 / 4)
    spent[:] = [3.0, 6.5]
    assert usage.read() == pytest.approx(0.5 / 1 / 4)
    spent[:] = [4.0, 12.5]
    assert usage.read() == 1.0, "another process's cores count no more than its own"


def test_a_gpu_is_used_as_nvml_says_and_its_memory_is_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert Utilization(GPU, 4).read() == pytest.approx(0.7)
    assert memory_in_use(GPU) == (5, 7)
    assert math.isnan(Utilization(torch.device("mps"), 4).read())


def test_the_memory_of_a_cpu_is_resident_and_its_peak_stays(monkeypatch):
    if not resident_bytes():
        pytest.skip("this system has no /proc")
    held = torch.ones(16 * 2**20)
    in_use, most = memory_in_use(CPU)
    assert in_use == pytest.approx(resident_bytes(), rel=0.05)
    del held
    after, still = memory_in_use(CPU)
    assert most >= in_use
    assert still > 0.99 * most  # the kernel counts in batches
    assert still >= after
    monkeypatch.setattr(hardware, "Path", lambda name: (_ for _ in ()).throw(OSError()))
    assert memory_in_use(CPU) == (0, 0)
