"""Sends the metrics and the results of a training to an experiment tracker.

Note: never in the way. The training puts calls into a bounded queue, and one daemon thread makes them. Calls that fail,
and those that the queue has no room for, are lost; a line at the end says how many, and why. At the end the training
waits for the rest, but at most 1 % of its own time or 15 seconds, whichever is longer; then once more as long, in which
the run is ended without the calls that still wait, so that it does not stay open at the tracker.
"""

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kasoku.core import InputError, Job, Technique, say, summary
from kasoku.core.errors import without_password

_MOST_CALLS = 1000  # that wait for the thread
_CONNECT_S = 3.0  # until a server counts as out of reach
_FILES = ("recipe.toml", "result.json", "ledger.json", "report.html")  # of a run folder, kept as artifacts


@dataclass(frozen=True)
class Track(Technique, in_sandbox=False):
    """Sends the metrics, the resolved recipe, the ledger and the report page to an experiment tracker.

    Rank 0 sends them, from a thread: a tracker that fails or stalls loses them, and the training goes on. The run has
    the name of the run folder; a resumed training is a further run of this name. Servers and keys are those of the
    tracker's own environment variables (WANDB_API_KEY, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...). Where there is no
    server, no key or no network, a line says so, and the run stays on this machine: in wandb/ (`wandb sync` sends it)
    or in mlflow.db. TensorBoard gets tensorboard/PROJECT/RUN in the current folder, with the files as text; a line
    names it. trackio is used as it documents itself, and has not been tried. Addresses are sent without passwords, and
    a recipe.toml with one is not sent.

    Args:
        to: the tracker; `pip install '.[wandb]'`, `[mlflow]` or `[trackio]` adds its package; TensorBoard needs none.
        project: the project; of MLflow the experiment.
        offline: use no network, even where there is one; refused where the environment gives trackio a server.

    Saves: searching for runs on several machines.
    Costs: microseconds for each line of metrics, on rank 0; at the end the training waits for at most a
        hundredth of its time or fifteen seconds, whichever is longer, and as long again to end the run.
    """

    to: Literal["wandb", "trackio", "mlflow", "tensorboard"]
    project: str = "kasoku"
    offline: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.to in ("tensorboard", "trackio") and (self.project == ".." or Path(self.project).name != self.project):
            raise InputError(f"project={self.project}: names a folder of {self.to}, so it has no / and is not ..")

    def apply(self, job: Job) -> None:
        """Adds a `Tracker` to `job.trackers`, on all ranks. Raises InputError if the package is not installed."""
        if find_spec(self.to) is None:
            raise InputError(f"Track: {self.to} is not installed: pip install 'kasoku[{self.to}]'")
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            if self.offline and self.to == "trackio" and os.environ.get(name):
                raise InputError(f"Track: offline, but trackio sends to {name}: unset it")
        tracker = Tracker(self, active=job.comm.rank == 0)
        job.patch(job, "trackers", (*job.trackers, tracker))
        job.on_close(tracker.close)


class Tracker:
    """The run of a tracker, which a thread opens and fills; its methods return at once. Only rank 0's is `active`."""

    def __init__(self, track: Track, *, active: bool = True) -> None:
        self.track, self.active = track, active
        self._calls: queue.Queue[Callable[[Any], object] | None] = queue.Queue(_MOST_CALLS)
        self._made = self._done = 0  # calls of the training, and those that succeeded
        self._ended = self._warned = False
        self._reason = ""  # why the first one failed
        self._thread: threading.Thread | None = None

    def open(self, folder: Path, settings: Mapping[str, object]) -> None:
        """Begins a run named after the run folder; `settings`: the recipe, flat."""
        if self.active:
            self._folder = folder
            plain = {name: without_password(v) if isinstance(v, str) else v for name, v in settings.items()}
            connect = partial(_BACKENDS[self.track.to], self.track, folder.name, plain)
            self._thread = threading.Thread(target=self._work, args=(connect,), name="kasoku-track", daemon=True)
            self._made = 1  # the thread connects
            self._until_s = math.inf  # calls that wait for longer are left out
            self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records values of a step."""
        self._call(lambda run: run.metrics(step, values))

    def close(self, wait_s: float = 15.0, page: Callable[[], object] | None = None, outcome: str = "finished") -> None:
        """Sends the files of the run folder and ends the run; says what was lost.

        Waits for at most `wait_s`, then as long again for the end of the run, without the calls that still wait.
        `page`: writes report.html; it is called in the thread. `outcome`: finished, stopped or failed.
        """
        if (thread := self._thread) is None:
            return
        self._outcome, self._until_s = outcome, time.monotonic() + wait_s
        if page:
            self._call(lambda run: page(), wait_s)
        self._call(None, max(0.0, self._until_s - time.monotonic()))
        self._thread = None
        thread.join(max(0.0, self._until_s + wait_s - time.monotonic()))
        if lost := self._made - self._done:
            reason = self._reason or "it did not answer in time"
            still = "" if self._ended else "; its run was not ended and may be shown as running"
            say(f"Track: {self.track.to} lost {lost} of {self._made} calls: {reason}{still}")

    def _call(self, call: Callable[[Any], object] | None, wait_s: float = 0.0) -> None:
        """Has the thread make a call, the last one if it is None; it is lost if the queue stays full for so long."""
        if self._thread:
            self._made += 1
            if self._thread.is_alive():
                with suppress(queue.Full):
                    self._calls.put(call, timeout=wait_s)
        elif call and self.active and not (self._made or self._warned):
            self._warned = True
            say("Track: metrics before tracker.open(folder, settings) are lost")

    def _work(self, connect: Callable[[], Any]) -> None:
        try:
            run = connect()
        except Exception as error:  # whatever a library raises; not tried again, since that would cost time
            self._reason = summary(error)
            return
        self._done = 1
        in_time = takewhile(lambda call: time.monotonic() < self._until_s, iter(self._calls.get, None))
        for call in chain(in_time, [self._end]):
            try:
                call(run)
                self._done += 1
            except Exception as error:
                self._reason = self._reason or summary(error)

    def _end(self, run: Any) -> None:
        files = [file for name in _FILES if (file := self._folder / name).is_file()]
        if files and files[0].suffix == ".toml" and without_password(text := files[0].read_text()) != text:
            del files[0]
        run.end(files, self._outcome)
        self._ended = True


class _Wandb:
    """A run of W&B or of trackio, which has the same functions."""

    def __init__(self, track: Track, name: str, settings: Mapping[str, object]) -> None:
        library, more = import_module(track.to), {}
        self.is_wandb = track.to == "wandb"
        if self.is_wandb:
            server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
            chosen = os.environ.get("WANDB_MODE") in ("disabled", "offline")
            online = chosen or _answers(server, track, key=bool(library.api.api_key))
            more = {"mode": None if online else "offline", "settings": library.Settings(silent=True, console="off")}
        self.run = library.init(project=track.project, name=name, config=dict(settings), **more)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def end(self, files: Sequence[Path], outcome: str) -> None:
        for file in files:
            self.run.log_artifact(str(file), type="run")
        self.run.finish(**({"exit_code": int(outcome != "finished")} if self.is_wandb else {}))


class _Mlflow:
    def __init__(self, track: Track, name: str, settings: Mapping[str, object]) -> None:
        library, self.entities = import_module("mlflow"), import_module("mlflow.entities")
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        away = server.startswith("http") and not _answers(server, track)
        local = away or (track.offline and not server.startswith(("sqlite:", "file:")))
        self.client = library.MlflowClient("sqlite:///mlflow.db" if local else None)
        if track.offline or not server:
            say(f"Track: the run stays on this machine, in {'mlflow.db' if local else library.get_tracking_uri()}")
        known = self.client.get_experiment_by_name(track.project)
        experiment = known.experiment_id if known else self.client.create_experiment(track.project)
        self.id = self.client.create_run(experiment, run_name=name).info.run_id
        params = [self.entities.Param(key, str(value)[:5000]) for key, value in settings.items()]
        for first in range(0, len(params), 100):  # MLflow takes 100 at once, of 6,000 letters
            self.client.log_batch(self.id, params=params[first : first + 100])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        metrics = [self.entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def end(self, files: Sequence[Path], outcome: str) -> None:
        self.client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(outcome, "FAILED"))
        for file in files:
            self.client.log_artifact(self.id, str(file))


class _TensorBoard:
    def __init__(self, track: Track, name: str, settings: Mapping[str, object]) -> None:
        library = import_module("torch.utils.tensorboard")
        self.writer = library.SummaryWriter(str(folder := Path("tensorboard", track.project, name).resolve()))
        say(f"Track: tensorboard shows {folder}")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def end(self, files: Sequence[Path], outcome: str) -> None:
        for file in files:
            whole = file.resolve() if file.suffix == ".html" else file.read_text()
            self.writer.add_text(file.name, f"```\n{whole}\n```")
        self.writer.close()


_BACKENDS = {"wandb": _Wandb, "trackio": _Wandb, "mlflow": _Mlflow, "tensorboard": _TensorBoard}


def _answers(server: str, track: Track, *, key: bool = True) -> bool:
    """Whether a server is to be used, and can be reached, if by a proxy; says so where a run stays on this machine."""
    at = urlsplit(server)
    host, port = at.hostname or "", at.port or (80 if at.scheme == "http" else 443)
    if track.offline:
        return False
    reason = "there is no key for it"
    if key:
        try:
            if at.scheme not in getproxies() or proxy_bypass(host):  # else the library asks the proxy
                socket.create_connection((host, port), _CONNECT_S).close()
            return True
        except OSError as error:
            reason = summary(error)
    say(f"Track: the run stays on this machine, and is not sent to {host}: {reason}")
    return False
