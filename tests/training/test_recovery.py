"""A rank that dies or hangs in a training is named by the others, and the training goes on from its last checkpoint."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from helpers.forked import Forked
from helpers.started import RECIPE, TORCHRUN, clean, ended, kill, largest_difference, options, port, started

ASYNCHRONOUS = ("techniques=[{use='kasoku.distributed.Asynchronous'}]", "norm_batch=0")
SAVING = ("save.every_steps=5", "save.keep=99", "epochs=3", "schedule.epochs=3")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not any(int(p.name.split("-")[1]) >= step for p in (run / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)


def rank_below(parent: int, rank: int) -> int:
    """The process id of a rank among the descendants of a launcher."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for process in parents:
        above = process
        while above in parents and above != parent:
            above = parents[above]
        try:
            told = dict(x.partition("=")[::2] for x in Path(f"/proc/{process}/environ").read_text().split("\0"))
        except OSError:
            continue
        if above == parent and process != parent and told.get("RANK") == str(rank):
            return process
    raise AssertionError(f"no rank {rank} below {parent}")


@pytest.mark.process
def test_a_killed_rank_is_restarted_by_torchrun_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [str(RECIPE), *options(*SAVING), "--quiet", "--continue", "--out"]
    ended([*TORCHRUN, *arguments, str(whole)])
    torchrun = [*TORCHRUN[:3], "--max-restarts", "2", "--master-port", str(port()), *TORCHRUN[3:]]
    process = subprocess.Popen([*torchrun, *arguments, str(killed)], env=clean(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(killed, 15, process)
        os.kill(rank_below(process.pid, 1), signal.SIGKILL)
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "going on from step" in said
    assert largest_difference(whole, killed) == 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "settings"),
    [
        pytest.param(signal.SIGKILL, (), marks=pytest.mark.smoke, id="killed"),
        pytest.param(signal.SIGSTOP, (), id="stopped"),
        pytest.param(signal.SIGSTOP, ASYNCHRONOUS, id="stopped, asynchronous"),
    ],
)
def test_a_rank_that_is_gone_is_named_by_the_other(
    how: signal.Signals, settings: tuple[str, ...], tmp_path: Path
) -> None:
    settings = ("epochs=10000", "faults.elastic=false", *settings)
    arguments = ["train", str(RECIPE), *options(*settings), "--quiet", "--out", str(tmp_path / "run")]
    ranks = started(arguments, 2)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)
        began = time.monotonic()
        ranks[1].send_signal(how)
        _, said = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 15
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 4, said
    assert f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid}) died" in said


@pytest.mark.process
@pytest.mark.smoke
def test_ranks_that_were_given_other_recipes_are_refused(tmp_path: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = []
    for rank, batch in enumerate(("batch=64", "batch=32")):
        environment = clean(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        ranks.append(Forked(["train", str(RECIPE), *options(batch), "--out", str(tmp_path / "run")], environment))
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    lines = [line for line in "".join(said).splitlines() if line.startswith("kasoku:")]
    assert lines == ["kasoku: rank 1 has another recipe: batch = 32 there, 64 on rank 0: start all ranks with the same"]
    assert not (tmp_path / "run").exists()


HANGS = '''
import time
from dataclasses import dataclass

from kasoku.core import Technique


@dataclass(frozen=True)
class Hang(Technique):
    """Rank 1 stops in its sixth step."""

    def apply(self, job):
        def stand_still():
            time.sleep(1000 * (job.comm.rank == 1 and job.steps == 5))

        job.before_step(stand_still)
'''


@pytest.mark.process
def test_a_rank_that_hangs_is_named_with_its_place_and_the_stacks_of_all(tmp_path: Path) -> None:
    recipe, run = Path(shutil.copy(RECIPE, tmp_path)), tmp_path / "run"
    (tmp_path / "hangs.py").write_text(HANGS)
    more = ("epochs=100", "device.hang_timeout_s=2", "techniques=[{use='hangs.Hang'}]")
    ranks = started(["train", str(recipe), *options(*more), "--quiet", "--out", str(run)], 2)
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        kill(ranks)
    assert [rank.returncode for rank in ranks] == [4, 4], said
    place = r"; rank 1 is at \S+/hangs\.py:\d+ \S*stand_still < core/job\.py:\d+ Job\._begin_step < "
    for line in said:
        named = rf"rank 1 \(host \S+, pid {ranks[1].pid}\) has "
        assert re.search(rf"{named}.*{place}.*; all stacks are in {re.escape(str(run))}/hang[.]txt", line)
    text = (run / "hang.txt").read_text()
    assert re.search(rf"rank 0 \(.*pid {ranks[0].pid}\), no step for \d+.\d s\n  MainThread\n    \S+:\d+ ", text)
    assert re.search(
        rf"rank 1 \(.*pid {ranks[1].pid}\), no step for \d+.\d s\n  MainThread\n    \S+/hangs.py:\d+ ", text
    )
    assert text.count("training/trainer.py:") >= 2
    assert "kasoku watch" in text
