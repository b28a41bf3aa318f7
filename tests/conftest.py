"""What all tests share: where the real images are, and the folder of recipes."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; tests that need more threads set them
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read as torch is loaded: threads that wait do not spin

import pytest
import torch


def _let_torchvision_load() -> None:
    """Where torchvision's operators were built for another torch, its import needs the schemas of some of them."""
    found = importlib.util.find_spec("torchvision")
    if found is not None and found.origin is not None:
        try:
            torch.ops.load_library(next(Path(found.origin).parent.glob("_C*.so")))
        except (OSError, StopIteration):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for name in ("nms", "qnms"):
                torch.library.define(f"torchvision::{name}", schema)


_let_torchvision_load()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no collection of garbage looks at the modules and the tests again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images; the test is skipped without it."""
    path = os.environ.get("KASOKU_DATA", "")
    if not path or not Path(path).is_dir():
        pytest.skip("KASOKU_DATA names no folder: the real images are not here")
    return Path(path)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short training on the digits, on one rank; not to be written to: copy it."""
    from kasoku.cli import main

    run = tmp_path_factory.mktemp("shared") / "digits-0"
    short = ["epochs=4", "evaluate.every=0.5", "evaluate.stop=false", "device.threads=1"]
    settings = [part for setting in short for part in ("--set", setting)]
    assert main(["train", str(ROOT / "recipes" / "digits_cnn_98.toml"), *settings, "--quiet", "--out", str(run)]) == 0
    return run


@pytest.fixture(autouse=True)
def _reset_trust() -> Iterator[None]:
    from kasoku.config import trust

    with trust.only(()):
        yield


@pytest.fixture(autouse=True)
def _caches_stay_in_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _trainings_of_a_worker_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that leave the number to kasoku: with two workers on two cores, a second thread spins and waits."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        monkeypatch.setattr("kasoku.device.select.cores", lambda: 1)


@pytest.fixture
def one_core():
    """On images this small a second thread only waits; for what chooses the number of threads itself."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _global_state_is_put_back():
    """Of random numbers and threads: a training of this process sets as many threads as there are cores."""
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    yield
    torch.set_rng_state(state)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many commands of the manual ran, and which did not."""
    pages = [dict(report.user_properties) for report in terminalreporter.getreports("passed")]
    ran = [page["ran"] for page in pages if "ran" in page]
    skipped = [line for page in pages for line in page.get("skipped", ())]
    if ran:
        terminalreporter.section("commands of the manual")
        terminalreporter.line(
            f"{sum(ran)} commands and Python blocks of {len(ran)} pages ran, {len(skipped)} blocks were skipped:"
        )
        for line in skipped:
            terminalreporter.line(f"  {line}")
