"""`kasoku profile`: blocks, operators, gaps and bounds of a few steps; the trace has the memory."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contracts import Batches, Net, rule
from contracts import one_thread as one_thread
from helpers import shown
from helpers.forked import Forked
from helpers.started import clean
from helpers.tuning import SMALL
from kasoku.cli import main
from kasoku.commands.profile import ProfileArguments, _recipe, run
from kasoku.core import InputError, Job
from kasoku.device import Compile
from kasoku.report import Timed
from kasoku.report.profile_tables import profile_tables
from kasoku.report.profiler import Iteration, Profiler, StepProfile, _iteration, device_speed

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"


class _Sleep(torch.autograd.Function):
    """Identity that takes its time, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Slow(nn.Module):
    """A linear layer with a nap."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear, self.forward_s, self.backward_s = nn.Linear(8, 8, bias=False), forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.forward_s, self.backward_s)


class Pairs:
    """Five images of eight numbers, over and over."""

    def __init__(self, batches: int = 4) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield torch.ones(5, 8), torch.zeros(5, dtype=torch.long)


def looked_at(job: Job, steps: int = 3, trace: Path | None = None) -> StepProfile:
    profiler = Profiler(job)
    profiler.warm_up()
    plain = profiler.plain(steps)
    return profiler.look(steps, plain, trace=trace)


@pytest.mark.timing
def test_each_block_gets_its_own_time_forward_and_backward():
    model = nn.Sequential(Slow(0.02, 0.005), Slow(0.001, 0.04), nn.Linear(8, 4))
    profile = looked_at(Job(model, rule, loader=Pairs()).apply(Timed()))
    first, second, head = profile.blocks
    assert [block["name"] for block in profile.blocks] == ["0", "1", "2"]
    assert (first["forward_s"], first["backward_s"]) == (pytest.approx(0.02, abs=0.01), pytest.approx(0.005, abs=0.01))
    assert second["forward_s"] == pytest.approx(0.001, abs=0.01)
    assert second["backward_s"] == pytest.approx(0.04, abs=0.01)
    assert 0 < head["forward_s"] < 0.01
    assert [block["parameter_bytes"] for block in profile.blocks] == [256, 256, 144]


def test_flops_of_a_step_are_those_of_its_matrix_products():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    bounds = looked_at(Job(model, rule, loader=Pairs())).bounds
    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert bounds["flops"] == 2 * first + 3 * second  # the first layer's input wants no gradient
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert bounds["bytes"] > 3 * weights  # read in forward, written as gradients, read and written by the update
    assert bounds["least_s"] == pytest.approx(
        max(bounds["flops"] / bounds["flops_per_s"], bounds["bytes"] / bounds["bytes_per_s"]), abs=1e-6
    )


def test_what_forward_keeps_is_counted_once_and_to_its_block():
    model = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 4))
    saved = [block["saved_bytes"] for block in looked_at(Job(model, rule, loader=Pairs())).blocks]
    assert saved == [5 * 8 * 4, 5 * 16 * 4, 0]  # its input; its output; the same memory again


@pytest.mark.exhaustive
def test_a_job_with_techniques_batch_norm_and_parts_can_be_looked_at(tmp_path: Path):
    job = Job(Net(), rule, loader=Batches(batch=32), accumulate=2).apply(Compile(backend="aot_eager"), Timed())
    profile = looked_at(job, trace=tmp_path / "trace.json")
    assert [block["name"] for block in profile.blocks] == ["stage.0", "stage.1", "head"]
    assert all(block["forward_s"] > 0 and block["backward_s"] > 0 for block in profile.blocks)
    assert profile.bounds["flops"] > 1e6
    assert profile.operators
    assert profile.operators[0]["host_s"] > 0
    assert len(profile.iterations) == 3
    assert all(0 <= one.idle_s <= one.step_s for one in profile.iterations)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert json.loads(json.dumps(asdict(profile)))["bounds"] == profile.bounds


def test_looking_leaves_no_hook_behind():
    job = Job(Net(), rule, loader=Batches(batch=32))
    looked_at(job, steps=1)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in job.model.modules())


def test_idle_time_is_what_no_kernel_covers_and_gaps_lie_between_the_stretches():
    step = _iteration([(0, 2), (1, 3), (5, 6), (5.5, 5.75), (9, 20)], 1, 10)
    assert step.step_s == pytest.approx(9e-6)
    assert step.idle_s == pytest.approx((9 - 2 - 1 - 1) * 1e-6)
    assert _iteration([], 0, 5) == Iteration(5e-6, 5e-6)
    assert _iteration([(-5, 50)], 1, 10).idle_s == 0
    stretches = _iteration([(0, 2e5), (2.001e5, 3e5), (6e5, 9e5), (7e5, 8e5)], 0, 1e6).used
    assert stretches == [("kernels", 0.0, 0.3, 1.0), ("kernels", 0.6, 0.9, 1.0)], "a gap of 0.1 ms in a second is none"


def test_the_parts_of_a_step_on_a_cpu_have_the_share_that_was_used(monkeypatch: pytest.MonkeyPatch):
    wall, busy = iter([0.0, 1.0, 3.0, 4.0]), iter([0.0, 0.1, 2.1, 2.6])
    profiler = Profiler(Job(nn.Linear(8, 4), rule, loader=Pairs()))
    monkeypatch.setattr("kasoku.report.profiler.cores", lambda: 1)
    monkeypatch.setattr(time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(time, "process_time", lambda: next(busy))
    monkeypatch.setattr(profiler.watch, "synchronize", lambda: 0.0)
    profiler.job.trace.phase = lambda name: None
    (step,) = profiler.plain(1)
    assert step.used == [
        ("input", 0.0, 1.0, 0.1),
        ("forward and backward", 1.0, 3.0, 1.0),
        ("update", 3.0, 4.0, 0.5),
    ]
    assert (step.step_s, step.idle_s) == (4.0, pytest.approx(4 - 2.6))


def test_bounds_are_measured_on_the_device():
    flops_per_s, bytes_per_s = device_speed(torch.device("cpu"), torch.float32)
    assert 1e8 < flops_per_s < 1e14
    assert 1e8 < bytes_per_s < 1e13
    profiler = Profiler(Job(nn.Linear(8, 4), rule, loader=Pairs()))
    profiler.flops, profiler.moved = 0, 2**30
    profiler.flops_per_s, profiler.bytes_per_s = flops_per_s, bytes_per_s
    bounds = profiler.bounds([Iteration(1.0, 0.0)])
    assert bounds["reached"] == pytest.approx(2**30 / bounds["bytes_per_s"], abs=1e-3)


def test_the_table_says_whether_arithmetic_or_bytes_bound_a_step():
    profiler = Profiler(Job(nn.Linear(8, 4), rule, loader=Pairs()))
    profiler.flops_per_s, profiler.bytes_per_s = 1e12, 1e10
    for flops, moved, said in (
        (1e9, 1.5e8, "15.000 ms at least, by its bytes"),
        (1.5e10, 1e7, "15.000 ms at least, by its FLOPs"),
        (1e9, 4e8, "1.000 ms at least, by its FLOPs"),  # 40 ms of bytes in a step of 20: caches served them
    ):
        profiler.flops, profiler.moved = flops, moved
        document = shown.profile() | {"bounds": profiler.bounds([Iteration(0.02, 0.0)])}
        *_, (_, _, rows) = profile_tables(document)
        assert any(said in line for _, line in rows)


def test_the_speed_of_the_device_is_not_measured_within_the_time_of_the_steps(monkeypatch: pytest.MonkeyPatch):
    profiler = Profiler(Job(nn.Linear(8, 4), rule, loader=Pairs()))
    profiler.warm_up()  # the command creates its ledger after this
    monkeypatch.setattr("kasoku.report.profiler.fastest_s", lambda *_: pytest.fail("the ledger would count this time"))
    assert profiler.bounds(profiler.plain(1))["flops_per_s"] > 0


def test_a_loader_without_a_batch_is_one_clear_line():
    with pytest.raises(InputError, match=r"no batch in it.*: take more images or a smaller batch"):
        looked_at(Job(nn.Linear(8, 4), rule, loader=Pairs(0)))


@pytest.mark.timing
@pytest.mark.smoke
def test_the_command_writes_its_files_and_says_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "found"
    assert main(["profile", str(RECIPE), "--steps", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for said in ("a step, the median", "blocks, the slowest first", "operators", "idle in each iteration", "bound"):
        assert said in shown
    ledger = json.loads((out / "ledger.json").read_text())
    assert f"{ledger['verdict'][0]['cause']}: " in shown
    assert ledger["step_s"]["forward"] > 0
    assert json.loads((out / "timeline.json").read_text())["spans"]
    assert json.loads((out / "profile.json").read_text())["blocks"]
    names = {event.get("name") for event in json.loads((out / "trace.json").read_text())["traceEvents"]}
    assert names >= {"kasoku iteration", "[memory]"}
    pytest.importorskip("plotly")
    assert main(["report", str(out)]) == 0
    page = (out / "report.html").read_text()
    for title in ("Idle gaps", "Blocks", "Operators, over the traced steps"):
        assert title in page


LATE = """
import os, time
from kasoku.models import cifarnet

def late(num_classes: int = 10, in_channels: int = 1):
    model = cifarnet(num_classes=num_classes, in_channels=in_channels, widths=[8, 16])
    if os.environ["RANK"] == "1":
        model.register_forward_pre_hook(lambda *_: time.sleep(0.15))
    return model
"""


@pytest.mark.process
@pytest.mark.smoke
def test_two_ranks_are_profiled_together_and_the_late_one_is_named(tmp_path: Path):
    (tmp_path / "late_nets.py").write_text(LATE)
    recipe, out = tmp_path / "late.toml", tmp_path / "found"
    recipe.write_text(SMALL.replace('"kasoku.models.cifarnet", widths = [8, 16]', '"late_nets.late"'))
    process = Forked(["profile", str(recipe), "--steps", "3", "--ranks", "2", "--out", str(out)], clean())
    shown, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert re.search(r"│ 0 +│ +[\d.]+ │ +[\d.]+ │", shown), shown
    assert "straggler: rank 1 takes" in shown
    profiles = [json.loads((out / f"profile{i}.json").read_text()) for i in ("", "-1")]
    assert all(profile["blocks"] and profile["iterations"] for profile in profiles)
    first, second = profiles[0]["ranks"]
    assert first["wait_s"] > 0.1 > second["wait_s"], "rank 0 waits for rank 1's nap"
    assert second["compute_s"] > first["compute_s"] + 0.1
    assert second["compute_s"] == pytest.approx(sum(second[f"{row}_s"] for row in ("forward", "backward", "update")))
    assert first["idle"] > 0.5
    assert len(json.loads((out / "ledger.json").read_text())["ranks"]) == 2
    pytest.importorskip("plotly")
    assert main(["report", str(out)]) == 0
    assert "rank 1, step 3" in (out / "report.html").read_text()


def test_ranks_that_take_no_common_step_are_not_profiled_together():
    asynchronous = "techniques=[{use='kasoku.distributed.Asynchronous'}]"
    arguments = ProfileArguments(recipe=RECIPE, set=(asynchronous,))
    assert _recipe(arguments, 1).techniques
    with pytest.raises(InputError, match=r"Asynchronous on 2 ranks: no step is one of all ranks; .*--ranks 1"):
        _recipe(arguments, 2)


def test_a_batch_that_grows_is_profiled_in_whole_steps(tmp_path: Path):
    grows = ["--set", "techniques.1.use=kasoku.data.GrowBatch", "--set", "epochs=3", "--set", "norm_batch=32"]
    assert main(["profile", str(RECIPE), "--steps", "10", *grows, "--out", str(tmp_path / "found")]) == 0


def test_what_cannot_be_profiled_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["profile", str(RECIPE), "--steps", "0"]) == 2
    assert capsys.readouterr().err == "kasoku: --steps 0: at least 1 step is wanted\n"
    assert main(["profile", str(RECIPE), "--ranks", "0"]) == 2
    assert capsys.readouterr().err == "kasoku: --ranks 0: at least 1 process is wanted\n"
    (tmp_path / "checkpoints").mkdir()
    assert main(["profile", str(RECIPE), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds a run" in error
    assert error.count("\n") == 1


def test_a_used_folder_is_refused_before_the_training_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> None:
        raise InputError("built")

    monkeypatch.setattr("kasoku.commands.profile.build", fails)
    used, unused = tmp_path / "used", tmp_path / "unused"
    (used / "checkpoints").mkdir(parents=True)
    for out, said in ((used, "holds a run"), (unused, "built")):
        with pytest.raises(InputError, match=said):
            run(ProfileArguments(recipe=RECIPE, out=out))
    assert not unused.exists()
