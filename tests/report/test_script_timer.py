"""A training loop that is not kasoku's is timed by torch's hooks: on a clock of ours, and as a script of its own."""

from __future__ import annotations

import atexit
import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from contracts import one_thread as one_thread
from helpers.started import KASOKU, clean
from helpers.virtual_comm import VirtualClock
from kasoku.cli import main
from kasoku.commands.profile import report_script
from kasoku.core import InputError
from kasoku.core.torch_internals import at_end_of_backward
from kasoku.report import Ledger, watch
from kasoku.report.html import figures
from kasoku.report.ledger import STEP
from kasoku.report.script_timer import ScriptTimer, follow_script, script_documents

STEP_S = {"input": 0.5, "forward": 1.0, "backward": 2.0, "update": 0.25, "other": 0.125}


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: VirtualClock, forward_s: float) -> Tensor:
        clock.advance(forward_s)
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.advance(STEP_S["backward"])
        return grads[0], None, None


class Net(nn.Module):
    """A layer whose forward and backward take their time."""

    def __init__(self, clock: VirtualClock, forward_s: float = STEP_S["forward"]) -> None:
        super().__init__()
        self.layer, self.clock, self.forward_s = nn.Linear(4, 2), clock, forward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Takes.apply(self.layer(x), self.clock, self.forward_s)


class Images(Dataset):
    """64 images, each of which takes its part of a batch's time."""

    def __init__(self, clock: VirtualClock, input_s: float = STEP_S["input"]) -> None:
        self.clock, self.input_s = clock, input_s

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> Tensor:
        self.clock.advance(self.input_s / 32)
        return torch.ones(4)


class Rule(torch.optim.Optimizer):
    """An update that takes its time."""

    def __init__(self, parameters: Iterator[nn.Parameter], clock: VirtualClock) -> None:
        super().__init__(parameters, {})
        self.clock = clock

    def step(self, closure: Any = None) -> None:
        self.clock.advance(STEP_S["update"])


class Derived(Rule):
    """An update that calls its parent's, which has torch's hooks as well."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


class Loop:
    """A plain training loop on a virtual clock."""

    def __init__(self, *, forward_s: float = STEP_S["forward"], input_s: float = STEP_S["input"]) -> None:
        self.clock = VirtualClock()
        self.net = self.called = Net(self.clock, forward_s)
        self.optimizer = Rule(self.net.parameters(), self.clock)
        self.loader = DataLoader(Images(self.clock, input_s), batch_size=32)

    def train(self, epochs: int, *, accumulate: int = 1) -> None:
        for _ in range(epochs):
            for i, x in enumerate(self.loader):
                self.called(x).sum().backward()
                if (i + 1) % accumulate == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.clock.advance(STEP_S["other"])


@pytest.fixture
def timers() -> Iterator[list[ScriptTimer]]:
    """Timers that end with the test."""
    created: list[ScriptTimer] = []
    yield created
    for timer in created:
        timer.patches.close()


def started(loop: Loop, timers: list[ScriptTimer], warm: int = 2) -> ScriptTimer:
    timers.append(ScriptTimer(clock=loop.clock, warm=warm))
    return timers[-1]


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replaced(module: nn.Module) -> bool:
    return vars(module).get("_compiled_call_impl") is not None


def approximately(rows: dict[str, float]) -> object:
    return pytest.approx(dict.fromkeys(STEP, 0.0) | rows)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_steps_of_a_plain_loop_have_the_rows_of_a_recipe(timers: list[ScriptTimer], accumulate: int):
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2 + 2 * accumulate, accumulate=accumulate)
    loop.clock.advance(1000)  # what the script does after its last step
    result = timer.finish()
    parts = {row: accumulate * STEP_S[row] for row in ("input", "forward", "backward")}
    assert result["mean_s"] == approximately(STEP_S | parts)
    assert result["step_s"] == approximately(STEP_S | parts)
    facts = result["facts"]
    assert (facts["batch"], facts["parts"], facts["parameters"], facts["layers"]) == (32, accumulate, 10, 1)
    assert (result["rank"], result["ranks"]) == (0, 1)
    assert json.loads(json.dumps(result)) == result
    assert timer.trace.follower is timer.ledger.steps


def test_all_hooks_are_gone_in_the_end(timers: list[ScriptTimer]):
    def hooked() -> list[object]:
        kept = [torch.autograd.backward, torch.save, DataLoader.__iter__, dist.all_reduce, dist.Work.wait, Tensor.to]
        return [*kept, vars(Tensor).get("to"), *(vars(m).get("_compiled_call_impl") for m in loop.net.modules())]

    loop = Loop()
    before = hooked()
    timer = started(loop, timers)
    loop.train(2)
    assert hooked() != before
    timer.finish()
    assert hooked() == before
    loop.train(1)


@pytest.mark.parametrize("of_an_average", [False, True])
def test_an_evaluation_is_a_row_of_its_own_and_no_part_of_a_step(timers: list[ScriptTimer], of_an_average: bool):
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2)
    model = Net(loop.clock) if of_an_average else loop.net.eval()
    with torch.no_grad() if of_an_average else nullcontext():
        for x in loop.loader:
            with torch.no_grad():
                model(x)
    loop.net.train()
    loop.train(1)
    result = timer.finish()
    assert result["rows"]["evaluate"] == pytest.approx(2 * STEP_S["forward"] + 2 * STEP_S["input"])
    assert result["mean_s"] == approximately(STEP_S)


def test_a_model_is_saved_and_copied_without_the_timer(timers: list[ScriptTimer], tmp_path: Path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = started(Loop(), timers)
    timer.attach(optimizer, [model])
    assert replaced(model)
    torch.save(model, tmp_path / "whole.pt")
    for other in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(model)):
        assert not replaced(other)
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
    compiled = torch.compile(model, backend="eager")
    timer.attach(optimizer, [compiled])
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        other.bias.add_(1)
    assert replaced(compiled)
    assert not torch.equal(other(torch.ones(1, 4)), compiled(torch.ones(1, 4)))


def test_the_networks_of_every_optimizer_are_found(timers: list[ScriptTimer]):
    loop, clock = Loop(), VirtualClock()
    nets = [Net(clock, 1.0), Net(clock, 3.0)]  # as a discriminator and a generator
    rules = [Rule(net.parameters(), clock) for net in nets]
    loop.clock = clock
    timer = started(loop, timers)
    for _ in range(4):
        for net, rule in zip(nets, rules, strict=True):
            net(torch.ones(5, 4)).sum().backward()
            rule.step()
    result = timer.finish()
    assert result["steps"] == 2
    assert result["mean_s"] == approximately({"forward": 4.0, "backward": 4.0, "update": 0.5})


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_is_compiled_whole_stays_whole(timers: list[ScriptTimer], whole: bool):
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Own(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = ScriptTimer(warm=2)
    timers.append(timer)
    if not whole:
        model.compile(backend="eager", fullgraph=True)
    step = lambda x: model(x).sum()  # noqa: E731
    f = torch.compile(step, backend="eager", fullgraph=True) if whole else step
    for _ in range(4):
        f(torch.ones(5, 4)).backward()
        optimizer.step()
    result = timer.finish()
    assert result["steps"] == 2
    assert result["mean_s"]["forward"] > 0
    assert (result["mean_s"]["other"] > 0) != whole, "where the forward is not seen, the rest of a step is forward"


def test_what_is_done_between_the_last_gradient_and_the_end_of_backward_is_exposed(
    timers: list[ScriptTimer], group: None, monkeypatch: pytest.MonkeyPatch
):
    loop = Loop()
    monkeypatch.setattr(dist, "all_reduce", lambda x: loop.clock.advance(8))
    # as DDP does: in the hook of the last gradient it leaves its waits to the end of the backward
    waits = lambda p: at_end_of_backward(lambda: loop.clock.advance(4))  # noqa: E731
    loop.net.layer.weight.register_post_accumulate_grad_hook(waits)
    timer = started(loop, timers)
    timer.trace.phase("other")
    loop.optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(torch.ones(2)))
    loop.train(3)
    assert timer.finish()["mean_s"] == approximately(STEP_S | {"exposed": 12})


def test_what_ddp_does_before_the_forward_of_its_network_is_exposed(timers: list[ScriptTimer], group: None):
    loop = Loop()
    loop.called = DistributedDataParallel(loop.net)
    before = loop.called._pre_forward

    def waits(*inputs: Any, **kwargs: Any) -> Any:
        loop.clock.advance(16)
        return before(*inputs, **kwargs)

    loop.called._pre_forward = waits
    timer = started(loop, timers)
    loop.train(3)
    assert timer.finish()["mean_s"] == approximately(STEP_S | {"exposed": 16})


def test_what_other_threads_do_is_not_counted(timers: list[ScriptTimer]):
    loop, other = Loop(), Loop()
    timer = started(loop, timers)
    loop.train(2)
    thread = threading.Thread(target=other.train, args=(2,))
    thread.start()
    thread.join()
    loop.train(1)
    assert timer.finish()["steps"] == 4


def test_only_the_first_optimizer_ends_a_step(timers: list[ScriptTimer]):
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2)
    second = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(5):
        second.step()
    loop.train(1)
    assert timer.finish()["steps"] == 4


def test_a_step_within_a_step_counts_once(timers: list[ScriptTimer]):
    loop = Loop()
    loop.optimizer = Derived(loop.net.parameters(), loop.clock)
    timer = started(loop, timers)
    loop.train(3)
    result = timer.finish()
    assert result["steps"] == 4
    assert result["mean_s"] == approximately(STEP_S)


def test_a_loop_goes_on_after_a_forward_and_a_backward_that_fail(timers: list[ScriptTimer]):
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2)
    with pytest.raises(RuntimeError, match="shapes"):
        loop.net(torch.ones(1, 5))
    with pytest.raises(RuntimeError, match="grad can be implicitly created"):
        loop.net(torch.ones(1, 4)).backward()
    loop.train(1)
    result = timer.finish()
    assert result["steps"] == 4
    assert result["mean_s"] == approximately(STEP_S | {"forward": STEP_S["forward"] * 5 / 4})


def test_parts_of_a_compiled_module_get_no_hook(timers: list[ScriptTimer]):
    class Compiled(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

        def forward(self, x: Tensor) -> Tensor:
            return self._orig_mod(x)

    loop = Loop()
    loop.called = Compiled(loop.net)
    timer = started(loop, timers)
    loop.train(2)
    assert [replaced(m) for m in loop.called.modules()] == [True, False, False]
    result = timer.finish()
    assert result["mean_s"] == approximately(STEP_S)
    assert result["facts"]["layers"] == 0


def test_a_model_inside_of_another_module_is_found(timers: list[ScriptTimer]):
    loop = Loop()
    whole = nn.ModuleDict({"model": loop.net})  # as Lightning's: its own forward is never called
    timer = started(loop, timers)
    loop.train(3)
    assert timer.finish()["mean_s"] == approximately(STEP_S)
    assert whole["model"] is loop.net


def result_of(timers: list[ScriptTimer], *, rank: int = 0, waits_s: float = 0.0, **takes: float) -> dict[str, Any]:
    """What a rank writes whose steps take so long."""
    loop = Loop(**takes)
    timer = started(loop, timers)

    def wait(*_: object) -> None:
        with timer.trace.span("wait"):
            loop.clock.advance(waits_s)

    loop.optimizer.register_step_pre_hook(wait)
    loop.train(4)
    return timer.finish() | {"rank": rank, "ranks": 2}


def test_planted_causes_are_named_and_a_healthy_script_has_none(
    timers: list[ScriptTimer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def causes(*ranks: dict[str, Any]) -> list[str]:
        return [cause["cause"] for cause in script_documents(ranks)[0]["verdict"]]

    fast = {"input_s": 0.1}
    healthy = result_of(timers, **fast)
    assert causes(healthy) == ["compute-bound"]
    assert causes(healthy, healthy) == ["compute-bound"]
    assert causes(result_of(timers, input_s=0.7)) == ["input-bound"]
    assert "num_workers" in script_documents([result_of(timers, input_s=0.7)])[0]["verdict"][0]["remedy"]
    assert causes(*[result_of(timers, waits_s=0.6, **fast)] * 2) == ["communication-bound"]
    slow = result_of(timers, rank=1, forward_s=1.5, **fast)
    waiting = result_of(timers, waits_s=0.5, **fast)
    report_script(tmp_path, [waiting, slow])
    shown = capsys.readouterr().out
    assert "straggler: rank 1 takes 500 ms longer" in shown
    assert "most of it in forward" in shown
    assert (tmp_path / "profile-1.json").is_file()
    document = json.loads((tmp_path / "profile.json").read_text())
    assert [row["wait_s"] for row in document["ranks"]] == pytest.approx([0.5, 0.0])
    assert len(json.loads((tmp_path / "ledger.json").read_text())["ranks"]) == 2
    pytest.importorskip("plotly")
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "A step of each rank, the mean" in page
    assert "is not as expected" not in page


def test_a_rank_keeps_its_number_if_another_left_nothing(
    timers: list[ScriptTimer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    slow = result_of(timers, rank=2, forward_s=1.5)
    report_script(tmp_path, [result_of(timers, waits_s=0.5), slow])
    shown = capsys.readouterr().out
    assert "straggler: rank 2 takes 500 ms longer" in shown
    assert "check rank 2's host" in shown
    assert [row["rank"] for row in json.loads((tmp_path / "profile.json").read_text())["ranks"]] == [0, 2]
    assert sorted(file.name for file in tmp_path.glob("profile*")) == ["profile-2.json", "profile.json"]
    pytest.importorskip("plotly")
    axis = figures.ledger(json.loads((tmp_path / "ledger.json").read_text())).figure.layout.yaxis
    assert sorted(axis.ticktext) == ["rank 0", "rank 2"]


def test_nothing_is_timed_while_a_cuda_graph_is_captured(timers: list[ScriptTimer], monkeypatch: pytest.MonkeyPatch):
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2)
    marks = [*timer.ledger.steps._marks]
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        loop.train(1)
    assert timer.ledger.steps._marks == marks
    loop.train(1)
    assert timer.finish()["steps"] == 4


def test_a_process_ends_though_its_profile_cannot_be_written(
    timers: list[ScriptTimer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(atexit, "register", lambda write: None)
    monkeypatch.setenv("KASOKU_PROFILE", str(tmp_path / "removed"))
    loop = Loop()
    timer = started(loop, timers)
    monkeypatch.setattr("kasoku.report.script_timer.ScriptTimer", lambda: timer)
    follow_script()
    loop.train(2)
    with pytest.raises(InputError, match="removed"):
        os._exit(3)
    assert ended == [3]


@pytest.mark.parametrize("others_s", [0.0, 2.0])
def test_only_a_core_that_other_programs_take_counts_as_taken(
    timers: list[ScriptTimer], monkeypatch: pytest.MonkeyPatch, others_s: float
):
    monkeypatch.setattr(Ledger, "starved", lambda ledger: 0.75)  # by which threads, the kernel does not say
    readings = iter([0.0, others_s])
    monkeypatch.setattr("kasoku.report.script_timer._others_s", lambda ranks: next(readings))
    loop = Loop()
    timer = started(loop, timers)
    loop.train(2)
    result = timer.finish()
    assert result["facts"]["starved"] == pytest.approx(others_s / sum(result["rows"].values()), abs=1e-4)


class Pairs:
    """A loader of one's own."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.ones(5, 4)


def test_a_loader_of_a_class_written_in_c_is_not_timed():
    model, backward = nn.Linear(4, 2), torch.autograd.backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, itertools.islice(Pairs(), 2)):
        pass
    assert torch.autograd.backward is backward


def test_two_lines_around_a_loop_print_its_verdict(capsys: pytest.CaptureFixture[str]):
    model, loader = nn.Linear(4, 2), Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterate = Pairs.__iter__
    with watch(model, optimizer, loader) as ledger:
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            assert ledger.steps.count
    assert ledger.steps.count == 3
    rows = ledger.steps.loop_s
    assert all(rows[row] > 0 for row in ("input", "forward", "backward", "update"))
    assert re.search(r"^[\w -]+: .*; ", capsys.readouterr().out)
    assert Pairs.__iter__ is iterate
    with pytest.raises(ZeroDivisionError), watch(model, optimizer, loader):
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""
    assert not replaced(model)


# ---- scripts

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ranks = int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=8, num_workers=ranks - 1)

def epoch():
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ENDS = """
epoch()
print("trained", *sys.argv[1:])
if ranks > 1:
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
raise SystemExit(3)
"""
UNTIL_INTERRUPTED = """
try:
    while True:
        epoch()
        open(sys.argv[1], "w").close()
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(7)
"""


@pytest.mark.process
@pytest.mark.smoke
def test_a_script_is_profiled_as_it_is(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT + ENDS)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text("import sys; sys.argv_of_site = 1; print('site')")
    command = [*KASOKU, "profile", "--out", "found", "--", sys.executable, "-m", "train", "--lr", "1", "--"]
    environment = clean({"PYTHONPATH": str(hooks)})
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "site\nsite\ntrained --lr 1 --\n", "kasoku's own process has a site too, and prints elsewhere"
    assert "a step, the median" in done.stderr
    document = json.loads((tmp_path / "found" / "ledger.json").read_text())
    assert document["verdict"]
    assert all(document["step_s"][row] > 0 for row in ("input", "forward", "backward", "update"))
    assert json.loads((tmp_path / "found" / "profile.json").read_text())["ranks"][0]["compute_s"] > 0


@pytest.mark.process
def test_two_ranks_of_torchrun_are_profiled_together(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT + ENDS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*KASOKU, "profile", "--out", "found", "--", *torchrun, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["trained", "trained", ""] or done.stdout == "trainedtrained\n\n"
    profile = json.loads((tmp_path / "found" / "profile.json").read_text())
    assert [row["rank"] for row in profile["ranks"]] == [0, 1]
    assert all(row["wait_s"] > 0 for row in profile["ranks"]), "DDP waits for its buckets, if only for an instant"


@pytest.mark.process
def test_a_signal_goes_through_to_the_script_and_what_it_did_until_then_is_shown(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT + UNTIL_INTERRUPTED)
    began = tmp_path / "began"
    command = [*KASOKU, "profile", "--out", "found", "--", sys.executable, "train.py", str(began)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, env=clean(), text=True, **pipes)
    try:
        until = time.monotonic() + 200
        while not began.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, shown) == (7, "interrupted\n"), said
    assert (tmp_path / "found" / "profile.json").is_file()


@pytest.mark.process
@pytest.mark.parametrize("first", ["", "import sys; sys.modules['kasoku'] = None; import torch; "])
def test_a_script_without_steps_or_kasoku_gets_a_line_and_no_profile(tmp_path: Path, first: str):
    command = [*KASOKU, "profile", "--out", "found", "--", sys.executable, "-c", f"{first}print('nothing')"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, "nothing\n")
    assert "kasoku: profile: no Python process of " in done.stderr
    assert not [*(tmp_path / "found").iterdir()]


def test_a_command_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--"]) == 2
    assert "a command is wanted, as kasoku profile -- python train.py" in capsys.readouterr().err
    assert main(["profile", "--", "./no-such-program"]) == 2
    assert capsys.readouterr().err == "kasoku: ./no-such-program: No such file or directory\n"
