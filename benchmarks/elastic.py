"""How fast does a training go on when hosts die and join, does its result stay, and what does being ready cost?

Four hosts in network namespaces of this machine (as root) train CIFAR ResNet-18; one is killed, then the one that hosts
the rendezvous; then one of them is started again and joins. `detect_s`: from the kill to the line that names the dead
rank, the longer of the two. `resume_s`: from that line to the first step that was not there before. `join_pause_s`: the
longest time between two steps from the newcomer's start until it trains. `weights_equal`: the weights are those of one
undisturbed rank, bit for bit (`AllReduce(exact=true)`). `snapshot_cost`: the share of the time that copies of the state
took. Beside it two ranks under `torchrun --max-restarts`, of which one is killed: `torchrun_s` from the kill to the
first new step from the checkpoint on disk. With --torchft, the same workload by torchft, whose batch is smaller after a
death: `torchft_pause_s` and `torchft_join_pause_s`, the longest time without a step after a kill and after a start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

import cluster
from common import finish, parse

HOSTS, KILLED, PORT, TORCHFT_PORT = 4, (3, 0), 29517, 29541  # KILLED: by rank, in this order
EXACT = "techniques=[{use='kasoku.data.Augment', translate=1}, {use='kasoku.distributed.AllReduce', exact=true}]"
LIMIT_S = 1500.0
CLAIMS = {
    "elastic/detect": ("detect_s", "weights_equal", "torchrun_s", "torchft_pause_s", "torchft_join_pause_s"),
    "elastic/resume": "resume_s",
    "elastic/join_pause": "join_pause_s",
    "elastic/copies": "snapshot_cost",
}


def command(options: argparse.Namespace, run: Path, *more: str) -> list[str]:
    """`kasoku train` for the workload."""
    settings = [EXACT, "device.precision=fp32", "device.threads=1", "evaluate.target=0", *more]
    settings.append("optimizer={use='kasoku.optim.sgd', lr=0.02, momentum=0.9}")
    if options.short:
        recipe = "digits_cnn_98"
        settings += ["norm_batch=16", f"epochs={options.epochs or 60}"]
    else:
        recipe = "cifar10_cifarnet_94"
        settings += ["model={use='kasoku.models.cifar_resnet18'}", "batch=64", "norm_batch=16"]
        settings += [f"epochs={options.epochs or 0.15}", "schedule.warmup=0"]
    words = [word for setting in settings for word in ("--set", setting)]
    return ["train", recipe, *words, "--quiet", "--out", str(run)]


def rows(run: Path) -> list[tuple[int, float]]:
    """(step, seconds since 1970) of each line of metrics.jsonl that is whole."""
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [(line["step"], line["time_s"]) for line in lines]


def wait_for(run: Path, step: int, after_s: float = 0.0) -> float:
    """When the first step from this one on was made, after a moment; seconds since 1970."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if found := [at for seen, at in rows(run) if seen >= step and at > after_s]:
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"elastic.py: {run} does not reach step {step}")


class Hosts:
    """The ranks of one training, each in a network namespace of its own, and what they say."""

    def __init__(self, options: argparse.Namespace, run: Path, names: Sequence[str]) -> None:
        self.options, self.run, self.names = options, run, names
        self.said: list[tuple[float, str]] = []
        self.ranks = [self.start(number) for number in range(HOSTS)]

    def start(self, number: int) -> subprocess.Popen[str]:
        """Starts a rank; where the others train, it joins them."""
        where = {"RANK": str(number), "WORLD_SIZE": str(HOSTS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        where |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "ve0"}
        words = ["ip", "netns", "exec", self.names[number], sys.executable, "-m", "kasoku"]
        words += [*command(self.options, self.run), "--continue"]
        rank = subprocess.Popen(words, env=os.environ | where, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        return rank

    def _listen(self, rank: subprocess.Popen[str]) -> None:
        for line in rank.stderr or ():
            self.said.append((time.time(), line))
            if self.options.show:
                print(line, end="", file=sys.stderr)

    def wait_for_line(self, words: str, before: int) -> float:
        """When a rank said this, after so many lines."""
        at_s = time.time()
        while not (named := [t for t, line in self.said[before:] if words in line]):
            if time.time() - at_s > LIMIT_S or all(rank.poll() is not None for rank in self.ranks):
                raise SystemExit(f"elastic.py: nobody goes on: {self.said[-3:]}")
            time.sleep(0.01)
        return named[0]


def killed(options: argparse.Namespace, run: Path) -> dict[str, float]:
    """Trains on all hosts, kills two of them, one after the other, and starts one of these again."""
    detect_s, resume_s = [], []
    with cluster.namespaces(HOSTS) as names:
        hosts = Hosts(options, run, names)
        try:
            for victim in KILLED:
                seen = max([step for step, _ in rows(run)], default=0)
                wait_for(run, seen + options.steps)
                before, at_s = len(hosts.said), time.time()
                hosts.ranks[victim].kill()
                named_s = hosts.wait_for_line("; going on with", before)
                detect_s.append(named_s - at_s)
                resume_s.append(wait_for(run, 0, named_s) - named_s)
            before, at_s, left = len(hosts.said), time.time(), HOSTS - len(KILLED)
            hosts.ranks[KILLED[0]] = hosts.start(KILLED[0])
            joined_s = wait_for(run, 0, hosts.wait_for_line(f"going on with {left + 1} ranks", before))
            times = [t for _, t in rows(run) if at_s < t <= joined_s]
            join_s = max(b - a for a, b in itertools.pairwise(times))
            codes = [rank.wait(LIMIT_S) for rank in hosts.ranks]
        finally:
            for rank in hosts.ranks:
                rank.kill()
    if any(code for rank, code in enumerate(codes) if rank not in KILLED[1:]):
        raise SystemExit(f"elastic.py: exit codes {codes}: {hosts.said[-3:]}")
    return {"detect_s": max(detect_s), "resume_s": max(resume_s), "join_pause_s": join_s}


def restarted(options: argparse.Namespace, run: Path) -> float:
    """Seconds from the kill of one of two ranks under torchrun to the first new step."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    saving = ("save.every_steps=10", "faults.elastic=false")
    words = [*torchrun, "--master-port", str(PORT), "-m", "kasoku", *command(options, run, *saving), "--continue"]
    process = subprocess.Popen(words, stderr=None if options.show else subprocess.DEVNULL)
    try:
        wait_for(run, options.steps)
        while not [*(run / "checkpoints").glob("step-*")]:
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        at_s = time.time()
        os.kill(int(children[-1]), signal.SIGKILL)
        last = max(step for step, _ in rows(run))
        return wait_for(run, last + 1, at_s + 1.0) - at_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def torchft(folder: Path) -> dict[str, float]:
    """The same faults with torchft, but for the host of its lighthouse, which has to live: seconds without a step."""
    script, files = Path(__file__).with_name("elastic_torchft.py"), [folder / f"{rank}" for rank in range(HOSTS)]
    folder.mkdir()

    def steps(rank: int) -> list[list[float]]:
        text = files[rank].read_text() if files[rank].exists() else ""
        return [[float(word) for word in line.split()] for line in text.splitlines() if line.count(" ") == 2]

    def wait(replicas: int, after_s: float) -> float:
        """The longest time between two steps of host 0 from a moment on, once so many replicas make steps."""
        until = time.monotonic() + LIMIT_S
        while not (found := [at for _, at, there in steps(0) if at > after_s + 1 and there == replicas]):
            if time.monotonic() > until:
                raise SystemExit(f"elastic.py: torchft makes no step with {replicas} replicas")
            time.sleep(0.1)
        times = [at for _, at, _ in steps(0) if at <= found[0]]
        return max((b - a for a, b in itertools.pairwise(times) if b > after_s), default=0.0)

    with cluster.namespaces(HOSTS) as names:

        def start(rank: int, *words: str) -> subprocess.Popen[str]:
            where = {"KASOKU_HOST": f"10.99.0.{rank + 1}", "GLOO_SOCKET_IFNAME": "ve0", "RUST_LOG": "error"}
            command = ["ip", "netns", "exec", names[rank], sys.executable, str(script), str(rank), *words]
            return subprocess.Popen(command, env=os.environ | where, stdout=subprocess.PIPE, text=True)

        lighthouse = start(0, "serve", "")
        (lighthouse.stdout or sys.stdin).readline()
        address = f"http://10.99.0.1:{TORCHFT_PORT}"
        replicas = [start(rank, address, str(files[rank])) for rank in range(HOSTS)]
        try:
            wait(HOSTS, 0.0)
            time.sleep(5)
            lost_s, left = [], HOSTS
            for victim in (3, 1):
                left, at_s = left - 1, time.time()
                replicas[victim].kill()
                lost_s.append(wait(left, at_s))
                time.sleep(5)
            at_s = time.time()
            replicas[3] = start(3, address, str(files[3]))
            return {"torchft_pause_s": max(lost_s), "torchft_join_pause_s": wait(left + 1, at_s)}
        finally:
            for process in (*replicas, lighthouse):
                process.kill()
                process.wait()


def equal(a: Path, b: Path) -> bool:
    """Whether two runs ended in the same weights, bit for bit."""
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def main() -> None:
    """Runs all three, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="digits, to see whether it runs")
    parser.add_argument("--steps", type=int, default=12, help="between two faults")
    parser.add_argument("--epochs", type=float, default=0.0)
    parser.add_argument("--show", action="store_true", help="print the lines of the ranks")
    parser.add_argument("--without-torchrun", action="store_true")
    parser.add_argument("--torchft", action="store_true", help="the same faults with torchft, which is installed")
    options = parse(parser)
    if os.geteuid() != 0:
        raise SystemExit("elastic.py: network namespaces: only as root, on Linux; run it as root")
    with tempfile.TemporaryDirectory() as folder:
        alone, run, other = (Path(folder) / name for name in ("alone", "run", "torchrun"))
        figures: dict[str, object] = {**killed(options, run)}
        copies = json.loads((run / "copies.json").read_text())
        figures["snapshot_cost"] = copies["spent_s"] / max(1e-9, copies["of_s"])
        subprocess.run([sys.executable, "-m", "kasoku", *command(options, alone)], check=True)
        figures["weights_equal"] = equal(alone, run)
        if not options.without_torchrun:
            figures["torchrun_s"] = restarted(options, other)
        if options.torchft:
            figures |= torchft(Path(folder) / "torchft")
    finish("elastic", vars(options), figures, CLAIMS)


if __name__ == "__main__":
    main()
