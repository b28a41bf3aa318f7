"""The run folder: what is there was whole when it was written, and damage is found."""

import errno
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from contracts import Net
from kasoku.core import InputError
from kasoku.core.files import load_weights
from kasoku.training import checkpoint
from kasoku.training.run_folder import RunFolder, load_recipe


@pytest.fixture
def run(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    folder.write("recipe.toml", "batch = 1\n")
    yield folder
    folder.close()


def newest(run: RunFolder):
    warnings: list[str] = []
    return checkpoint.newest(run.path, warn=warnings.append, clean=True), warnings


def test_a_checkpoint_comes_back_and_old_ones_go(run: RunFolder):
    for step in (3, 5, 12):
        checkpoint.save(run.path, step, Net(seed=step), {"steps": step, "x": torch.arange(3)})
    found, warnings = newest(run)
    assert warnings == []
    assert [p.name for p in sorted((run.path / "checkpoints").iterdir())] == ["step-000000005", "step-000000012"]
    model = Net(seed=1)
    load_weights(model, found / "model.safetensors")
    state = torch.load(found / "state.pt", weights_only=True)
    assert (found.name, state["steps"], state["x"].tolist()) == ("step-000000012", 12, [0, 1, 2])
    assert torch.equal(model.head.weight, Net(seed=12).head.weight)


def test_a_channels_last_model_is_saved(run: RunFolder):
    model = Net().to(memory_format=torch.channels_last)
    checkpoint.save(run.path, 1, model, {})
    back = Net(seed=4)
    load_weights(back, newest(run)[0] / "model.safetensors")
    assert torch.equal(back.stage[0].conv.weight, model.stage[0].conv.weight)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "sums.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "nested", "gone"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(run: RunFolder, name: str, damage: str):
    for step in (1, 2):
        checkpoint.save(run.path, step, Net(), {"steps": step})
    file = run.path / "checkpoints" / "step-000000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        damaged = {"flipped": content, "truncated": content[: len(content) // 2], "nested": b"[" * 100_000}
        file.write_bytes(damaged[damage])
    found, warnings = newest(run)
    assert found.name == "step-000000001"
    assert len(warnings) == 1
    assert "step-000000002 is damaged" in warnings[0]
    checkpoint.save(run.path, 2, Net(), {"steps": 2})  # and is written anew
    assert newest(run)[0].name == "step-000000002"


def test_a_kill_in_the_middle_of_writing_leaves_no_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    checkpoint.save(run.path, 1, Net(), {})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(run.path, 2, Net(), {})
    found, warnings = newest(run)
    assert found.name == "step-000000001"
    assert len(warnings) == 1
    assert "half written" in warnings[0]


def test_a_full_disk_is_one_line_and_what_was_there_stays(run: RunFolder):
    checkpoint.save(run.path, 1, Net(), {"steps": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # no file may grow beyond 1 KiB
    try:
        with pytest.raises(InputError, match="cannot be written") as error:
            checkpoint.save(run.path, 2, Net(), {"steps": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert "\n" not in str(error.value)
    assert "what was written before is whole" in str(error.value)
    assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-000000001"]
    assert newest(run)[0].name == "step-000000001"


def test_a_small_file_is_whole_or_not_at_all(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    run.write("result.json", "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        run.write("result.json", "new")
    assert (run.path / "result.json").read_text() == "old"
    assert not list(run.path.glob(".*"))


def test_a_folder_in_use_is_refused_and_free_again_after_close(run: RunFolder):
    with pytest.raises(InputError, match=r"in use by a running training \(process \d+\): wait for it, or give --out"):
        RunFolder(run.path, resume=True)
    run.close()
    RunFolder(run.path, resume=True).close()


def test_a_folder_that_holds_a_run_is_not_overwritten(run: RunFolder, tmp_path: Path):
    run.close()
    with pytest.raises(InputError, match="holds a run already: go on with --resume"):
        RunFolder(run.path)
    with pytest.raises(InputError, match="no run there"):
        load_recipe(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write there"):
        RunFolder(tmp_path / "file" / "run")


def test_weights_of_another_model_are_refused(tmp_path: Path):
    save_model(torch.nn.Linear(2, 2), str(tmp_path / "w.safetensors"))
    with pytest.raises(InputError, match="weights of another model, not of ToyNet"):
        load_weights(Net(), tmp_path / "w.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no such thing")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_weights(Net(), tmp_path / "bad.safetensors")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_weights(Net(), tmp_path / "missing.safetensors")
