"""An early start: tasks overlap where they may, fail in a fixed order, and change no bit of the training."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from helpers.ranks import on_processes
from helpers.started import KASOKU, RECIPE, ended, largest_difference, options, started
from kasoku.config.recipe import Recipe, load
from kasoku.core import InputError, Threads
from kasoku.core.comm import Comm
from kasoku.core.trace import Span
from kasoku.distributed import TorchComm
from kasoku.distributed.startup import SEQUENTIAL, Start, attribute_seconds, startup_line
from kasoku.training.trainer import build

both = pytest.mark.parametrize("overlap", [True, False])


def spans(**times: tuple[float, float]) -> list[Span]:
    return [Span("start", name, *time) for name, time in times.items()]


@both
def test_a_task_gets_the_results_that_its_parameters_name(overlap):
    start = Start(overlap=overlap)
    start.add("a", lambda: "a")
    start.add("b", lambda: "b")
    start.add("ba", lambda b, a: b + a)
    assert start.do("bab", lambda ba, b: ba + b) == "bab"
    assert start["ba"] == "ba"
    assert start.wait()() == {"a": "a", "b": "b", "ba": "ba", "bab": "bab"}


def test_tasks_run_while_others_wait():
    came, gone = threading.Event(), threading.Event()
    start = Start(overlap=True)

    def waits() -> bool:
        came.set()
        return gone.wait(60)

    start.add("waits", waits)
    start.add("works", lambda: came.wait(60) and (gone.set() or True))
    assert start.wait()() == {"waits": True, "works": True}


def test_a_result_is_there_before_the_others_have_ended():
    end = threading.Event()
    start = Start(overlap=True)
    start.add("long", lambda: end.wait(60))
    start.add("short", lambda: 1)
    assert start["short"] == 1
    assert start.do("here", lambda short: short + 1) == 2
    end.set()
    assert start.wait()()["long"] is True


def test_in_sequence_each_task_ends_on_the_callers_thread_in_its_turn(monkeypatch):
    monkeypatch.setenv(SEQUENTIAL, "1")
    start, seen = Start(), []
    for name in "abc":
        start.add(name, lambda name=name: seen.append((name, threading.current_thread())))
    assert seen == [(name, threading.current_thread()) for name in "abc"]
    assert [s.name for s in start.spans] == list("abc")
    assert all(one.stop <= other.start for one, other in zip(start.spans, start.spans[1:], strict=False))


@both
def test_of_two_errors_the_first_task_s_is_told_whatever_failed_first(overlap):
    second_failed = threading.Event()
    ran = []

    def first() -> None:
        if overlap:
            assert second_failed.wait(60)
        raise InputError("first")

    def second() -> None:
        second_failed.set()
        raise OSError("second")

    start = Start(overlap=overlap)
    start.add("first", first)
    start.add("second", second)
    start.add("behind", lambda second: ran.append(second))
    start.add("apart", lambda: ran.append("apart"))
    with pytest.raises(InputError, match="first"):
        start.wait()()
    assert ran == ["apart"]  # a task with no failed predecessor runs: another rank may wait for it
    with pytest.raises(OSError, match="second"):
        start.do("too", lambda behind: ran.append(behind))


@both
def test_a_task_is_known_once_and_after_known_ones(overlap):
    start = Start(overlap=overlap)
    start.add("a", lambda: None)
    with pytest.raises(ValueError, match="task a: was added before"):
        start.add("a", lambda: None)
    with pytest.raises(ValueError, match="after c, which is unknown"):
        start.add("b", lambda c: c)
    assert list(start.wait()()) == ["a"]


def test_each_second_belongs_to_the_task_that_was_waited_for():
    found = spans(**{"import": (0, 2), "meet": (2, 5), "data": (2, 3), "net": (3, 4.5), "step": (5.25, 6)})
    assert attribute_seconds(found, 0) == {"import": 2, "meet": 3, "data": 0, "net": 0, "step": 1}
    assert attribute_seconds([], 0) == {}
    assert attribute_seconds(spans(nothing=(1, 1)), 0) == {"nothing": 1}
    line = startup_line(found, 0)
    assert line.startswith("start-up 6.00 s: import 2.00, meet 3.00, data +1.00, net +1.50, step 0.75")


@both
def test_spans_are_of_the_tasks_and_shares_add_up_to_the_time_that_passed(overlap):
    began = time.perf_counter()
    start = Start(overlap=overlap, began=began)
    for name in "abc":
        start.add(name, lambda: time.sleep(0.02))
    start.do("d", lambda: None, after=("a", "b", "c"))
    assert [(s.kind, s.name) for s in start.spans] == [("start", name) for name in ("import", *"abcd")]
    assert sum(attribute_seconds(start.spans, began).values()) == pytest.approx(start.spans[-1].stop - began, abs=1e-9)
    assert start.after == {"import": (), **dict.fromkeys("abc", ("import",)), "d": ("a", "b", "c", "import")}


# ---- the start of a training

OF_FILES = """
epochs = 1
batch = 16
device = { threads = 1 }
model = { use = "kasoku.models.cifarnet", widths = [8, 16] }
data = { use = "kasoku.data.folder", root = "ROOT", size = 16 }
optimizer = { use = "kasoku.optim.sgd", lr = 0.01, momentum = 0.9 }
[[techniques]]
use = "kasoku.data.Augment"
crop = "random_resized"
"""


@pytest.fixture(params=["memory", "files"])
def recipe(request, tmp_path) -> Recipe:
    if request.param == "memory":
        return load(RECIPE, ["device.threads=1"])
    random = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(30):
            pixels = random.integers(0, 256, (20, 24 + i, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{i}.png")
    path = tmp_path / "recipe.toml"
    path.write_text(OF_FILES.replace("ROOT", str(tmp_path / "photos")))
    return load(path)


def trained(recipe: Recipe, overlap: bool) -> list[torch.Tensor]:
    """Weights after an epoch, and what torch's generator would draw next."""
    job = build(recipe, start=Start(overlap=overlap)).job
    for x_NCHW, y_N in job.loader:
        job.loss(job.model(x_NCHW), y_N).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    state = [x.clone() for x in job.model.state_dict().values()]
    job.close()
    return [*state, torch.rand(3)]


def test_a_training_started_early_is_the_same_bit_for_bit(recipe):
    early, plain = trained(recipe, True), trained(recipe, False)
    assert len(early) == len(plain)
    assert all(a.equal(b) for a, b in zip(early, plain, strict=True))


def test_ranks_that_take_turns_start_in_sequence():
    def rank_main(comm: Comm) -> tuple[bool, list[float]]:
        training = build(load(RECIPE), comm)
        return training.start.overlap, [float(p.detach().sum()) for p in training.job.model.parameters()]

    (overlap, one), (_, other) = Threads(2).run(rank_main)
    assert not overlap
    assert one == other


def warmed(comm: TorchComm) -> tuple[int, float]:
    """How many groups there are after a channel was asked for that was made before, and what goes through it."""
    comm.warm(torch.device("cpu"), channels=1)
    before = dist.distributed_c10d._world.group_count
    channel = comm.channel()
    x = torch.ones(1)
    channel.all_reduce(x).wait()
    comm.channel()
    return dist.distributed_c10d._world.group_count - before, float(x)


@pytest.mark.process
@pytest.mark.smoke
def test_a_channel_made_ahead_is_handed_out_first():
    assert on_processes(2, warmed) == [(1, 2.0)] * 2


@pytest.fixture(scope="module")
def run_in_sequence(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "sequence"
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", *options("epochs=1"), "--quiet"]
    ended([*KASOKU, *local, "--out", str(run)], {SEQUENTIAL: "1"})
    return run


@pytest.mark.process
def test_two_ranks_started_early_train_to_the_same_bits(run_in_sequence, tmp_path):
    run = tmp_path / "run"
    local = ["launch", "local", str(RECIPE), "--gpus-per-node", "2", *options("epochs=1")]
    ended([*KASOKU, *local, "--out", str(run)])
    assert largest_difference(run, run_in_sequence) == 0
    logged = [line for line in (run / "mlperf.log").read_text().splitlines() if '"key": "start"' in line]
    (told,) = (json.loads(line.removeprefix(":::MLLOG ")) for line in logged)
    tasks = told["metadata"]["tasks"]
    assert [*tasks][:1] + [*tasks][-1:] == ["import", "first step"]
    assert {"rendezvous", "communicator", "data", "network", "loaders", "first batch", "compiler"} <= set(tasks)
    assert tasks["first step"][1] == pytest.approx(told["value"], abs=1e-3)
    result = json.loads((run / "result.json").read_text())
    assert sum(result["seconds_by"].values()) == pytest.approx(result["seconds"], abs=0.05)
    assert {"import", "data", "model", "rendezvous"} <= set(result["seconds_by"])


OWN = """
import os
from kasoku.core import InputError
from kasoku.data import digits as ours
from kasoku.models import cifarnet

def digits():
    if os.environ["RANK"] == "{data}":
        raise InputError("no data here")
    return ours()

def network(num_classes, in_channels, widths):
    if os.environ["RANK"] in "{network}":
        raise InputError("no network here")
    return cifarnet(num_classes, in_channels, widths=tuple(widths))
"""


@pytest.mark.process
@pytest.mark.parametrize("sequential", ["", "1"])
@pytest.mark.parametrize(
    ("data", "network", "line"),
    [("1", "", "kasoku: rank 1: no data here\n"), ("0", "1", "kasoku: no data here\n"), ("", "01", "kasoku: no net")],
)
def test_a_task_that_fails_on_one_rank_ends_all_with_one_line(tmp_path, monkeypatch, sequential, data, network, line):
    monkeypatch.setenv(SEQUENTIAL, sequential)
    (tmp_path / "own_parts.py").write_text(OWN.format(data=data, network=network))
    path = tmp_path / "recipe.toml"
    text = RECIPE.read_text().replace("kasoku.data.digits", "own_parts.digits")
    path.write_text(text.replace("kasoku.models.cifarnet", "own_parts.network"))
    ranks = started(["train", str(path), "--quiet", "--out", str(tmp_path / "run")], 2)
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert said[0].startswith(line)
    assert said[0].count("\n") == 1
    assert said[1] == ""
    assert not (tmp_path / "run").exists()
