"""Track: a tracker gets what a training writes, and one that fails, stalls or fills up never holds it up."""

import json
import signal
import socket
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from torch import nn

from contracts import assert_same
from kasoku.cli import main
from kasoku.core import InputError, Job, Threads
from kasoku.optim import sgd
from kasoku.tracking import Track, Tracker, track
from kasoku.training.control import Request

FOREVER_S = 60.0  # that a test waits for a thread before it fails


class Fake:
    """A tracker that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.in_call = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, technique: Track, name: str, settings) -> "Fake":
        self.calls.append(("open", technique.project, name, dict(settings)))
        return self

    def metrics(self, step: int, values) -> None:
        self.in_call.set()
        assert self.go_on.wait(FOREVER_S)
        self.calls.append(("metrics", step, dict(values)))

    def end(self, files, outcome: str) -> None:
        self.outcome = outcome
        self.calls.append(("end", [file.name for file in files]))


@pytest.fixture
def fake(monkeypatch):
    """A fake in the place of TensorBoard; its threads end with the test."""
    tracker = Fake()
    monkeypatch.setitem(track._BACKENDS, "tensorboard", tracker)
    yield tracker
    tracker.go_on.set()


def opened(folder: Path, **settings: object) -> Tracker:
    tracker = Tracker(Track("tensorboard"))
    tracker.open(folder, settings)
    return tracker


def test_calls_arrive_in_order_and_the_files_come_last(fake, tmp_path, capsys):
    (tmp_path / "ledger.json").write_text("{}")
    tracker = opened(tmp_path, lr=0.1)
    for step in range(3):
        tracker.metrics(step, {"loss": step / 2})
    tracker.close(FOREVER_S, lambda: (tmp_path / "report.html").write_text("page"))
    assert fake.calls == [
        ("open", "kasoku", tmp_path.name, {"lr": 0.1}),
        *(("metrics", step, {"loss": step / 2}) for step in range(3)),
        ("end", ["ledger.json", "report.html"]),
    ]
    tracker.close()
    tracker.metrics(4, {})  # after the end nothing is sent
    assert len(fake.calls) == 5
    assert capsys.readouterr().err == ""


def test_a_tracker_that_hangs_holds_nobody_up(fake, tmp_path, capsys):
    fake.go_on.clear()
    tracker = opened(tmp_path)
    tracker.metrics(0, {"loss": 1.0})
    assert fake.in_call.wait(FOREVER_S)
    for step in range(1, 3000):  # more than the queue holds
        tracker.metrics(step, {"loss": 1.0})
    tracker.close(0.0)
    assert len(fake.calls) == 1
    line = "kasoku: Track: tensorboard lost 3001 of 3002 calls: it did not answer in time"
    assert capsys.readouterr().err == f"{line}; its run was not ended and may be shown as running\n"


def test_the_end_of_a_run_has_time_of_its_own(fake, tmp_path, capsys):
    fake.go_on.clear()
    tracker = opened(tmp_path)
    for step in range(3):
        tracker.metrics(step, {"loss": 1.0})
    assert fake.in_call.wait(FOREVER_S)

    def after_the_wait() -> None:
        while time.monotonic() < tracker._until_s:
            time.sleep(0.01)
        fake.go_on.set()

    threading.Thread(target=after_the_wait).start()
    tracker.close(1.0, lambda: None)
    assert [call[0] for call in fake.calls] == ["open", "metrics", "end"]
    assert capsys.readouterr().err == "kasoku: Track: tensorboard lost 3 of 6 calls: it did not answer in time\n"


def test_a_tracker_that_hangs_while_it_connects_holds_nobody_up(fake, tmp_path, monkeypatch, capsys):
    go_on = threading.Event()
    monkeypatch.setitem(track._BACKENDS, "tensorboard", lambda *_: go_on.wait(FOREVER_S))
    tracker = opened(tmp_path)
    tracker.metrics(0, {"loss": 1.0})
    tracker.close(0.0)
    go_on.set()
    assert "lost 3 of 3 calls: it did not answer in time" in capsys.readouterr().err


def test_a_call_that_raises_is_lost_alone_and_the_first_reason_said(fake, tmp_path, monkeypatch, capsys):
    def metrics(step: int, values) -> None:
        if step % 2:
            raise ConnectionError(f"step {step}:\n no route")
        fake.calls.append(("metrics", step))

    monkeypatch.setattr(fake, "metrics", metrics)
    tracker = opened(tmp_path)
    for step in range(6):
        tracker.metrics(step, {})
    tracker.close(FOREVER_S)
    assert [call[1] for call in fake.calls if call[0] == "metrics"] == [0, 2, 4]
    assert fake.calls[-1] == ("end", [])
    assert capsys.readouterr().err == "kasoku: Track: tensorboard lost 3 of 8 calls: step 1: no route\n"


def test_a_tracker_that_cannot_connect_is_tried_once(tmp_path, monkeypatch, capsys):
    tries = []

    def connect(*_):
        tries.append(1)
        raise PermissionError("wrong key")

    monkeypatch.setitem(track._BACKENDS, "tensorboard", connect)
    tracker = opened(tmp_path)
    tracker._thread.join(FOREVER_S)
    for step in range(3000):
        tracker.metrics(step, {})
    tracker.close(FOREVER_S)
    assert len(tries) == 1
    assert "lost 3002 of 3002 calls: wrong key" in capsys.readouterr().err


def test_what_a_full_queue_has_no_room_for_is_lost_and_counted(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(track, "_MOST_CALLS", 10)
    fake.go_on.clear()
    tracker = opened(tmp_path)
    tracker.metrics(0, {})
    assert fake.in_call.wait(FOREVER_S)  # the thread has taken it, so the queue is empty
    for step in range(1, 30):
        tracker.metrics(step, {})
    fake.go_on.set()
    tracker.close(FOREVER_S)
    assert [call[1] for call in fake.calls if call[0] == "metrics"] == [*range(11)]
    assert fake.calls[-1] == ("end", [])
    assert "lost 19 of 32 calls: it did not answer in time" in capsys.readouterr().err


def test_a_page_that_cannot_be_made_costs_the_page_alone(fake, tmp_path, capsys):
    def page():
        raise InputError('the page needs plotly: pip install "plotly>=6"')

    tracker = opened(tmp_path)
    tracker.close(FOREVER_S, page)
    assert fake.calls[-1] == ("end", [])
    assert "lost 1 of 3 calls: the page needs plotly" in capsys.readouterr().err


def test_only_rank_0_opens_a_tracker_and_close_removes_it(fake, tmp_path):
    def rank(comm):
        job = Job(nn.Linear(2, 2), sgd, loader=[], comm=comm).apply(Track("tensorboard"))
        (tracker,) = job.trackers
        tracker.open(tmp_path / str(comm.rank), {})
        tracker.metrics(1, {"loss": 1.0})
        job.close()
        return job.trackers

    assert Threads(2).run(rank) == [(), ()]
    assert [call[:3] for call in fake.calls] == [
        ("open", "kasoku", "0"),
        ("metrics", 1, {"loss": 1.0}),
        ("end", []),
    ]


def test_what_cannot_be_tracked_is_refused(monkeypatch):
    with pytest.raises(InputError, match='to="comet": "wandb", "trackio", "mlflow" or "tensorboard"'):
        Track("comet")
    monkeypatch.setattr(track, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"Track: wandb is not installed: pip install 'kasoku\[wandb\]'"):
        Job(nn.Linear(2, 2), sgd).apply(Track("wandb"))


@pytest.mark.parametrize("project", ["..", "../..", "/home/u/x", "a/b"])
def test_a_project_that_names_a_folder_stays_in_it(project):
    for to in ("tensorboard", "trackio"):
        with pytest.raises(InputError, match=f"project={project}: names a folder of {to}"):
            Track(to, project)
    assert Track("mlflow", project).project == project  # Databricks has /Users/NAME/EXPERIMENT


def test_passwords_in_addresses_are_not_sent(fake, tmp_path):
    for name, text in (("recipe.toml", 'root = "s3://me:secret@there/x"'), ("ledger.json", "{}")):
        (tmp_path / name).write_text(text)
    tracker = opened(tmp_path, **{"data.root": "s3://me:secret@there/x", "batch": 8})
    tracker.close(FOREVER_S)
    settings = {"data.root": "s3://there/x", "batch": 8}
    assert fake.calls == [("open", "kasoku", tmp_path.name, settings), ("end", ["ledger.json"])]


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the package of any tracker; a connection is an error."""
    stand_in = MagicMock()
    monkeypatch.setattr(track, "import_module", lambda name: stand_in)
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("a connection"))
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    return stand_in


@pytest.mark.parametrize(
    ("outcome", "code", "status"), [("finished", 0, "FINISHED"), ("stopped", 1, "KILLED"), ("failed", 1, "FAILED")]
)
def test_the_run_ends_as_the_training_did(outcome, code, status, library):
    track._Wandb(Track("wandb", offline=True), "run", {}).end([], outcome)
    library.init.return_value.finish.assert_called_once_with(exit_code=code)
    client = track._Mlflow(Track("mlflow", offline=True), "run", {})
    client.end([], outcome)
    library.MlflowClient.return_value.set_terminated.assert_called_once_with(client.id, status)
    track._Wandb(Track("trackio"), "run", {}).end([], outcome)
    library.init.return_value.finish.assert_called_with()  # it documents no exit code


@pytest.mark.parametrize("server", ["", "http://127.0.0.1:9", "databricks", "postgresql://there/runs"])
def test_mlflow_offline_keeps_to_a_store_on_this_machine(server, library, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    track._Mlflow(Track("mlflow", offline=True), "run", {})
    library.MlflowClient.assert_called_once_with("sqlite:///mlflow.db")
    assert capsys.readouterr().err == "kasoku: Track: the run stays on this machine, in mlflow.db\n"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mine.db")
    track._Mlflow(Track("mlflow", offline=True), "run", {})
    library.MlflowClient.assert_called_with(None)  # which is the variable's


def test_mlflow_without_a_server_says_where_the_run_is(library, capsys):
    library.get_tracking_uri.return_value = "sqlite:////there/mlflow.db"
    track._Mlflow(Track("mlflow"), "run", {})
    assert capsys.readouterr().err == "kasoku: Track: the run stays on this machine, in sqlite:////there/mlflow.db\n"


def test_wandb_offline_stays_so_whatever_key_there_is(library, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    track._Wandb(Track("wandb", offline=True), "run", {})
    assert library.init.call_args.kwargs["mode"] == "offline"


@pytest.mark.parametrize("name", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"])
def test_trackio_offline_with_a_server_is_refused(name, library, monkeypatch):
    monkeypatch.setattr(track, "find_spec", lambda name: True)
    monkeypatch.setenv(name, "me/mine")
    with pytest.raises(InputError, match=f"Track: offline, but trackio sends to {name}: unset it"):
        Job(nn.Linear(2, 2), sgd).apply(Track("trackio", offline=True))
    Job(nn.Linear(2, 2), sgd).apply(Track("trackio")).close()


def test_behind_a_proxy_the_library_finds_the_server(library, monkeypatch, capsys):
    monkeypatch.setattr(track, "getproxies", lambda: {"https": "http://127.0.0.1:9"})
    monkeypatch.setattr(track, "proxy_bypass", lambda host: host == "inside")
    assert track._answers("https://api.wandb.ai", Track("wandb"))
    monkeypatch.setattr(socket, "create_connection", MagicMock(side_effect=OSError("no route")))
    assert not track._answers("https://inside", Track("wandb"))
    assert not track._answers("http://me:secret@there:80", Track("mlflow"))
    assert not track._answers("https://there", Track("wandb"), key=False)
    stays = "kasoku: Track: the run stays on this machine, and is not sent to"
    reasons = ["inside: no route", "there: no route", "there: there is no key for it"]
    assert capsys.readouterr().err == "".join(f"{stays} {reason}\n" for reason in reasons)


def test_a_server_is_used_where_it_answers_and_never_offline(monkeypatch):
    monkeypatch.setattr(track, "getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert track._answers(url, Track("mlflow"))
        assert not track._answers(url, Track("mlflow", offline=True))
    assert not track._answers(url, Track("mlflow"))
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda address, *_: asked.append(address))
    assert not track._answers("https://api.wandb.ai", Track("wandb", offline=True))
    assert asked == []


# ---- in a training


def trained(where: Path, name: str, *techniques: dict[str, object], lr: float = 0.1, code: int = 0) -> Path:
    """The run folder of some 20 steps on the digits."""
    recipe, run = where / f"{name}.toml", where / name
    document = {
        "epochs": 20 * 64 / 1437,
        "batch": 64,
        "model": {"use": "kasoku.models.cifarnet", "widths": [8, 8]},
        "data": {"use": "kasoku.data.digits"},
        "optimizer": {"use": "kasoku.optim.sgd", "lr": lr},
        "device": {"threads": 1, "precision": "fp32"},
        "techniques": [{"use": "kasoku.tracking.Track", **each} for each in techniques],
    }
    recipe.write_text(tomli_w.dumps(document))
    assert main(["train", str(recipe), "--quiet", "--out", str(run)]) == code
    return run


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_training_sends_its_metrics_recipe_ledger_and_page(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("kasoku.training.metrics._LEAST_END_S", FOREVER_S)
    run = trained(tmp_path, "run", {"to": "tensorboard", "project": "mine"})
    (_, project, name, settings), *metrics, ledger, end = fake.calls
    assert (project, name) == ("mine", "run")
    assert (settings["optimizer.lr"], settings["techniques.0.to"]) == (0.1, "tensorboard")
    lines = logged(run)
    assert [step for _, step, _ in metrics] == [line["step"] for line in lines]
    for (_, _, values), line in zip(metrics, lines, strict=True):
        assert values.items() >= {k: v for k, v in line.items() if k not in ("step", "epoch", "time_s")}.items()
    assert any("test_top1" in values for _, _, values in metrics)
    rows = json.loads((run / "ledger.json").read_text())["rows"]
    steps = json.loads((run / "result.json").read_text())["steps"]
    assert ledger == ("metrics", steps, {f"ledger/{row}": s for row, s in rows.items()})
    assert end == ("end", ["recipe.toml", "result.json", "ledger.json", "report.html"])
    assert "<html" in (run / "report.html").read_text()
    assert fake.outcome == "finished"


def test_the_tracker_hears_of_a_training_that_diverged_or_was_stopped(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("kasoku.training.metrics._LEAST_END_S", FOREVER_S)
    trained(tmp_path, "diverged", {"to": "tensorboard"}, lr=1e30, code=3)
    assert fake.outcome == "failed"
    stop = Request(save=False, stop=signal.SIGTERM)
    monkeypatch.setattr("kasoku.training.trainer.Trainer.own_request", lambda _: stop)
    trained(tmp_path, "stopped", {"to": "tensorboard"}, code=75)
    assert fake.outcome == "stopped"


def test_a_training_with_a_tracker_that_hangs_ends_with_the_same_bits(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kasoku.training.metrics._LEAST_END_S", 0.0)
    fake.go_on.clear()
    with_it, without = trained(tmp_path, "with", {"to": "tensorboard"}), trained(tmp_path, "without")
    assert_same(*(load_file(run / "model.safetensors") for run in (with_it, without)))
    assert "kasoku: Track: tensorboard lost " in capsys.readouterr().err
    assert (with_it / "result.json").exists()


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_scalars_and_the_files_as_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kasoku.training.metrics._LEAST_END_S", FOREVER_S)
    run = trained(tmp_path, "run", {"to": "tensorboard"})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard" / "kasoku" / "run"))
    events.Reload()
    tags = events.Tags()
    assert {"loss", "lr", "test_top1", "ledger/forward"} <= set(tags["scalars"])
    losses = {line["step"]: line["loss"] for line in logged(run) if "loss" in line}
    assert {e.step: e.value for e in events.Scalars("loss")} == pytest.approx(losses)
    texts = {tag.partition("/")[0]: events.Tensors(tag)[0].tensor_proto.string_val[0] for tag in tags["tensors"]}
    assert set(texts) == {"recipe.toml", "result.json", "ledger.json", "report.html"}
    assert b"kasoku.models.cifarnet" in texts["recipe.toml"]
    said = capsys.readouterr().err
    assert f"kasoku: Track: tensorboard shows {tmp_path}/tensorboard/kasoku/run\n" in said
    assert "lost" not in said


# ---- with the real libraries, on this machine alone


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """The current folder is the test's, servers are those of no one, and the end may take its time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kasoku.training.metrics._LEAST_END_S", FOREVER_S)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "TRACKIO_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)


@pytest.mark.extras
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_a_run_for_later_where_there_is_no_key(alone, capsys):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'kasoku[wandb]'")
    trained(alone, "run", {"to": "wandb"})
    assert "lost" not in capsys.readouterr().err
    (file,) = (alone / "wandb").glob("offline-run-*/run-*.wandb")
    whole = file.read_bytes()
    for part in (b"loss", b"ledger/forward", b"optimizer.lr", b"report.html", b"recipe.toml"):
        assert part in whole, part


@pytest.mark.extras
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_a_run_in_its_local_store(alone, capsys):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install 'kasoku[mlflow]'")
    run = trained(alone, "run", {"to": "mlflow"})
    assert "lost" not in capsys.readouterr().err
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("kasoku").experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["optimizer.lr"] == "0.1"
    losses = {line["step"]: line["loss"] for line in logged(run) if "loss" in line}
    assert {m.step: m.value for m in client.get_metric_history(found.info.run_id, "loss")} == losses
    assert {"ledger/forward", "test_top1", "seconds"} <= found.data.metrics.keys()
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert names == {"recipe.toml", "result.json", "ledger.json", "report.html"}


@pytest.mark.extras
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_a_run_in_its_own_folder(alone, capsys):
    pytest.importorskip("trackio", reason="needs trackio, which wants pillow < 13: pip install 'kasoku[trackio]'")
    trained(alone, "run", {"to": "trackio"})
    assert "lost" not in capsys.readouterr().err
    assert [*(alone / "TRACKIO_DIR").rglob("*.db")]
