"""What is said where the GPU's utilisation cannot be read."""

import math

import pytest
import torch

from kasoku.core import InputError
from kasoku.tune.trial import UtilizationMonitor

GPU = torch.device("cuda")


class NVMLError(Exception):
    """As NVML's package raises them."""


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (ModuleNotFoundError("No module named 'pynvml'"), r"whose package is missing: pip install 'kasoku\[nvml\]'"),
        (NVMLError("Driver Not Loaded"), r"cannot be read \(Driver Not Loaded\): take the strategy Throughput"),
    ],
)
def test_unreadable_utilization_is_one_line_if_needed_and_else_nan(monkeypatch, error, pattern):
    def missing(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    with pytest.raises(InputError, match=pattern):
        UtilizationMonitor(GPU, needed=True).value()
    assert math.isnan(UtilizationMonitor(GPU, needed=False).value())


def test_what_is_seen_is_the_mean_of_the_higher_half(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 70)
    usage = UtilizationMonitor(GPU, needed=True)
    assert usage.value() == pytest.approx(0.7)
    usage.seen[:] = [0.1, 0.2, 0.5]
    assert usage.value() == pytest.approx(0.6)
