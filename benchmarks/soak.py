"""Faults at random, for as long as you like: does every training end in the weights of an undisturbed one?

    make soak [HOURS=1]        (as root, on Linux)

Two hosts in network namespaces of this machine train with a run folder on a tmpfs, one training after the other:
digits; digits by Asynchronous; CIFAR-10 (--cifar DIR); photos from a pack on a web server (--photos DIR). Every few
seconds something goes wrong, now and then two things at once. What has ended is started again, as a launcher
would. `faults`: how many, by kind. `equal`: trainings whose weights have the bits of an undisturbed one (Asynchronous:
whose top-1 is at least TOP1). `left_behind`: processes, shared memory and locks that are there afterwards. `stuck`:
faults after which no step was made for LIMIT_S. `not_as_undisturbed`: trainings that are not equal, and all that is
left behind or stuck; if it is above 0, the exit code is 1, and the run folders and what the ranks said stay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors.torch import load_file

import cluster
from common import finish, parse
from kasoku.core import InputError
from kasoku.training.run_folder import RunFolder

HERE = Path(__file__).parent
HOSTS, PORT, SITE_PORT = 2, 29531, 8099
GAP_S, HEALS_S, LIMIT_S = (4.0, 9.0), (2.0, 12.0), 90.0
TOP1 = 0.9
CLAIMS = {"soak/not_as_undisturbed": ("not_as_undisturbed", "faults", "by_kind", "trainings")}
TMPFS = "64m"
EXACT = "techniques=[{use='kasoku.distributed.AllReduce', exact=true}]"
COMMON = ("device.precision=fp32", "device.threads=1", "device.kind=cpu", "evaluate.target=0", "save.every_s=5")
SGD = "optimizer={use='kasoku.optim.sgd', lr=0.02, momentum=0.9}"


@dataclass(frozen=True)
class Workload:
    """A training, and what its result is held against."""

    name: str
    recipe: str
    settings: tuple[str, ...]
    exact: bool = True
    remote: bool = False

    def command(self, run: Path) -> list[str]:
        words = [word for setting in (*COMMON, *self.settings) for word in ("--set", setting)]
        return [
            sys.executable,
            "-m",
            "kasoku",
            "train",
            self.recipe,
            *words,
            "--quiet",
            "--continue",
            "--out",
            str(run),
        ]


def workloads(options: argparse.Namespace, folder: Path) -> list[Workload]:
    """Those whose data is there; the pack of photos is made here."""
    epochs = (f"epochs={options.epochs}", f"schedule.epochs={options.epochs}", "evaluate.every=20")
    found = [
        Workload("digits", "digits_cnn_98", (EXACT, SGD, "norm_batch=32", *epochs)),
        Workload(
            "digits, asynchronous",
            "digits_cnn_98",
            ("techniques=[{use='kasoku.distributed.Asynchronous'}]", SGD, *epochs),
            exact=False,
        ),
    ]
    if options.cifar:
        small = ("model={use='kasoku.models.cifarnet', widths=[16, 32, 64]}", f"data.root={options.cifar}", "batch=64")
        share = ("epochs=0.6", "schedule.warmup=0", "norm_batch=16", "evaluate.every=1", "evaluate.views=plain")
        found.append(Workload("CIFAR-10", "cifar10_cifarnet_94", (EXACT, SGD, *small, *share)))
    if options.photos:
        photos = folder / "photos"
        for split in ("train", "val"):
            for kind in sorted((Path(options.photos) / split).iterdir()):
                (photos / split / kind.name).mkdir(parents=True)
                for file in sorted(kind.iterdir())[:24]:
                    shutil.copy(file, photos / split / kind.name)
        pack = ["pack", str(photos), str(folder / "site" / "pack"), "--side", "64", "--quiet"]
        subprocess.run([sys.executable, "-m", "kasoku", *pack], check=True)
        source = ("data.use=kasoku.data.shards", f"data.root=http://10.99.0.{HOSTS + 1}:{SITE_PORT}/pack")
        small = (
            "data.size=32",
            "data.cache_bytes=1000000",
            "model={use='kasoku.models.cifarnet', widths=[16, 32, 64]}",
        )
        share = ("epochs=40", "schedule.warmup=0", "batch=32", "norm_batch=8", "evaluate.every=10")
        found.append(Workload("photos", "imagenette_resnet18", (EXACT, SGD, *source, *small, *share), remote=True))
    return found


class Site(ThreadingHTTPServer):
    """A web server that goes wrong as the control file says: stalls, cuts off, lies, fails."""

    daemon_threads = True

    def __init__(self, folder: Path, control: Path) -> None:
        self.folder, self.control = folder, control
        super().__init__(("", SITE_PORT), SiteHandler)


class SiteHandler(BaseHTTPRequestHandler):
    """Answers with files, or with the bytes of them that were asked for."""

    protocol_version = "HTTP/1.1"
    server: Site

    def log_message(self, *words: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path, fault = self.server.folder / self.path.strip("/"), self.server.control.read_text()
        headers, code = {"Content-Type": "application/octet-stream"}, 200
        if path.is_dir():
            names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir())
            content = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
            headers["Content-Type"] = "text/html"
        elif path.is_file():
            content = path.read_bytes()
            headers |= {"ETag": f'"{len(content)}"', "Accept-Ranges": "bytes"}
            if (asked := self.headers.get("Range")) and body:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = min(int(last or len(content) - 1), len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
                content, code = content[int(first) : end + 1], 206
        else:
            content, code = b"", 404
        self.send_response(500 if fault == "fail" and body else code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.give(content, fault)

    def give(self, content: bytes, fault: str) -> None:
        """Sends the bytes, as they are or not."""
        if fault == "stall":
            time.sleep(5)
        if fault == "lie":
            content = bytes(255 - x for x in content)
        if fault == "cut":
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)


class Ranks:
    """The processes of one training, a host each; starts again what has ended before the training has."""

    def __init__(self, workload: Workload, run: Path, names: list[str], clock: Path, library: Path) -> None:
        self.workload, self.run, self.names, self.clock, self.library = workload, run, names, clock, library
        self.port, self.starts, self.codes = PORT, 0, Counter[int]()
        self.log = (run.parent.parent / f"{run.parent.name}.log").open("ab")
        self.processes = [self.start(rank) for rank in range(HOSTS)]

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        where = {"RANK": str(rank), "WORLD_SIZE": str(HOSTS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        where |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(self.port), "GLOO_SOCKET_IFNAME": "ve0"}
        where |= {"LD_PRELOAD": str(self.library), "KASOKU_CLOCK": str(self.clock)}
        words = ["ip", "netns", "exec", self.names[rank], *self.workload.command(self.run)]
        return subprocess.Popen(words, env=os.environ | where, stdout=self.log, stderr=self.log)

    @property
    def over(self) -> bool:
        """Whether the training has ended regularly, on all ranks."""
        return all(process.poll() == 0 for process in self.processes)

    @property
    def ends(self) -> bool:
        """Whether it has on one of them; the others hear of it soon."""
        return any(process.poll() == 0 for process in self.processes)

    def poll(self) -> None:
        """Starts again what has ended, but not while the others may be at their end."""
        codes = [process.poll() for process in self.processes]
        if self.ends:
            return
        if None not in codes:
            self.port += 1  # the store of the last attempt may linger
        for rank, code in enumerate(codes):
            if code is not None:
                self.codes[code] += 1
                self.processes[rank] = self.start(rank)

    def steps(self) -> int:
        """The last step that was noted."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.run / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.log.close()


Fault = Callable[["Soak"], Callable[[], object]]  # does harm; what it returns heals


class Soak:
    """The hosts, the tmpfs, the web server and the clock, and what may go wrong with them."""

    def __init__(self, options: argparse.Namespace, folder: Path, names: list[str]) -> None:
        self.options, self.folder, self.names = options, folder, names
        self.rng = random.Random(options.seed)
        self.control, self.clock, self.library = folder / "control", folder / "clock", folder / "clock.so"
        self.control.write_text("")
        self.clock.write_text("0")
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", str(HERE / "jumping_clock.c"), "-o", str(self.library)], check=True
        )
        self.done, self.stuck = Counter[str](), list[str]()
        self.until = time.monotonic() + 3600 * options.hours
        self.ranks: Ranks

    def rank(self) -> int:
        return self.rng.randrange(HOSTS)

    def process(self, rank: int) -> int:
        """The process of a rank: `ip netns exec` becomes it."""
        return self.ranks.processes[rank].pid

    # ---- faults

    def kill(self) -> Callable[[], object]:
        with suppress(ProcessLookupError):
            os.kill(self.process(self.rank()), signal.SIGKILL)
        return lambda: None

    def stop(self) -> Callable[[], object]:
        pid = self.process(self.rank())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

        def heal() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return heal

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", f"ks{os.getpid()}", *words], check=True)

    def cut(self) -> Callable[[], object]:
        port = f"p{self.rank()}"
        self._ip("link", "set", port, "down")
        return lambda: self._ip("link", "set", port, "up")

    def slow(self) -> Callable[[], object]:
        words = ["ip", "netns", "exec", self.names[self.rank()], "tc", "qdisc"]
        rule = ["root", "tbf", "rate", "5mbit", "burst", "64kb", "latency", "50ms"]
        subprocess.run([*words, "replace", "dev", "ve0", *rule], check=True)
        return lambda: subprocess.run([*words, "del", "dev", "ve0", "root"], check=True)

    def disk_full(self) -> Callable[[], object]:
        file = self.ranks.run.parent / "filler"
        with suppress(OSError), file.open("wb") as stream:
            while True:
                stream.write(bytes(1 << 20))
                stream.flush()
        return lambda: file.unlink(missing_ok=True)

    def folder_gone(self) -> Callable[[], object]:
        run = self.ranks.run
        away = run.with_name("away")
        with suppress(OSError):
            run.rename(away)

        def heal() -> None:
            if away.exists():
                shutil.rmtree(run, ignore_errors=True)  # a rank that was started meanwhile began it anew
                away.rename(run)

        return heal

    def jump(self) -> Callable[[], object]:
        self.clock.write_text(str(self.rng.choice((-7200, -30, 30, 7200))))
        return lambda: None

    def source(self) -> Callable[[], object]:
        self.control.write_text(self.rng.choice(("stall", "cut", "lie", "fail")))
        return lambda: self.control.write_text("")

    def kinds(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """What may go wrong with this training."""
        names = ("kill", "stop", "cut", "slow", "disk_full", "folder_gone", "jump")
        found = {name: getattr(self, name) for name in names}
        return found | ({"source": self.source} if self.ranks.workload.remote else {})

    # ---- a training

    def wait(self, seconds: float) -> None:
        """Lets the ranks run, and starts again what ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.ranks.over:
            time.sleep(0.1)
            self.ranks.poll()

    def disturb(self) -> None:
        """One fault, or two at once; then waits until steps are made again."""
        kinds = self.kinds()
        chosen = self.rng.sample(sorted(kinds), 2 if self.rng.random() < 0.2 else 1)
        print(f"{self.ranks.workload.name}, step {self.ranks.steps()}: {' and '.join(chosen)}", flush=True)
        for name in chosen:
            self.done[name] += 1
        heals = [kinds[name]() for name in chosen]
        ends = time.monotonic() + self.rng.uniform(*HEALS_S)
        while time.monotonic() < ends:  # nothing is started again while the folder is away
            time.sleep(0.1)
            if "folder_gone" not in chosen:
                self.ranks.poll()
        for heal in heals:
            heal()
        before, until = self.ranks.steps(), time.monotonic() + LIMIT_S
        while self.ranks.steps() <= before and not self.ranks.ends and time.monotonic() < until:
            self.wait(0.2)
        if time.monotonic() >= until:
            self.stuck.append(f"{self.ranks.workload.name}: {' and '.join(chosen)} at step {before}")

    def train(self, workload: Workload, disk: Path) -> Path:
        """One training to its end, through faults; its run folder."""
        run = disk / "run"
        self.ranks = Ranks(workload, run, self.names, self.clock, self.library)
        try:
            while not self.ranks.over and len(self.stuck) < 3:
                self.wait(self.rng.uniform(*GAP_S))
                if not self.ranks.ends:
                    self.disturb() if time.monotonic() < self.until else self.wait(1)
                elif not self.ranks.over:
                    self._end()
        finally:
            print(f"{workload.name}: exit codes {dict(self.ranks.codes)}, {self.ranks.starts} starts", flush=True)
            self.ranks.kill()
        return run

    def _end(self) -> None:
        """One rank has ended; gives the others as long as they need to hear of it."""
        until = time.monotonic() + 30
        while time.monotonic() < until and None in [process.poll() for process in self.ranks.processes]:
            time.sleep(0.1)
        for process in self.ranks.processes:
            if process.poll() is None:
                self.stuck.append(f"{self.ranks.workload.name}: a rank had not ended 30 s after another")
                process.kill()
                process.wait()
        self.ranks.processes = [p for p in self.ranks.processes if p.poll() == 0]


def left_behind(names: list[str], run: Path, shared: set[str]) -> list[str]:
    """What is there after a training and should not be."""
    found = []
    for name in names[:HOSTS]:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        found += [f"process {pid}" for pid in pids.split()]
    found += [f"shared memory {name}" for name in sorted({*os.listdir("/dev/shm")} - shared)]
    found += [f"file {file.name}" for file in run.rglob("*.part*")]
    try:
        RunFolder(run, resume=True).close()
    except InputError as error:
        found.append(f"lock: {error}")
    return found


@contextmanager
def tmpfs(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TMPFS}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def holds(workload: Workload, run: Path, undisturbed: Path) -> bool:
    """Whether a training ended as it should."""
    if not (run / "result.json").exists():
        return False
    if not workload.exact:
        return bool(json.loads((run / "result.json").read_text())["top1"] >= TOP1)
    left, right = load_file(run / "model.safetensors"), load_file(undisturbed / "model.safetensors")
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def serve(folder: str, control: str) -> None:
    """The web server, in a namespace of its own."""
    Site(Path(folder), Path(control)).serve_forever()


def soak(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Trains until the time is over, through faults."""
    (folder / "site").mkdir()
    chosen = workloads(options, folder)
    figures: dict[str, object] = {"skipped": [n for n in ("cifar", "photos") if not getattr(options, n)]}
    trained, unequal, left, n = 0, list[str](), list[str](), 0
    with cluster.namespaces(HOSTS + 1) as names:
        for name in names:  # with bbr, a slowed link that was cut stood still for up to 90 s
            change = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
            subprocess.run(["ip", "netns", "exec", name, "sh", "-c", change], check=True)
        state = Soak(options, folder, names)
        words = [sys.executable, str(HERE / "soak.py"), "--serve", str(folder / "site"), str(state.control)]
        site = subprocess.Popen(["ip", "netns", "exec", names[HOSTS], *words])
        try:
            alone = dict[str, Path]()
            for workload in chosen:
                if workload.exact:
                    alone[workload.name] = folder / f"alone-{len(alone)}"
                    words = ["ip", "netns", "exec", names[0], *workload.command(alone[workload.name])]
                    subprocess.run(words, check=True)
            state.until = time.monotonic() + 3600 * options.hours
            while time.monotonic() < state.until and len(state.stuck) < 3:
                workload, shared = chosen[n % len(chosen)], {*os.listdir("/dev/shm")}
                n += 1
                with tmpfs(folder / f"disk-{n}") as disk:
                    run = state.train(workload, disk)
                    trained += 1
                    left += left_behind(names, run, shared)
                    if not holds(workload, run, alone.get(workload.name, run)):
                        unequal.append(f"{workload.name}, training {n}")
                        if run.exists():
                            shutil.copytree(run, folder / f"unequal-{n}")
        finally:
            site.kill()
            site.wait()
    return {
        "faults": sum(state.done.values()),
        "by_kind": dict(sorted(state.done.items())),
        "trainings": trained,
        "equal": trained - len(unequal),
        "not_as_undisturbed": len(unequal) + len(left) + len(state.stuck),
        "unequal": unequal,
        "left_behind": left,
        "stuck": state.stuck,
        **figures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, default=1 / 6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=200, help="of the digits")
    data = os.environ.get("KASOKU_DATA", "")
    cifar, photos = Path(data) / "cifar-10-batches-bin", Path(data) / "imagenette224"
    parser.add_argument("--cifar", default=str(cifar) if data and cifar.is_dir() else "", help="a folder of CIFAR-10")
    parser.add_argument(
        "--photos", default=str(photos) if data and photos.is_dir() else "", help="with train/ and val/"
    )
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parse(parser)
    if options.serve:
        serve(*options.serve)
        return 0
    if os.geteuid() != 0:
        raise SystemExit("soak.py: network namespaces and a tmpfs: only as root, on Linux; run it as root")
    folder = Path(tempfile.mkdtemp(prefix="kasoku-soak-"))
    began = time.monotonic()
    figures = soak(options, folder)
    finish("soak", vars(options), {**figures, "seconds": round(time.monotonic() - began)}, CLAIMS)
    good = not figures["not_as_undisturbed"]
    if good:
        shutil.rmtree(folder)
    else:
        print(f"soak.py: what was left is in {folder}", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
