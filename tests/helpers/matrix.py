"""Trains techniques side by side under the contracts, and finds what became of each pair.

`make combining` runs all pairs, or those of some techniques (WITH="EMA Clip"), and writes COMBINING, from which
docs/combining.md is made.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from contracts import assert_same, rule, through_a_file, weights
from helpers.witnesses import (
    BATCH,
    BUCKETS,
    BY_NAME,
    CALLS,
    MEMBERS,
    PHOTOS,
    SIDE,
    Member,
    Net,
    Record,
    files,
    in_memory,
    kept_for_backward,
)
from kasoku.core import Comm, InputError, Job, Solo, Technique, Threads
from kasoku.data import Augment, folder, loader
from kasoku.device import LossScale
from kasoku.distributed import AllReduce, Asynchronous, Overlap
from kasoku.memory import SavedMemory
from kasoku.models import Pretrained
from kasoku.optim import lars
from kasoku.testing.technique_contracts import traces
from kasoku.testing.toy import assert_near

STOP, STEPS = 5, 8  # the first is in mid-epoch, also where the batch has grown
COMBINING = Path(__file__).parent.parent / "files" / "combining.json"
PAIRS = list(itertools.combinations(MEMBERS, 2))


@dataclass(frozen=True)
class Outcome:
    """What became of techniques side by side.

    `line`: the refusal, the reason, or the lines of those that do less; `undone`: what their witnesses miss, and they
    miss nothing else.
    """

    kind: str  # "combine", "less", "refuse", "not run"
    line: str = ""
    undone: str = ""

    def row(self) -> dict[str, str]:
        """As it is recorded, without what is empty."""
        return {name: value for name, value in vars(self).items() if value}


@dataclass(frozen=True)
class Setup:
    """A training of some members.

    Args:
        members: what is trained together.
        where: the folder of their files.
        norm: the network has BatchNorm; it always has it beside VirtualRanks.
        dtype: of the network and the images.
        optimizer: builds the rule.
    """

    members: tuple[Member, ...]
    where: Path
    norm: bool = True
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = rule

    def has(self, name: str) -> bool:
        return any(member.name == name for member in self.members)

    @property
    def ranks(self) -> int:
        """Two; where the ranks of a node step together and nodes do not wait, two nodes of two."""
        return 4 if self.has("Asynchronous") and (self.has("Overlap") or self.has("AllReduce")) else 2

    @property
    def has_norm(self) -> bool:
        return self.norm or self.has("VirtualRanks")

    @property
    def techniques(self) -> list[Technique]:
        """The members, and what averages the gradients where none of them does."""
        own = [self._placed(member.technique) for member in self.members]
        if any(t.exchanges_gradients for t in own):
            return own
        exchange = next(e for e in (Overlap(BUCKETS), AllReduce()) if not any(t.conflict(e) for t in own))
        return [*own, exchange]

    def _placed(self, technique: Technique) -> Technique:
        """A technique with what it needs of this training: its weights, a plan that there is, the ranks of a node."""
        if isinstance(technique, Asynchronous):
            return replace(technique, node=self.ranks // 2)
        if isinstance(technique, LossScale) and self.dtype == torch.float64:  # in which nothing overflows
            return replace(technique, start=2.0**10)
        if isinstance(technique, Pretrained):
            return replace(technique, weights=str(self.where / f"norm={self.has_norm}.safetensors"))
        return replace(technique, factor=1) if isinstance(technique, SavedMemory) and not self.has_norm else technique

    def record(self, comm: Comm, *, seed: int, reverse: bool = False) -> Record:
        """A job with all techniques, watched. Each rank and each resumed job starts from other weights."""
        dropout = 0.2 * (self.norm and self.has("Seeded"))
        model = Net(norm=self.has_norm, dropout=dropout, seed=seed).to(self.dtype)
        optimizer = self.optimizer(model)
        before = traces(model, optimizer)
        photos, cache = str(self.where / PHOTOS), str(self.where / "cache")
        data = folder(photos, size=SIDE, cache=cache) if self.has("Decoding") else in_memory()
        batches = loader(data, "train", BATCH, comm=comm, seed=5, threads=1, dtype=self.dtype)
        job = Job(model, optimizer, loader=batches, comm=comm)
        record = Record(job, before)
        watch_before(record)
        job.apply(*(reversed(self.techniques) if reverse else self.techniques))
        watch_after(record)
        record.start = weights(job)
        return record


def stack(*names: str, **more: Any) -> Setup:
    """Several techniques, as a recipe of the documents would use them."""
    return Setup(tuple(BY_NAME[name] for name in names), Path(), **more)


STACKS = {
    "[000]: large batches": stack(
        "Rate", "Overlap", "VirtualRanks", "LossScale", "Autocast", "ChannelsLast", optimizer=partial(lars, lr=0.1)
    ),
    "[001]: nodes that do not wait": stack("Asynchronous", "Overlap", "VirtualRanks", "EMA", "Rate", "Autocast"),
    "[003]: short of memory": stack("SavedMemory", "Overlap", "VirtualRanks", "Rate"),
    "compiled, clipped and short of memory": stack("Compile", "Clip", "SavedMemory", "Overlap", "EMA"),
    "small images in seconds": stack("Augment", "Seeded", "ChannelsLast", "Rate", "EMA", "Overlap", "VirtualRanks"),
    "photos of your own": stack("Pretrained", "Augment", "Transforms", "Mix", "Rate", "EMA", "Seeded", "Overlap"),
    "fewer pixels, then larger batches": stack(
        "LowResolution", "GrowBatch", "Rate", "VirtualRanks", "Recalibrate", "Overlap", "Timed"
    ),
    "unequal devices": stack("Shares", "Clip", "Rate", "Overlap", "VirtualRanks", "EMA"),
    "small steps on GPUs": stack("Graphs", "Overlap", "Autocast", "LossScale", "Rate", "EMA", "Timed"),
}


# ---- what is watched


def watch_before(record: Record) -> None:
    """Hooks that come before those of all techniques: next to the loader, and last before the update."""
    job = record.job

    def raw(batches: Iterable[Any]) -> Iterator[Any]:
        for x_NCHW, y_N in batches:
            record.first = x_NCHW.clone() if record.first is None else record.first
            record.counts.append(len(x_NCHW))
            yield x_NCHW, y_N

    def norm() -> None:
        grads = [p.grad.flatten() for p in job.model.parameters() if p.grad is not None]
        record.norms.append(torch.cat(grads).norm().item() if grads else 0.0)

    def half(head: nn.Module, _: object) -> None:
        if head.training:
            record.half.add(torch.is_autocast_enabled("cpu"))
            record.rehearsed |= {job.steps} if job.rehearses else set()

    job.around_loader(raw)
    job.before_step(norm)
    job.on_close(job.model.head.register_forward_pre_hook(half).remove)


def watch_after(record: Record) -> None:
    """Hooks that come after those of all techniques."""
    job = record.job
    overlap = job.kept("overlap") if kept_by(job, "overlap") else None
    count = count_collectives(job, getattr(overlap, "comm", job.step_comm))
    reduce = getattr(overlap, "reduce", None)
    op = "mean" if getattr(reduce, "scale", 1) == 1 else "sum"  # of gradients that are divided before

    def stepped() -> None:
        record.rates.append((job.progress, job.hyper()[0]["lr"]))
        record.collectives.append(count.pop(op, 0))
        buckets = getattr(getattr(overlap, "layout", None), "buckets", ())
        record.late.append(any(bucket.pending for bucket in buckets))

    job.after_step(stepped)


def kept_by(job: Job, name: str) -> bool:
    try:
        return bool(job.kept(name))
    except KeyError:
        return False


def count_collectives(job: Job, comm: Comm) -> Counter[str]:
    """How many means a rank has asked for since the last step."""
    count, send = Counter[str](), comm.all_reduce

    def all_reduce(x: Tensor, *, op: str = "sum") -> Any:
        count[op] += 1
        return send(x, op=op)

    if comm.size > 1:
        comm.all_reduce = all_reduce  # type: ignore[method-assign]
        job.on_close(lambda: vars(comm).pop("all_reduce"))
    return count


# ---- a training


def train(record: Record, steps: int) -> None:
    """The plain loop for so many updates."""
    job, micro, end = record.job, 0, record.job.steps + steps
    me = threading.get_ident()
    while job.steps < end:
        for x_NCHW, y_N in job.loader:
            record.shapes.append(x_NCHW.shape)
            record.mixed.append(getattr(y_N, "mixed_with", (1,))[0] != 1)
            record.seeds.append(torch.default_generator.initial_seed())
            record.accumulate.append(job.accumulate)
            calls = CALLS[me]
            # A compiler would take the hooks of the first forward for the model's own.
            watched = kept_for_backward(job.model, record.kept_bytes) if record.losses else contextlib.nullcontext()
            with watched:
                out = job.model(x_NCHW)
            record.compiled.append(CALLS[me] - calls)
            record.replayed.append("Graphed" in made_by(out.grad_fn))
            loss = job.loss(out, y_N)
            job.backward(loss)
            record.losses.append(loss.item())
            micro += 1
            if micro == job.accumulate:
                micro = 0
                grads = [p.grad.untyped_storage() for p in job.model.parameters() if p.grad is not None]
                if job.accumulate == 1:  # else they are kept for the next backward
                    record.gradient_bytes.append(sum({g.data_ptr(): g.nbytes() for g in grads}.values()))
                job.optimizer.step()
                job.optimizer.zero_grad()
                if job.steps == end:
                    break
    job.drain()


def made_by(node: Any) -> str:
    """The names of the last operations of a forward: casts of its output, and what they cast."""
    name = type(node).__name__
    return name + (made_by(node.next_functions[0][0]) if "Copy" in name else "")


def evaluate(record: Record) -> None:
    job = record.job
    record.trained = weights(job)
    with job.evaluation() as model:
        record.evaluated = weights(job)
        record.outputs = model(next(iter(loader(in_memory(), "test", 8, dtype=job.model.head.weight.dtype)))[0])
    assert_same(record.trained, weights(job))


def whole(setup: Setup, comm: Comm) -> tuple[Record, list[str]]:
    """A whole training that is closed, and what its techniques left undone."""
    record = setup.record(comm, seed=comm.rank)
    job = record.job
    if setup.has("Asynchronous"):
        train(record, STOP)  # drains: a sync point more
    train(record, STEPS - job.steps)
    evaluate(record)
    undone = [f"{member.name}: {what}" for member in setup.members if (what := member.witness(record))]
    batches = job.plain_loader
    job.close()
    for name, found in traces(job.model, job.optimizer).items():
        assert found == record.before[name], f"close() leaves {name}"
    assert (job.loss, job.loader, job.accumulate) == (functional.cross_entropy, batches, 1)
    assert (batches.batch, batches.parts, batches.shares, batches.pipeline.vary) == (BATCH, 1, (), None)
    assert batches.pipeline.augment == Augment()
    return record, undone


def stopped(setup: Setup, comm: Comm) -> Any:
    """The checkpoint of a training that ends early."""
    record = setup.record(comm, seed=comm.rank)
    train(record, STOP)
    saved = through_a_file({"model": record.job.model.state_dict(), "job": record.job.state_dict()})
    record.job.close()
    return saved


def resumed(setup: Setup, comm: Comm, saved: dict[str, Any]) -> Record:
    torch.manual_seed(99)
    record = setup.record(comm, seed=9)
    record.job.model.load_state_dict(saved["model"])
    record.job.load_state_dict(saved["job"])
    assert_same_state(saved["job"]["kept"], through_a_file(record.job.state_dict())["kept"], "kept")
    train(record, STEPS - STOP)
    evaluate(record)
    record.job.close()
    return record


def assert_same_state(saved: Any, found: Any, where: str) -> None:
    """What techniques keep is whole again; so it is seen where steps do not repeat, too."""
    if isinstance(saved, dict):
        assert saved.keys() == found.keys(), where
        for key, value in saved.items():
            assert_same_state(value, found[key], f"{where}.{key}")
    else:
        assert torch.equal(saved, found) if torch.is_tensor(saved) else saved == found, f"{where} differs"


def in_reverse(setup: Setup, comm: Comm) -> dict[str, Tensor]:
    """The weights after a few steps, with the techniques given in the opposite order."""
    record = setup.record(comm, seed=0, reverse=True)
    train(record, STOP)
    record.job.close()
    return equal_on_ranks(setup, record.job, weights(record.job))


def equal_on_ranks(setup: Setup, job: Job, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of the weights that all ranks share: not the running statistics of plain BatchNorm."""
    if setup.has("VirtualRanks") or setup.has("Asynchronous"):
        return found
    return {name: found[name] for name, _ in job.model.named_parameters()}


# ---- contracts


def together(setup: Setup) -> Outcome:
    """Trains members side by side. Raises AssertionError where they break a contract, or do less without a word."""
    if reason := next((f"{m.name} {m.not_run}" for m in setup.members if m.not_run), ""):
        return Outcome("not run", reason)
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for member in setup.members:
            stack.enter_context(member.stand_in())
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        runs = Threads(setup.ranks).run(lambda comm: whole(setup, comm))
        lines = [line for line in said.getvalue().splitlines() if line.startswith("kasoku: ")]
        records = [record for record, _ in runs]
        trains(setup, records)
        resumes(setup, records)
        equals_one_rank(setup)
    return judged([what for _, undone in runs for what in undone], lines)


def judged(undone: Sequence[str], said: Sequence[str]) -> Outcome:
    """A technique that leaves something undone must have said so in a line."""
    shown = []
    for what in undone:
        name = what.partition(":")[0]
        line = next((line for line in said if line.startswith(f"kasoku: {name}: ")), "")
        assert line, f"quietly less: {what}"
        shown.append(line.removeprefix("kasoku: "))
    lines, missed = ("\n".join(dict.fromkeys(each)) for each in (shown, undone))
    return Outcome("less", lines, missed) if shown else Outcome("combine")


def trains(setup: Setup, records: Sequence[Record]) -> None:
    """Losses are finite, weights move, and all ranks have the same ones."""
    for record in records:
        assert np.isfinite(record.losses).all()
        learning = [name for name, p in record.job.model.named_parameters()]
        assert any(not torch.equal(record.trained[name], record.start[name]) for name in learning), "nothing moves"
    one, *others = [equal_on_ranks(setup, record.job, record.trained) for record in records]
    for other in others:
        assert_same(one, other)


def resumes(setup: Setup, records: Sequence[Record]) -> None:
    """A training that is stopped and resumed has the bits of one that never stopped, where that is promised."""
    saved = Threads(setup.ranks).run(lambda comm: stopped(setup, comm))
    again = Threads(setup.ranks).run(lambda comm: resumed(setup, comm, saved[comm.rank]))
    if not all(member.repeats for member in setup.members):
        trains(setup, again)
        return
    for one, other in zip(records, again, strict=True):
        assert_same(one.trained, other.trained)
        assert torch.equal(one.outputs, other.outputs)
        assert one.job.hyper() == other.job.hyper()


def equals_one_rank(setup: Setup) -> None:
    """N ranks train to the weights of one, where that is promised; without BatchNorm unless its groups are alike."""
    if any(member.tolerance is None for member in setup.members):
        return
    tolerance = max(member.tolerance for member in setup.members)
    exact = torch.float64 if tolerance < 1e-3 else torch.float32  # autocast rounds float32 alone
    setup = replace(setup, norm=False, dtype=exact)
    alone = in_reverse(setup, Solo())
    for found in Threads(setup.ranks).run(lambda comm: in_reverse(setup, comm)):
        assert_near(alone, found, tolerance)


def outcome(members: Sequence[Member], where: Path, **more: Any) -> Outcome:
    """What becomes of these techniques side by side."""
    for one, other in itertools.combinations([m.technique for m in members], 2):
        if line := one.conflict(other):
            for both in ((one, other), (other, one)):
                with pytest.raises(InputError, match=r"^techniques \w+ and \w+ cannot be combined: "):
                    Job(Net(), rule).apply(*both)
            return Outcome("refuse", line)
    torch._dynamo.reset()
    return together(Setup(tuple(members), where, **more))


def write(*names: str) -> str:
    """Runs the pairs and stacks of these techniques, or all, and writes those that do not simply combine.

    Returns a line for each that breaks a contract, and then writes nothing.
    """
    run = [pair for pair in PAIRS if not names or {member.name for member in pair} & {*names}]
    known = json.loads(COMBINING.read_text()) if names else {"others": [], "stacks": {}}
    others, wrong = [row for row in known["others"] if not {row["one"], row["other"]} & {*names}], []
    stacks = {}
    with tempfile.TemporaryDirectory() as folder_name:
        where = files(Path(folder_name))
        for one, other in run:
            try:
                result = outcome((one, other), where)
            except Exception as error:
                wrong.append(f"{one.name} and {other.name}: {type(error).__name__}: {error}")
                continue
            if result.kind != "combine":
                others.append({"one": one.name, "other": other.name, **result.row()})
        for name, setup in STACKS.items():
            members = [member.name for member in setup.members]
            if names and not {*members} & {*names} and name in known["stacks"]:
                stacks[name] = known["stacks"][name]
                continue
            try:
                stacks[name] = {"members": members, **together(replace(setup, where=where)).row()}
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    if not wrong:
        found = {
            "pairs": len(PAIRS),
            "stand_ins": {member.name: member.on_cpu for member in MEMBERS if member.on_cpu},
            "signs": {member.name: member.sign for member in MEMBERS},
            "stacks": stacks,
            "others": sorted(others, key=lambda row: (row["one"], row["other"])),
        }
        COMBINING.write_text(json.dumps(found, indent=1) + "\n")
    return "\n".join(wrong)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(write(*sys.argv[1:]) or 0)
