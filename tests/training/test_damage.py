"""Damaged, changed and missing files of a run: the right result, or one line; never another result without a word."""

import errno
import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from helpers.started import KASOKU, clean
from kasoku.cli import main
from kasoku.core import InputError, Solo
from kasoku.core.files import check_regular, checked_file, write_atomically
from kasoku.models import read
from kasoku.training import trained_run
from kasoku.training.checkpoint import save
from kasoku.training.run_folder import RunFolder, shares_in

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "recipes" / "digits_cnn_98.toml")


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(digits_run, tmp_path / "run")
    return tmp_path / "run"


def changed(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["recipe.toml", "data.json", "best.safetensors"])
def test_one_bit_of_a_file_that_decides_is_named(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(run / name, (run / name).stat().st_size // 2)
    assert main(["eval", str(run)]) == 2
    assert f"{run / name}: its bytes, or those of manifest.json, have changed" in capsys.readouterr().err
    (run / name).unlink()
    assert main(["eval", str(run)]) == 2
    wanted = f"{run}: no run there" if name == "recipe.toml" else f"{run / name}: cannot be read (No such file"
    assert wanted in capsys.readouterr().err


def test_one_bit_of_the_recipe_does_not_resume(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("epochs = 4", "epochs = 5", 1))
    assert main(["train", "--resume", str(run), "--quiet"]) == 2
    assert "have changed since the training wrote them" in capsys.readouterr().err
    (run / "recipe.toml").write_text(text)
    assert main(["train", "--resume", str(run), "--set", "epochs=5", "--quiet"]) == 0  # kasoku itself may change it
    assert main(["train", "--resume", str(run), "--quiet"]) == 0


@pytest.mark.parametrize("manifest", [b"{", b"[]", b"3", b"\xff"])
def test_a_damaged_manifest_is_one_line(manifest: bytes, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "manifest.json").write_bytes(manifest)
    for command in (["eval", str(run)], ["train", "--resume", str(run)]):
        assert main(command) == 2
        assert "manifest.json: damaged" in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_a_kill_between_manifest_and_file_harms_neither(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(part: Path, path: Path) -> None:
        if path.name == "recipe.toml":
            raise KeyboardInterrupt
        part.rename(path)

    if not first:
        with closing(RunFolder(tmp_path)) as run:
            run.write("recipe.toml", "batch = 1\n")
            run.write("recipe.toml", "batch = 2\n")
    monkeypatch.setattr(os, "replace", replace)
    for text in ("killed", "killed again"):
        with closing(RunFolder(tmp_path, resume=not first)) as run, pytest.raises(KeyboardInterrupt):
            run.write("recipe.toml", text)
    path = checked_file(tmp_path, "recipe.toml")
    assert path.exists() != first
    assert first or path.read_text() == "batch = 2\n"


def test_a_file_that_was_written_once_and_is_gone_is_missed(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path)) as run:
        run.write("recipe.toml", "batch = 1\n")
        run.write("shares.json", "[60, 4]")
    (tmp_path / "shares.json").unlink()
    with pytest.raises(InputError, match=r"shares\.json: cannot be read \(No such file"):
        shares_in(tmp_path, Solo(), 64)


def test_a_run_folder_may_change_while_it_is_looked_at(tmp_path: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            (tmp_path / ".x.part").mkdir()
            (tmp_path / ".x.part").rmdir()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(300):
            check_regular(tmp_path)
    finally:
        stop.set()
        thread.join()


def test_weights_of_a_run_are_compared_where_a_training_starts_from_them(run: Path) -> None:
    assert read(run / "best.safetensors")
    changed(run / "best.safetensors", -9)
    with pytest.raises(InputError, match="have changed since the training wrote them"):
        read(run / "best.safetensors")


def test_a_changed_share_of_ranks_is_named(run: Path) -> None:
    held = RunFolder(run, resume=True)
    held.write("shares.json", "[60, 4]")
    held.close()
    assert shares_in(run, Solo(), 64) == ()  # of two ranks
    changed(run / "shares.json", 1)
    with pytest.raises(InputError, match="have changed since the training wrote them"):
        shares_in(run, Solo(), 64)


ALL = [["eval"], ["train", "--quiet", "--resume"], ["report"]]


@pytest.mark.parametrize("words", ALL, ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["data.json", "metrics.jsonl", ".report.html.part", "checkpoints/x", "lock"])
def test_links_and_pipes_in_a_run_folder_are_refused(
    words: list[str], name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    for make in (lambda at: at.symlink_to(victim), os.mkfifo):
        (run / name).unlink(missing_ok=True)
        make(run / name)
        assert main([*words, str(run)]) == 2
        assert (
            capsys.readouterr().err == f"kasoku: {run / name}: a link, pipe or device: remove it, or put a copy there\n"
        )
    assert victim.read_text() == "as it was"


def test_a_part_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / ".page.html.part").symlink_to(tmp_path / "victim")
    write_atomically(tmp_path / "page.html", lambda part: part.write_text("page"))
    assert (tmp_path / "victim").read_text() == "as it was"
    assert (tmp_path / "page.html").read_text() == "page"


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.json", DEEP),
        ("manifest.json", DEEP),
        ("recipe.toml", f"a={DEEP}"),
        ("recipe.toml", f"batch.{'a.' * 1500}a = 1"),
        *[
            ("data.json", text)
            for text in ('{"channels": 1e999}', '{"image_size": []}', '{"std": [0]}', f'{{"mean": [{10**400}]}}', "[]")
        ],
    ],
)
def test_small_files_of_odd_content_are_one_line(
    name: str, text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "manifest.json").unlink()
    if name == "data.json" and text.startswith("{"):
        text = json.dumps(json.loads((run / name).read_text()) | json.loads(text))
    (run / name).write_text(text)
    for command in (
        ["eval", str(run)],
        ["predict", str(run), str(ROOT)],
        ["export", str(run), "--format", "safetensors"],
    ):
        assert main(command) == 2
        assert capsys.readouterr().err.count("\n") == 1


LARGE = "1" + "0" * 400
RECORDS = [
    ("environment.json", '{"machine": 3, "command": 5}', ""),
    ("environment.json", '{"machine": {"gpus": 3}}', ""),
    ("result.json", DEEP, "result.json: damaged"),
    ("metrics.jsonl", DEEP, ""),
    ("metrics.jsonl", f'{{"step": {LARGE}, "epoch": 1, "seconds": 1}}', ""),
]


@pytest.mark.parametrize(("name", "text", "note"), RECORDS, ids=[str(i) for i in range(len(RECORDS))])
def test_a_report_needs_no_record(name: str, text: str, note: str, run: Path) -> None:
    (run / name).write_text(text)
    (run / "member-x").mkdir()
    shutil.copy(run / "recipe.toml", run / "member-x")
    assert main(["report", str(run)]) == 0
    assert note in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b'{"step": Infinity}\n', b"\x00" * 100, b"[" * 100_000, b'{"step": [1]}\n{"st']
)
def test_what_is_only_a_record_stops_no_resume(bad: bytes, run: Path) -> None:
    for name in ("metrics.jsonl", "mlperf.log", "environment.json", "ledger.json", "result.json", "timeline.json"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) // 2] + bad + data[len(data) // 2 :])
    assert main(["train", "--resume", str(run), "--quiet"]) == 0


@pytest.mark.parametrize("content", [{}, {"job": {}}, {"job": 3}, [1, 2], {"job": {"kept": {}}, "progress": {}}])
def test_a_state_of_other_content_is_one_line(content: object, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    save(run, 1, trained_run.load(run).job.model, content)  # type: ignore[arg-type]
    assert main(["train", "--resume", str(run), "--set", "epochs=6", "--quiet"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_model_that_is_no_module_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.py").write_text("def nothing(**shape):\n    return 3\n")
    recipe = tmp_path / "given.toml"
    recipe.write_text(Path(DIGITS).read_text().replace("kasoku.models.cifarnet", "given.nothing"))
    for command in (["train", str(recipe), "--dry-run"], ["train", str(recipe), "--out", str(tmp_path / "run")]):
        assert main(command) == 2
        assert "model.use: a Module is wanted, this gives a int" in capsys.readouterr().err


@pytest.mark.parametrize("width", [2**40, 2**63 - 1])
def test_a_model_too_large_for_any_memory_is_one_line(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DIGITS, "--dry-run", "--set", f"model.widths.0={width}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kasoku: model: does not fit into memory (")
    assert error.count("\n") == 1


def test_a_message_that_repeats_what_was_given_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", DIGITS, "--dry-run", "--set", "data.use=a\nb\x1b[2J" + "x" * 9000]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert len(error) < 1300


def test_a_dry_run_takes_no_time_for_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    assert main(["train", DIGITS, "--dry-run", "--set", "epochs=100000", "--set", "batch=1"]) == 0
    assert time.process_time() - begin < 10
    assert main(["train", DIGITS, "--dry-run", "--set", "epochs=1e12"]) == 2
    assert "at most 100,000" in capsys.readouterr().err


def test_a_run_folder_that_is_deleted_ends_the_training_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from kasoku.training import checkpoint

    def gone(path: Path, *args: object, **settings: object) -> None:
        shutil.rmtree(path)
        return real(path, *args, **settings)

    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", gone)
    out = str(tmp_path / "run")
    settings = ["--set", "epochs=1", "--set", "schedule.epochs=1", "--set", "save.every_steps=5"]
    assert main(["train", DIGITS, *settings, "--quiet", "--out", out]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "its folder is gone" in lines[0]


def test_a_run_without_a_manifest_is_of_an_older_version_and_is_read(run: Path) -> None:
    (run / "manifest.json").unlink()
    assert main(["eval", str(run)]) == 0


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(part: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 48704 vs 48656")

    with pytest.raises(InputError, match=r"state\.pt: cannot be written \(\[enforce fail.*\): mend that and go on"):
        write_atomically(tmp_path / "state.pt", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 0))
    with pytest.raises(InputError, match=r"state\.pt: cannot be written \(no space left on the disk\): mend that"):
        write_atomically(tmp_path / "state.pt", write)


def test_a_folder_that_cannot_be_written_is_told_without_hidden_names(tmp_path: Path) -> None:
    def write(part: Path) -> None:
        raise PermissionError(errno.EROFS, f"Read-only file system: {part}", str(part))

    with pytest.raises(InputError) as told:
        write_atomically(tmp_path / "export.onnx", write)
    assert ".part" not in str(told.value)
    assert str(told.value).endswith("choose a folder that can be written")


@pytest.mark.process
def test_a_module_beside_that_is_named_like_one_of_pythons_is_not_taken_for_it(tmp_path: Path) -> None:
    for name in ("random", "dill", "tensorflow"):  # dill, and some others, are imported where they are installed
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the right one')\n")
    words = ["--nodes", "1", "--gpus-per-node", "2", "--set", "device.kind=cpu", "--set", "epochs=1", "--quiet"]
    for command in ([*KASOKU, "list"], [*KASOKU, "launch", "local", DIGITS, *words, "--out", "run"]):
        subprocess.run(command, cwd=tmp_path, env=clean(), timeout=100, check=True, capture_output=True)


def test_the_members_of_an_ensemble_are_no_links(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "member-1").symlink_to(run)
    for command in (["eval"], ["train", "--quiet", "--resume"], ["report"]):
        assert main([*command, str(tmp_path / "ensemble")]) == 2
        assert "member-1: a link, pipe or device" in capsys.readouterr().err
    assert not (run / "report.html").exists()
