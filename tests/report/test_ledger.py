"""The ledger: every second belongs to one row, whatever happens inside of what."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from contracts import Batches, Net, make, rule, train
from contracts import one_thread as one_thread
from helpers.virtual_comm import Emulate, SimComm, VirtualClock
from kasoku.core import Comm, Job, Solo, Threads, Trace
from kasoku.distributed import AllReduce, Overlap, PerLayer
from kasoku.distributed.ddp.cost_model import LinkModel, UnitTimes
from kasoku.distributed.startup import Start
from kasoku.optim import sgd
from kasoku.report import Ledger, LiveVerdict, StepBottleneck, StepFacts, Timed
from kasoku.report.ledger import STEP, Steps

ROOT = Path(__file__).parent.parent.parent
FACTS = StepFacts(device="cpu", batch=64, layers=3, layer_s=1e-5, parameters=100)
CPU = torch.device("cpu")


class SlowLoader:
    """Each batch takes half a second of the virtual clock."""

    def __init__(self, clock: VirtualClock, batches: int) -> None:
        self.clock, self.batches = clock, batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.batches):
            self.clock.advance(0.5)
            yield torch.zeros(2, 4, device="meta"), torch.zeros(2, device="meta")


def virtual_job(batches: int, *, accumulate: int = 1) -> tuple[Job, VirtualClock]:
    """Forward takes 1 s, backward 2 s, an update 0.25 s."""
    clock = VirtualClock()
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).to("meta")
    comm = SimComm(1, LinkModel(1e-3, 1e9), clock)
    loader = SlowLoader(clock, batches)
    job = Job(
        model, lambda m: sgd(m, lr=0.1), loader=loader, loss=lambda o, y: o.sum(), comm=comm, accumulate=accumulate
    )
    return job.apply(Emulate((UnitTimes("0", 1.0, 2.0, 0.25),)), Timed()), clock


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rows_are_exact_on_a_virtual_clock_and_sum_to_the_wall(accumulate: int):
    job, clock = virtual_job(8, accumulate=accumulate)
    clock.advance(3.0)
    ledger = Ledger(job.trace, started=0.0, setup={"import": 1.0, "data": 1.5})
    for i, (x, y) in enumerate(job.loader):
        job.loss(job.model(x), y).backward()
        if (i + 1) % accumulate == 0:
            job.optimizer.step()
            clock.advance(0.125)  # the loop's own business
            job.optimizer.zero_grad()
    with job.trace.span("evaluate"):
        clock.advance(5.0)
        with job.trace.span("save"):
            clock.advance(0.75)
        clock.advance(5.0)
    steps = 8 // accumulate
    assert ledger.rows() == {
        "import": 1.0,
        "data": 1.5,
        "run folder": 0.5,
        "compile": 0.0,
        "input": 4.0,
        "copy": 0.0,
        "transforms": 0.0,
        "forward": 8.0,
        "backward": 16.0,
        "exposed": 0.0,
        "update": 0.25 * steps,
        "evaluate": 10.0,
        "save": 0.75,
        "other": 0.125 * steps,
    }
    assert sum(ledger.rows().values()) == clock.now()
    median = {"input": 0.5, "forward": 1.0, "backward": 2.0}
    wanted = {row: accumulate * s for row, s in median.items()} | {"update": 0.25, "other": 0.125}
    assert ledger.steps.step_s() == dict.fromkeys(STEP, 0.0) | wanted
    assert ledger.training_s() == pytest.approx(28 + 0.375 * steps)


def test_the_latest_steps_have_a_verdict_of_their_own():
    job, clock = virtual_job(8)
    live, verdicts = LiveVerdict(Ledger(job.trace, started=0.0)), []
    for i, (x, y) in enumerate(job.loader):
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        clock.advance(5.0 if i > 4 else 0.0)
        if i in (3, 7):
            verdicts.append(live.judge(lambda: FACTS)[0])
    assert [verdict.cause for verdict in verdicts] == ["input-bound", "loop-bound"]
    assert verdicts[0].share == pytest.approx(0.5 / 3.75, abs=1e-4)
    assert live.judge(lambda: FACTS) == (None, False), "it is not due"


def test_a_live_verdict_is_shown_when_it_differs_twice(monkeypatch: pytest.MonkeyPatch):
    job, clock = virtual_job(8)
    live, causes = LiveVerdict(Ledger(job.trace, started=0.0)), iter("abbbabbaa")
    named = lambda *_: [StepBottleneck(next(causes), 0.5, "", "")]  # noqa: E731
    monkeypatch.setattr("kasoku.report.ledger.find_bottlenecks", named)
    shown = []
    for _ in range(9):
        clock.advance(20.0)
        job.trace.follower.end()
        shown.append(live.judge(lambda: FACTS)[1])
    assert shown == [False, False, True, False, False, False, False, False, True]


def test_waiting_is_taken_off_its_phase_and_spans_without_a_row_are_not():
    clock = VirtualClock()
    trace = Trace(clock)
    steps = trace.follower = Steps(clock, CPU)
    trace.phase("backward")
    clock.advance(1)
    with trace.span("the users own"):
        clock.advance(2)
        with trace.span("wait", bytes=8):
            clock.advance(4)
            with trace.span("another"):
                clock.advance(8)
        clock.advance(16)
    trace.phase("other")
    assert steps.host_s() == {"other": 0, "backward": 19, "exposed": 12}


def test_evaluation_keeps_what_happens_within_it():
    clock = VirtualClock()
    trace = Trace(clock)
    steps = trace.follower = Steps(clock, CPU)
    with trace.span("evaluate"):
        with trace.span("wait"):
            clock.advance(1)
        with trace.span("input", "4 batches ready"):
            clock.advance(2)
        trace.phase("forward")
        clock.advance(4)
        trace.phase("other")
    assert steps.host_s() == {"other": 0, "evaluate": 7}


def test_what_the_first_step_takes_longer_is_the_row_compile():
    clock = VirtualClock()
    trace = Trace(clock)
    steps = trace.follower = Steps(clock, CPU)
    ledger = Ledger(trace, started=0.0)
    for i in range(5):
        for phase in ("input", "forward", "backward", "update"):
            trace.phase(phase)
            clock.advance(10 if i == 0 and phase != "input" else 1)
        steps.end()
        trace.phase("other")
    rows = ledger.rows()
    assert rows["compile"] == 27
    assert {rows[row] for row in ("input", "forward", "backward", "update")} == {5}
    assert sum(rows.values()) == clock.now()


def test_a_resumed_training_goes_on_with_the_rows_of_its_earlier_parts():
    job, clock = virtual_job(2)
    ledger = Ledger(job.trace, started=0.0, setup={}, earlier={"import": 7.0, "forward": 100.0, "other": 1.0})
    train_virtually(job)
    assert ledger.rows()["import"] == 7
    assert ledger.rows()["forward"] == 102
    assert sum(ledger.rows().values()) == 108 + clock.now()
    assert ledger.mean_s()["forward"] == 1
    clock.advance(1000)  # after the last step, which no step takes
    assert ledger.mean_s()["other"] == 0


def train_virtually(job: Job) -> None:
    for x, y in job.loader:
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()


def test_a_second_fit_of_the_same_job_has_a_ledger_of_its_own():
    job, clock = virtual_job(3)
    Ledger(job.trace, started=0.0)
    train_virtually(job)
    clock.advance(1000)
    ledger = Ledger(job.trace, started=clock.now())
    train_virtually(job)
    assert ledger.rows()["forward"] == 3
    assert ledger.rows()["other"] == 0
    assert ledger.steps.count == 3


def test_the_timeline_is_the_last_steps_in_seconds_from_their_first():
    job, _ = virtual_job(6)
    ledger = Ledger(job.trace, started=0.0)
    train_virtually(job)
    document, timeline = ledger.document(job.comm, FACTS)
    spans = timeline["spans"]
    assert [s["kind"] for s in spans] == ["input", "forward", "backward", "update"] * 3
    assert [s["stream"] for s in spans[:4]] == ["input", "compute", "compute", "compute"]
    assert (spans[0]["start"], spans[-1]["stop"]) == (0.0, 3 * 3.75)
    assert all(a["stop"] == b["start"] for a, b in itertools.pairwise(spans))
    assert set(spans[0]) == {"kind", "name", "start", "stop", "rank", "bytes", "stream"}
    assert set(document) >= {"wall_s", "rows", "beside", "step_s", "verdict", "ranks"}
    assert json.loads(json.dumps(document)) == document


def test_the_rows_of_all_ranks_are_told_and_waiting_for_others_is_seen():
    def rank(comm: Comm) -> tuple[dict, dict]:
        job = make(AllReduce(), Timed(), comm=comm)
        ledger = Ledger(job.trace, started=job.clock.now())
        train(job, 6)
        return ledger.document(comm, FACTS)

    (ledger, timeline), (other, _) = Threads(2).run(rank)
    assert ledger["ranks"] == other["ranks"]
    assert len(ledger["ranks"]) == 2
    assert ledger["rows"] == ledger["ranks"][0]
    assert {span["rank"] for span in timeline["spans"]} == {0, 1}
    waits = [span for span in timeline["spans"] if span["kind"] == "exposed"]
    assert waits
    assert all(span["stream"] == "compute" and span["bytes"] > 0 for span in waits)
    assert all(rows["exposed"] > 0 for rows in ledger["ranks"])


def test_the_share_of_steps_in_which_a_rank_was_the_last_is_told():
    waits_s = [[0.1, 3.0, 3.0, 3.0, 0.1], [0.0, 0.0, 0.0, 2.0]]  # the first step of rank 0 was another one

    def rank(comm: Comm) -> dict:
        job = make(AllReduce(), Timed(), comm=comm)
        train(job, 2)
        ledger = Ledger(job.trace, started=job.clock.now())
        ledger.steps.rows.extend(dict.fromkeys(STEP, 0.0) | {"exposed": s} for s in waits_s[comm.rank])
        return ledger.document(comm, FACTS)[0]

    for ledger in Threads(2).run(rank):
        assert ledger["last_in"] == [0.25, 0.75]


def test_transfers_hidden_behind_computing_are_on_the_link_of_the_timeline():
    units = tuple(UnitTimes(name, 1.0, 2.0, 0.0) for name in "012")
    clock = VirtualClock()
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in units)).to("meta")
    comm = SimComm(4, LinkModel(0.25, 1e9), clock)
    job = Job(model, lambda m: sgd(m, lr=0.1), loader=SlowLoader(clock, 4), loss=lambda o, y: o.sum(), comm=comm)
    job.apply(Emulate(units), Overlap(PerLayer(least_bytes=0)), Timed())
    ledger = Ledger(job.trace, started=clock.now())
    for x, y in job.loader:
        job.loss(job.model(x), y).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    _, timeline = ledger.document(Solo(), FACTS)
    under_way = [span for span in timeline["spans"] if span["kind"] == "transfer"]
    assert {span["name"] for span in under_way} == {"bucket 0", "bucket 1", "bucket 2"}
    assert all(span["stream"] == "link" and span["bytes"] == 64 for span in under_way)
    backward = [span for span in timeline["spans"] if span["kind"] == "backward"]
    hidden = [t for t in under_way if any(b["start"] < t["stop"] and t["start"] < b["stop"] for b in backward)]
    assert len(hidden) >= 4  # of two layers of each of the last steps


@pytest.mark.process
@pytest.mark.timing
def test_a_main_thread_without_a_core_is_starved(tmp_path):
    """Two processes that never wait, on one core: each has half of it."""
    spin = "import time\nend = time.monotonic() + {s}\nwhile time.monotonic() < end: pass\n"
    look = (
        "import os, sys\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "import subprocess\nfrom kasoku.core import Trace, Wall\nfrom kasoku.report import Ledger\n"
        f"other = subprocess.Popen([sys.executable, '-c', {spin.format(s=2.0)!r}])\n"
        "import time; time.sleep(0.3)\nledger = Ledger(Trace(Wall()), started=0.0)\n"
        f"{spin.format(s=1.0)}print(ledger.starved())\nother.wait()\n"
    )
    out = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    assert 0.3 < float(out.stdout) < 0.9  # more than half where other processes are on that core too


def test_a_deep_copy_of_the_model_is_not_timed():
    job = make(Timed())
    ledger = Ledger(job.trace, started=job.clock.now())
    twin = copy.deepcopy(job.model).train()
    twin(job.plain_loader.batches[0][0])
    job.model.eval()
    job.model(job.plain_loader.batches[0][0])
    assert ledger.rows()["forward"] == 0
    job.model.train()
    job.model(job.plain_loader.batches[0][0])
    assert ledger.rows()["forward"] > 0


def test_a_real_loop_sums_to_its_wall_time():
    job = Job(Net(), rule, loader=Batches(batch=64)).apply(Timed())
    began = time.perf_counter()
    ledger = Ledger(job.trace, started=began)
    train(job, 20)
    rows = ledger.rows()
    assert sum(rows.values()) == pytest.approx(time.perf_counter() - began, rel=0.01)
    assert min(rows[row] for row in ("input", "forward", "backward", "update")) > 0
    assert min(rows.values()) >= 0


def test_set_up_tasks_belong_to_the_training_that_they_were_for():
    clock = VirtualClock()
    clock.advance(2.0)
    start = Start(clock, overlap=False, began=0.0)
    start.do("data", lambda: clock.advance(3.0))
    shares, beside = start.shares(0.0)
    assert sum(shares.values()) == 5
    assert shares["data"] == 3
    assert beside == {}
    assert start.shares(5.0) == ({}, {})  # the process trains again
    later = Start(clock, overlap=False)
    later.do("data", lambda: clock.advance(3.0))
    assert later.shares(4.0) == ({"import": 1.0, "data": 3.0}, {})


@pytest.mark.timing
def test_tasks_that_ran_beside_others_are_shown_as_such():
    start = Start(overlap=True, began=time.perf_counter())
    start.add("long", lambda: time.sleep(0.2))
    start.add("short", lambda: time.sleep(0.1))
    start.wait()()
    shares, beside = start.shares(start.began)
    assert shares["long"] > 0.19
    assert shares["short"] < 0.05
    assert beside == {"short": pytest.approx(0.1, abs=0.05)}


@pytest.mark.process
@pytest.mark.timing
def test_a_trainings_rows_sum_to_its_wall_time_and_other_is_small(tmp_path):
    command = [sys.executable, "-m", "kasoku", "train", str(ROOT / "recipes" / "digits_cnn_98.toml"), "--quiet"]
    settings = ["epochs=8", "evaluate.target=0", "schedule.epochs=8", "schedule.warmup=1"]
    options = [part for setting in settings for part in ("--set", setting)]
    began = time.perf_counter()
    subprocess.run([*command, *options, "--out", str(tmp_path / "run")], check=True, timeout=300)
    outside_s = time.perf_counter() - began
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())
    rows = ledger["rows"]
    assert sum(rows.values()) == pytest.approx(ledger["wall_s"], rel=0.01)
    assert rows["other"] <= 0.03 * ledger["wall_s"]
    assert min(rows.values()) >= 0
    assert 0.9 * outside_s - 1 < ledger["wall_s"] <= outside_s  # but for the end of the interpreter
    assert {"import", "packages", "data", "model", "run folder", "forward", "backward", "evaluate", "save"} <= set(rows)
    assert list(rows)[-10:] == [*STEP[:-1], "evaluate", "save", "other"]
    assert ledger["verdict"]
    assert json.loads((tmp_path / "run" / "timeline.json").read_text())["spans"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["seconds_by"] == pytest.approx(rows, abs=0.001)


def test_the_ledger_of_a_trained_run_sums_to_its_wall_time(digits_run: Path):
    ledger = json.loads((digits_run / "ledger.json").read_text())
    rows = ledger["rows"]
    assert sum(rows.values()) == pytest.approx(ledger["wall_s"], rel=0.01)
    assert min(rows.values()) >= 0
    assert {"import", "data", "model", "run folder", "forward", "backward", "evaluate", "save"} <= set(rows)
    assert list(rows)[-10:] == [*STEP[:-1], "evaluate", "save", "other"]
    assert ledger["verdict"]
    result = json.loads((digits_run / "result.json").read_text())
    assert result["seconds_by"] == pytest.approx(rows, abs=0.001)


class FakeStream:
    """A device that works through what the host gives it, on the host's virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.until = clock, 0.0

    def run(self, seconds: float) -> None:
        """The host goes on at once."""
        self.until = max(self.until, self.clock.now()) + seconds


class FakeEvent:
    """As torch.cuda.Event; counts how many there are."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at = stream, max(stream.until, stream.clock.now())

    def query(self) -> bool:
        return self.at <= self.stream.clock.now()

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1000 * (other.at - self.at)

    def synchronize(self) -> None:
        self.stream.clock.until(self.at)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream(VirtualClock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "made", 0)
    return stream


def on_the_device(stream: FakeStream, trace: Trace, steps: Steps) -> None:
    """One step: a tenth of a second of the host each, but seconds of the device."""
    for phase, seconds in (("input", 0.0), ("forward", 1.0), ("backward", 2.0), ("update", 0.5)):
        trace.phase(phase)
        stream.clock.advance(0.1)
        stream.run(seconds)
    steps.end()
    trace.phase("other")


def test_on_a_gpu_rows_follow_device_time_and_the_host_never_waits(fake_gpu: FakeStream):
    clock = fake_gpu.clock
    trace = Trace(clock)
    steps = trace.follower = Steps(clock, torch.device("cuda"))
    ledger = Ledger(trace, started=0.0)
    for _ in range(10):
        on_the_device(fake_gpu, trace, steps)
    assert clock.now() == pytest.approx(4.0)  # nobody waited for the device, which is at work for 31 s more
    assert len(steps.rows) == 0
    clock.until(fake_gpu.until)  # somebody reads a loss
    steps.settle()
    assert steps.count == 10
    rows = ledger.rows()
    assert sum(rows.values()) == pytest.approx(clock.now())
    for row, seconds in (("forward", 1.0), ("backward", 2.0), ("update", 0.5), ("exposed", 0.0), ("evaluate", 0.0)):
        assert rows[row] == pytest.approx(10 * seconds, abs=0.2)
        assert ledger.steps.step_s().get(row, 0.0) == pytest.approx(seconds)
    spans = ledger._spans()
    assert spans[-1]["stop"] == pytest.approx(3 * 3.5)
    made = FakeEvent.made
    for _ in range(20):
        on_the_device(fake_gpu, trace, steps)
        clock.until(fake_gpu.until)
    assert FakeEvent.made <= made  # those that have passed are used again


def test_on_a_gpu_that_waits_for_its_input_the_input_is_what_shows(fake_gpu: FakeStream):
    clock = fake_gpu.clock
    trace = Trace(clock)
    steps = trace.follower = Steps(clock, torch.device("cuda"))
    ledger = Ledger(trace, started=0.0)
    for _ in range(10):
        trace.phase("input")
        clock.advance(10.0)
        on_the_device(fake_gpu, trace, steps)
    clock.until(fake_gpu.until)
    steps.settle()
    assert ledger.steps.step_s()["input"] == pytest.approx(10 - 3.3 + 0.1, abs=0.2)
    assert ledger.rows()["forward"] == pytest.approx(11, rel=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_real_gpu_every_row_gets_its_time():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
    x, y = torch.randn(4096, 4096, device="cuda"), torch.zeros(4096, dtype=torch.long, device="cuda")
    job = Job(model, rule, loader=[(x, y)] * 10).apply(Timed())
    began = time.perf_counter()
    ledger = Ledger(job.trace, started=began)
    train_virtually(job)
    torch.cuda.synchronize()
    ledger.steps.settle()
    rows = ledger.rows()
    assert sum(rows.values()) == pytest.approx(time.perf_counter() - began, rel=0.01)
    step_s = ledger.steps.step_s()
    assert step_s["backward"] > step_s["forward"] > 0
    assert step_s["update"] > 0
