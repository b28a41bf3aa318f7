"""Trials are forks of one process that has done what they have in common; each of its deaths costs little."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kasoku.data
from kasoku.config.recipe import load, read_early
from kasoku.tune import fork_server as server_module
from kasoku.tune.fork_server import ForkedProcess, fork_server
from kasoku.tune.hyperparameters import SearchSettings, search
from kasoku.tune.search_space import OneOf

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="forks of a server are for Linux"),
]
PREPARED = "kasoku_tests_prepared"  # a module that only `prepare` makes


def prepare() -> None:
    sys.modules[PREPARED] = sys


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Threads that earlier tests of this process left behind do not count: a process with threads is not forked."""
    left = set(threading.enumerate()) - {threading.main_thread()}
    monkeypatch.setattr(threading, "active_count", lambda: len(set(threading.enumerate()) - left))


@pytest.fixture
def run(tmp_path):
    """Runs the text of a program by a `start`; returns its process, and the file of its output."""

    def run(start, text, environment=None):
        number = len([*tmp_path.glob("program-*")])
        program, log = tmp_path / f"program-{number}.py", tmp_path / f"log-{number}"
        program.write_text(text)
        return start((sys.executable, str(program), "a word"), environment or {**os.environ}, log), log

    return run


def ended(process, within_s: float = 60.0) -> int:
    wait_until(lambda: process.poll() is not None, within_s)
    return process.returncode


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(75)", 75, ""),
        ("sys.exit('a reason')", 1, "a reason"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_program_in_a_fork_runs_as_in_a_new_process(run, end, code, says):
    text = f"import os, sys\nprint(__name__, sys.argv[1:], os.environ['MINE'], flush=True)\n{end}\n"
    with fork_server(prepare) as start:
        process, log = run(start, text, {"MINE": "here"})
        assert isinstance(process, ForkedProcess)
        assert ended(process) == code
    assert log.read_text().startswith("__main__ ['a word'] here\n")
    assert log.read_text().strip().endswith(says)


def test_what_is_prepared_is_there_in_each_fork_and_not_here(run):
    with fork_server(prepare) as start:
        for _ in range(2):
            process, log = run(start, f"import sys\nprint({PREPARED!r} in sys.modules)\n")
            assert ended(process) == 0
            assert log.read_text() == "True\n"
    assert PREPARED not in sys.modules


def test_what_cannot_be_prepared_is_left_to_the_programs(run):
    def fails() -> None:
        raise OSError("no data")

    with fork_server(fails) as start:
        process, log = run(start, "print('runs')\n")
        assert isinstance(process, ForkedProcess)
        assert (ended(process), log.read_text()) == (0, "runs\n")


def test_a_killed_server_ends_no_program_and_new_processes_follow(run, tmp_path):
    before = children()
    with fork_server(prepare) as start:
        waits = "import pathlib, time\nwhile not pathlib.Path('%s').exists(): time.sleep(0.01)\nexit(7)\n"
        first, log = run(start, "import os\nprint(os.getpgid(0), flush=True)\n" + waits % (tmp_path / "go"))
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
        assert log.read_text() == f"{first.pid}\n"
        (server,) = children() - before - {first.pid}
        os.kill(server, signal.SIGKILL)
        assert first.poll() is None
        second, log = run(start, f"import sys\nprint({PREPARED!r} in sys.modules)\n")
        assert isinstance(second, subprocess.Popen)
        assert ended(second) == 0
        assert log.read_text() == "False\n"
        (tmp_path / "go").touch()
        assert ended(first) == 7
    assert children() == before


def test_a_server_killed_while_it_prepares_is_replaced_by_new_processes(run):
    with fork_server(lambda: os.kill(os.getpid(), signal.SIGKILL)) as start:
        process, _ = run(start, "")
        assert isinstance(process, subprocess.Popen)
        assert ended(process) == 0


def test_a_server_that_starts_threads_is_replaced_by_new_processes(run):
    with fork_server(lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()) as start:
        process, _ = run(start, "")
        assert isinstance(process, subprocess.Popen)
        assert ended(process) == 0


def test_forks_that_cannot_use_cuda_are_replaced_by_new_processes(run, monkeypatch):
    monkeypatch.setattr(server_module, "cuda_is_lost_to_forks", lambda: True)
    with fork_server(prepare) as start:
        for _ in range(2):
            process, _ = run(start, "")
            assert isinstance(process, subprocess.Popen)
            assert ended(process) == 0


def test_a_process_with_threads_is_not_forked(run):
    end = threading.Event()
    (other := threading.Thread(target=end.wait)).start()
    try:
        with fork_server(prepare) as start:
            process, _ = run(start, "")
            assert isinstance(process, subprocess.Popen)
            assert ended(process) == 0
    finally:
        end.set()
        other.join()


def wait_until(true: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_search_ends_its_trials(tmp_path):
    trial, pid = tmp_path / "trial.py", tmp_path / "pid"
    trial.write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(tmp_path / 'half')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'half')!r}, {str(pid)!r})\ntime.sleep(60)\n"
    )
    script = tmp_path / "search.py"
    script.write_text(
        "import os, sys, time\nfrom pathlib import Path\nfrom kasoku.tune.fork_server import fork_server\n"
        "with fork_server(lambda: None) as start:\n"
        f"    start((sys.executable, {str(trial)!r}), os.environ, Path({os.devnull!r}))\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, script]) as process:
        wait_until(pid.exists)
        process.kill()
    wait_until(lambda: not alive(int(pid.read_text())))


def children() -> set[int]:
    """The processes whose parent is this one, without those that have ended."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = status.read_text().rsplit(")", 1)
        except OSError:
            continue
        if int(fields.split()[1]) == os.getpid() and fields.split()[0] != "Z":
            found.add(int(name.split()[0]))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


KILLED = """
import os, sys
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(exist_ok=True)
with (out / "starts").open("a") as file:
    file.write("continued " if "--continue" in sys.argv else "new ")
if len((out / "starts").read_text().split()) <= int(sys.argv[1]):
    os.kill(os.getpid(), 9)
(out / "result.json").write_text('{"top1": 0.5, "seconds": 1.0}')
"""


@pytest.mark.parametrize(("kills", "how"), [(1, "done"), (2, "failed: exit code -9")])
def test_a_killed_trial_goes_on_once(tmp_path, kills, how):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command, space = (sys.executable, str(script), str(kills)), {"batch": OneOf((1,))}
    said: list[str] = []
    plan = SearchSettings(command, space, tmp_path / "search", 1, prepare=prepare)
    if kills == 1:
        (outcome,) = search(plan, say=said.append)
        assert outcome.how == how
    else:
        with pytest.raises(Exception, match=how):
            search(plan, say=said.append)
    assert "trial 1: killed by signal 9; it is continued" in said
    assert (tmp_path / "search" / "trial-1" / "starts").read_text() == "new continued "


def test_the_data_is_read_once_and_a_forked_training_is_the_same(tmp_path):
    settings = ["epochs=1", "model.widths=[8,16]", "evaluate.stop=false", "device.threads=2"]
    recipe = load(Path("recipes/digits_cnn_98.toml"), settings)
    words = [word for setting in settings for word in ("--set", setting)]
    train = (sys.executable, "-m", "kasoku", "train", "recipes/digits_cnn_98.toml", *words, "--quiet")

    @functools.wraps(kasoku.data.digits)
    def read_again(*_, **__):
        raise AssertionError("the data was read again")

    def prepare_and_forbid() -> None:
        read_early(recipe)
        kasoku.data.digits = read_again

    cold = tmp_path / "cold"
    subprocess.run([*train, "--out", str(cold)], check=True)
    with fork_server(prepare_and_forbid) as start:
        process = start((*train, "--out", str(tmp_path / "warm")), {**os.environ}, tmp_path / "log")
        assert isinstance(process, ForkedProcess)
        assert ended(process, 300.0) == 0, (tmp_path / "log").read_text()
    by_run = [
        [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "test_loss" in line]
        for folder in (cold, tmp_path / "warm")
    ]
    assert by_run[0]
    assert [(line["test_loss"], line["step"]) for line in by_run[0]] == [
        (line["test_loss"], line["step"]) for line in by_run[1]
    ]


def test_elsewhere_programs_are_new_processes(run, monkeypatch):
    monkeypatch.setattr(server_module.sys, "platform", "darwin")
    with fork_server(prepare) as start:
        process, _ = run(start, "")
        assert isinstance(process, subprocess.Popen)
        assert ended(process) == 0
