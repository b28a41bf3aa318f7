"""Which device, precision and techniques a run gets, and how it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kasoku.config.toml import parse, table
from kasoku.core import InputError, Job
from kasoku.core.hardware import computes_bf16, cores
from kasoku.device import Autocast, ChannelsLast, Compile, CpuKernels, Device, LossScale, choose, select, tune_malloc
from kasoku.optim import sgd

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _settings_are_put_back():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Two GPUs of a given capability, as far as choosing goes."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_takes_bf16_only_where_it_computes_it(fast: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(select, "pays", lambda threads: False)
    chosen = choose(Device(kind="cpu"))
    assert chosen.device == CPU
    if fast:
        assert (chosen.precision, chosen.dtype) == ("bf16", torch.bfloat16)
        assert chosen.techniques == (Autocast("bf16"), ChannelsLast())
        assert "bf16 (computed by the hardware), channels_last" in chosen.summary
    else:
        assert (chosen.precision, chosen.dtype) == ("fp32", torch.float32)
        assert chosen.techniques == (ChannelsLast(),)
        assert "fp32 (no fast half precision known here)" in chosen.summary
    assert "\n" not in chosen.summary


def test_c_kernels_are_chosen_where_they_pay_and_act(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(select, "pays", lambda threads: True)
    chosen = choose(Device(kind="cpu", precision="bf16"))
    assert chosen.techniques == (Autocast("bf16"), ChannelsLast(), CpuKernels())
    assert "channels_last, C kernels" in chosen.summary
    for other in ({"precision": "fp32"}, {"channels_last": False}, {"compile": True}, {"kernels": False}):
        assert CpuKernels() not in choose(Device(**{"kind": "cpu", "precision": "bf16"} | other)).techniques


@pytest.mark.parametrize(
    ("capability", "precision", "scaled"),
    [((6, 1), "fp32", 0), ((7, 0), "fp16", 1), ((7, 5), "fp16", 1), ((9, 0), "bf16", 0)],
)
def test_an_old_gpu_takes_fp16_with_loss_scaling(gpu, capability, precision: str, scaled: int):
    gpu(capability)
    chosen = choose(Device(), local_rank=1)
    assert chosen.device == torch.device("cuda", 1)
    assert chosen.precision == precision
    assert chosen.techniques.count(LossScale()) == scaled
    assert torch.backends.cudnn.benchmark
    assert chosen.summary.startswith("Pretended")


def test_more_ranks_than_gpus_are_refused(gpu):
    gpu((9, 0))
    with pytest.raises(InputError, match="local rank 2: this host has 2 GPUs: start at most 2 ranks on it"):
        choose(Device(), local_rank=2)


def test_what_is_asked_for_is_taken_and_a_slow_wish_is_called_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert "slow" in choose(Device(kind="cpu", precision="bf16")).summary
    chosen = choose(Device(kind="cpu", precision="fp16", channels_last=False, compile=True, threads=1))
    assert chosen.techniques == (Autocast("fp16"), LossScale(), Compile())
    assert torch.get_num_threads() == chosen.threads == 1
    assert chosen.summary.startswith("cpu (1 thread), fp16 (as asked), loss scaling, compiled blocks")


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_one_line():
    for kind in ("cuda", "mps"):
        with pytest.raises(InputError, match=f'kind="{kind}": .* use "auto" or "cpu"') as error:
            choose(Device(kind=kind))
        assert "\n" not in str(error.value)


def test_deterministic_is_set_and_unset():
    assert "deterministic" in choose(Device(kind="cpu", deterministic=True)).summary
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    choose(Device(kind="cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["kasoku.device.select"], "cores", lambda: 8)
    assert choose(Device(kind="cpu"), local_size=4).threads == 2
    assert choose(Device(kind="cpu"), local_size=16).threads == 1
    assert choose(Device(kind="cpu", threads=3), local_size=4).threads == 3


def test_cores_are_those_a_container_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cores(tmp_path) == 8  # no cgroup files
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores(tmp_path) == 2
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000")
    assert cores(tmp_path) == 3
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1")
    assert cores(tmp_path) == 8


def test_the_table_is_checked_and_comes_back():
    device = Device(kind="cpu", precision="fp32", threads=2)
    assert parse(Device, table(device), "device") == device
    for wrong, line in [
        ({"precision": "bf8"}, 'device.precision = "bf8": one of "auto", "fp32", "bf16", "fp16"'),
        ({"threads": -1}, "device: threads=-1: at least 0 and at most 4,096; 0 takes all cores"),
    ]:
        with pytest.raises(InputError) as error:
            parse(Device, wrong, "device")
        assert str(error.value) == line


def test_compiled_blocks_and_cuda_graphs_are_refused_together():
    chosen = choose(Device(kind="cpu", compile=True, graphs=True))
    with pytest.raises(InputError, match="techniques Compile and Graphs cannot be combined: a block that compiles"):
        Job(torch.nn.Linear(2, 2), sgd).apply(*chosen.techniques)


@pytest.mark.process
@pytest.mark.smoke
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is tuned on Linux only")
def test_tuned_malloc_keeps_large_blocks_mapped():
    # In a process of its own: the setting cannot be taken back. Without it each round faults all its pages in anew.
    program = """
import resource, sys
import torch
from kasoku.device import tune_malloc
done = tune_malloc() and tune_malloc() if sys.argv[1] == "tuned" else False
def round():
    x = torch.ones(32 * 2**20 // 4)
    del x
for _ in range(12): round()  # until the heap has grown to what a round needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): round()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for how in ("tuned", "plain"):
        out = subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout
        done, count = out.split()
        if how == "tuned" and done == "False":
            pytest.skip("the C library is not glibc")
        faults[how] = int(count)
    assert 10 * faults["tuned"] < faults["plain"]


def test_tuning_twice_is_tuning_once():
    assert tune_malloc() is tune_malloc()


def test_bf16_is_not_claimed_for_devices_we_do_not_know():
    assert not computes_bf16(torch.device("meta"))
    assert isinstance(computes_bf16(CPU), bool)
