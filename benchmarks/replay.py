"""How many flipped bits does Replay find, and what does a checked step cost?

Command: python benchmarks/replay.py [--trials N] [--rounds N]    (a short form: --trials 2 --rounds 2)

A trial trains a small network (BatchNorm, dropout, SGD with momentum) for 30 steps, and flips one random bit of one
random element of a tensor, on one random rank. Gradients are flipped where backward computes them. Weights and momentum
are flipped after a forward, after a backward or after an update, at random.
checked_found: flips in checked steps that end the training before that step's update, and whose line names step, rank
and tensor: 10 gradients, 5 weights and 5 momenta between forward and update, on one or two ranks (`--checked`).
share_found: of flips in random steps, by kind, N (every) and ranks: those that end the training at all; a flip is found
for certain only in the steps that are checked, or where ranks differ later.
cost_per_checked_step: cifarnet, batch 64, 32x32 images: a step with Replay(every=1) over one without, rounds in turns.
Bound: the share of forward and backward in a step, plus 1. deterministic: the same step with torch's deterministic
algorithms over one without them (device.deterministic), and what the process takes more.
Result: records/. Why it matters: processors and memory return wrong bits without an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from common import finish, parse, spread
from kasoku.core import Comm, CorruptionError, Job, Threads
from kasoku.data import Dataset, Memory, loader
from kasoku.device import Autocast, ChannelsLast, Seeded, tune_malloc
from kasoku.distributed import OneBucket, Overlap, Replay
from kasoku.models import cifarnet
from kasoku.optim import sgd
from kasoku.testing.toy import toy_job, train_toy

STEPS, LAST = 30, 19  # of a trial; the last step of a flip
BATCH, SIDE, IMAGES = 64, 32, 640
KINDS, EVERY, RANKS = ("gradient", "weight", "momentum"), (1, 10), (1, 2)
MOMENTS = ("after_forward", "after_backward", "after_update")
CLAIMS = {
    "replay/checked_found": ("checked_found", "share_found", "share_found_by_moment"),
    "replay/cost_per_checked_step": ("cost_per_checked_step", "replay_ms", "cost_at_100"),
    "replay/deterministic": ("deterministic.over_plain", "deterministic.more_mb"),
}


def flip(x: Tensor, rng: random.Random) -> None:
    """Flips a random bit of a random element, unseen by autograd, as a defective memory does."""
    x.data.view(-1).view(torch.int32)[rng.randrange(x.numel())] ^= 1 << rng.randrange(31)


def plant(job: Job, kind: str, moment: str, step: int, rng: random.Random) -> str:
    """Plants the flip; returns the name of its tensor as Replay's line has it."""
    name, p = rng.choice([*job.model.named_parameters()])

    def damage(gradient: Tensor) -> Tensor | None:
        if job.steps != step or job.rehearses:
            return None
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        flip(gradient, rng)
        return gradient

    def damage_state() -> None:
        if job.steps == step and not job.rehearses:
            flip(p if kind == "weight" else job.state_of(p)["momentum_buffer"], rng)

    if kind == "gradient":
        p.register_hook(damage)
    elif moment == "after_forward":
        job.model.register_forward_hook(lambda *_: damage_state())
    elif moment == "after_backward":
        job.before_step(damage_state)  # the last one that is registered runs first
    else:
        job.after_step(damage_state)
    return {"gradient": "gradient of ", "weight": "", "momentum": "momentum_buffer of "}[kind] + name


def trial(kind: str, moment: str, every: int, ranks: int, step: int, rng: random.Random) -> tuple[str, str]:
    """The line that ends the training ("" if none does), and what it must contain to name the flip."""
    victim, seed = rng.randrange(ranks), rng.random()

    def act(comm: Comm) -> tuple[str, str]:
        exchange = [Overlap(OneBucket())] if ranks > 1 else []
        job = toy_job(Seeded(seed=3), *exchange, Replay(every=every), comm=comm)
        tensor = plant(job, kind, moment, step, random.Random(seed)) if comm.rank == victim else ""
        try:
            train_toy(job, STEPS)
        except CorruptionError as error:
            return str(error), tensor
        return "", tensor

    (line, _), tensor = (results := Threads(ranks).run(act))[0], results[victim][1]
    named = f"at step {step}, rank {victim} (" in line and f"{tensor} " in line
    return line, tensor if named else ""


def found(trials: int, checked: int) -> dict[str, object]:
    """How many flips are found, in checked steps and in any."""
    rng = random.Random(0)
    named = 0
    for i in range(checked):
        kind = ("gradient", "weight", "gradient", "momentum")[i % 4]
        step, moment = 5 * rng.randrange(1, 4), rng.choice(MOMENTS[:2])
        line, tensor = trial(kind, moment, 5, 1 + i // 2 % 2, step, rng)
        named += bool(tensor)
        print(f"{kind} at step {step}: {line or 'NOT FOUND'}", file=sys.stderr)
    shares, by_moment = {}, {}
    for kind, every, ranks in itertools.product(KINDS, EVERY, RANKS):
        ended: dict[str, list[bool]] = {moment: [] for moment in MOMENTS}
        for i in range(trials):
            moment = MOMENTS[i % len(MOMENTS)]
            line, _ = trial(kind, moment, every, ranks, rng.randrange(1, LAST + 1), rng)
            ended[moment].append(bool(line))
        key = f"{kind}, N = {every}, {ranks} rank{'s' * (ranks > 1)}"
        shares[key] = round(statistics.fmean(itertools.chain(*ended.values())), 3)
        if kind != "gradient":
            by_moment[key] = {m: round(statistics.fmean(each), 3) for m, each in ended.items() if each}
        print(f"{key}: {shares[key]:.0%}", file=sys.stderr)
    return {
        "checked_found": named,
        "checked": checked,
        "share_found": shares,
        "share_found_by_moment": by_moment,
    }


def training(*more: Replay) -> Callable[[], float]:
    """A function that trains an epoch and returns the median seconds of its steps."""
    x = torch.randint(0, 256, (IMAGES, SIDE, SIDE, 3), dtype=torch.uint8)
    split = Memory(x, torch.randint(10, (IMAGES,)))
    noise = Dataset("noise", tuple("0123456789"), split, split, 3, (SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)
    job = Job(cifarnet(), sgd, loader=loader(noise, "train", BATCH))
    job.apply(Autocast("bf16"), ChannelsLast(), Seeded(), *more)

    def epoch() -> float:
        seconds, begin = [], time.perf_counter()
        for x_NCHW, y_N in job.loader:
            job.backward(job.loss(job.model(x_NCHW), y_N))
            job.optimizer.step()
            job.optimizer.zero_grad()
            now = time.perf_counter()
            seconds.append(now - begin)
            begin = now
        return statistics.median(seconds)

    return epoch


def costs(rounds: int) -> dict[str, object]:
    """What a checked step costs, and deterministic algorithms: seconds of steps in turns."""
    plain, replayed = training(), training(Replay(every=1))

    def deterministic() -> float:
        torch.use_deterministic_algorithms(True)
        try:
            return plain()
        finally:
            torch.use_deterministic_algorithms(False)

    sides = {"plain": plain, "replay": replayed, "deterministic": deterministic}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name, side in sides.items():
            took = side()
            if i:  # the first round warms up
                seconds[name].append(took)
    ratio, order = (
        [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)] for name in ("replay", "deterministic")
    )
    memory = {}
    for setting in (False, True):
        command = [sys.executable, __file__, "--memory", str(int(setting))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        memory[setting] = int(done.stdout.splitlines()[-1]) / 1e6
    return {
        "cost_per_checked_step": spread(ratio),
        "cost_at_100": round((statistics.median(ratio) - 1) / 100, 5),
        "plain_ms": spread([1e3 * s for s in seconds["plain"]]),
        "replay_ms": spread([1e3 * s for s in seconds["replay"]]),
        "bound": 2.0,
        "deterministic": {"over_plain": spread(order), "more_mb": round(memory[True] - memory[False], 1)},
    }


def training_bytes(deterministic: bool) -> int:
    """The most that a process has which trains an epoch."""
    torch.use_deterministic_algorithms(deterministic)
    training()()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=24, help="flips of each kind, N and number of ranks")
    parser.add_argument("--checked", type=int, default=20, help="flips in checked steps")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", type=int, metavar="0|1", help="only print the bytes of a training")
    arguments = parse(parser)
    tune_malloc()
    if arguments.memory is not None:
        print(json.dumps(training_bytes(bool(arguments.memory))))
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small a second thread only waits
    figures = found(arguments.trials, arguments.checked)
    torch.set_num_threads(threads)
    figures |= costs(arguments.rounds)
    parameters: dict[str, object] = {"trials": arguments.trials, "steps": STEPS, "rounds": arguments.rounds}
    finish("replay", parameters | {"network": "cifarnet", "batch": BATCH, "side": SIDE}, figures, CLAIMS)


if __name__ == "__main__":
    main()
