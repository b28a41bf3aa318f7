"""What a user can get wrong: each time one clear line, exit code 2, no traceback, and nothing is lost."""

import errno
import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kasoku.cli import main
from kasoku.core import files
from kasoku.training import checkpoint
from kasoku.training.run_folder import RunFolder

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"
ONE_EPOCH = ["--set", "epochs=1", "--set", "schedule.warmup=0", "--set", "device.threads=1", "--quiet"]


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs `kasoku train` and checks that it refuses in one line that matches."""

    def check(pattern: str, *arguments: str, recipe: str | None = None) -> None:
        path = tmp_path / "bad.toml"
        path.write_text(RECIPE.read_text() if recipe is None else recipe)
        given = [str(path)] if not {"--resume", "--data"} & set(arguments) else []
        out = ["--out", str(tmp_path / "run")] if not {"--resume", "--out"} & set(arguments) else []
        assert main(["train", *given, *arguments, *out]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kasoku: ")
        assert error.count("\n") == 1, error
        assert re.search(pattern, error), error
        assert not (tmp_path / "run" / "recipe.toml").exists()

    return check


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [
        ("epoch=3", r"epoch: no such key: did you mean epochs\?"),
        ("schedule.warmpu=3", r"schedule\.warmpu: no such key: did you mean warmup\?"),
        ("model.width=[8]", r"model\.width: no such key: did you mean widths\?"),
        ("model.use=kasoku.models.cifarnett", r'model\.use = "kasoku\.models\.cifarnett": no such name.*cifarnet\?'),
        ("model.use=nowhere.model", r"there is no module nowhere"),
        ("batch=true", r"batch = true: an integer is wanted, this is true or false"),
        ("batch=2.5", r"batch = 2\.5: an integer is wanted, this is a number"),
        ("epochs=lots", r'epochs = "lots": a number is wanted, this is a string'),
        ("model.widths=[8,true]", r"model\.widths\[1\] = true: an integer is wanted"),
        ("device.precision=fp8", r"precision.*fp8.*bf16"),
        ("epochs=-1", r"epochs=-1"),
        ("batch=0", r"batch=0: at least 1"),
        ("batch=100000", r"batch=100000: at most 1437"),
        ("accumulate=7", r"accumulate=7: a divisor of batch=64"),
        ("evaluate.target=98", r"target=98.*fraction"),
        ("schedule.warmup=100", r"Linear: epochs=20 .* must lie beyond warmup=100"),
        ("schedule={use='kasoku.core.Linear', warmup=20}", r"Linear: epochs=20.* must lie beyond warmup=20"),
        ("schedule=5", r"schedule = 5: a table is wanted"),
        ("techniques.3.translate=1", r"3 is no index"),
        ('techniques.0={use="kasoku.core.Cosine"}', r"techniques\[0\]\.use.*a Technique is wanted"),
        ("batch", r"--set batch: path=value is wanted"),
        ("loss.smoothing=2", r"loss: .*smoothing=2"),
        ("epochs=inf", r"epochs=inf"),
        ("seed=1180591620717411303424", r"seed=1180591620717411303424"),
        ("model.use=kasoku.data.folder", r"widths in \[model\] is of kasoku\.models\.cifarnet"),
        ("optimizer.use=kasoku.optim.EMA", r"lr, momentum, rest in \[optimizer\] are of kasoku\.optim\.muon"),
        ("evaluate.every=nan", r"every=nan"),
        ("evaluate.every=0", r"every=0(\.0)?: above 0 and below inf; epochs"),
        ("evaluate.batch=-1", r"batch=-1: at least 0"),
        ("save.every_s=-1", r"every_s=-1.*: at least 0"),
        ("save.every_steps=-1", r"every_steps=-1: at least 0"),
        ("save.keep=0", r"keep=0: at least 1; checkpoints"),
        ("norm_batch=5", r"norm_batch=5: a divisor of batch=64"),
        ("norm_batch=-4", r"norm_batch=-4: a divisor"),
        ("norm_average=-1", r"norm_average=-1"),
        ("scaling=cubic", r'scaling = "cubic".*linear'),
        ("last_batch=keep", r'last_batch = "keep".*drop'),
        ("evaluate.stale=true", r"evaluate\.stale = true.*Recalibrate"),
        ("schedule={use='kasoku.core.Constant', warmup=30}", r"schedule\.warmup: 30 epochs, longer than the training"),
        ("optimizer={use='kasoku.optim.lars', weight_decay=-1}", r"weight_decay=-1"),
        ("optimizer={use='kasoku.optim.lars', trust={eta=-1}}", r"eta=-1"),
    ],
)
def test_a_wrong_setting_is_named_by_its_path(refused, setting, pattern):
    refused(pattern, "--set", setting)


def test_more_virtual_ranks_than_images(refused):
    refused(r"batch=2000: at most 1437 images", "--set", "batch=2000", "--set", "norm_batch=1")


def test_a_recipe_that_is_missing_or_not_toml(refused, tmp_path, capsys):
    refused("not TOML", recipe="epochs = [")
    assert main(["train", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_missing_table_is_named(refused):
    refused(r"model: missing", recipe=re.sub(r"\[model\]\n.*\n.*\n", "", RECIPE.read_text()))


def test_conflicting_techniques_are_refused_in_one_sentence(refused):
    twice = RECIPE.read_text() + '\n[[techniques]]\nuse = "kasoku.data.Augment"\ntranslate = 2\n'
    refused("Augment is given twice", recipe=twice)


def idx_files(folder: Path, labels: list[int]) -> None:
    """A tiny set in the IDX format."""
    images = np.zeros((len(labels), 28, 28), np.uint8)
    for part in ("train", "t10k"):
        head = struct.pack(">IIII", 2051, *images.shape)
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as stream:
            stream.write(head + images.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as stream:
            stream.write(struct.pack(">II", 2049, len(labels)) + bytes(labels))


def idx_recipe(root: Path) -> str:
    table = f'[data]\nuse = "kasoku.data.fashion_mnist"\nroot = "{root}"\n'
    return re.sub(r"\[data\]\nuse = .*\n", table, RECIPE.read_text())


def test_a_missing_data_file(refused, tmp_path):
    refused(r"train-images-idx3-ubyte", recipe=idx_recipe(tmp_path))


def test_a_truncated_data_file(refused, tmp_path):
    idx_files(tmp_path, [0] * 100)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-30])
    refused(r"train-images-idx3-ubyte.*", recipe=idx_recipe(tmp_path))


def test_a_label_out_of_range(refused, tmp_path):
    idx_files(tmp_path, [0] * 99 + [10])
    refused(r"label.* 10\b|10.*label", recipe=idx_recipe(tmp_path))


def photo_folder(folder: Path, classes: int = 2, images: int = 12, side: int = 40) -> Path:
    rng = np.random.default_rng(0)
    for k in range(classes):
        (folder / f"class{k}").mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(0, 100, (side, side, 3), np.uint8) + np.uint8(120 * k)
            Image.fromarray(pixels).save(folder / f"class{k}" / f"{i}.png")
    return folder


def test_a_class_folder_with_no_image(refused, tmp_path):
    folder = photo_folder(tmp_path / "photos")
    (folder / "empty").mkdir()
    refused(r"empty.*no image", "--data", str(folder))


def test_a_folder_that_is_not_there(refused, tmp_path):
    refused(r"nowhere", "--data", str(tmp_path / "nowhere"))


def test_a_network_and_an_image_size_that_do_not_fit(refused):
    settings = ["--set", "model.use=kasoku.models.alexnet"]
    recipe = re.sub(r"widths = .*\n", "", RECIPE.read_text())
    refused(r"alexnet.* 1x8x8: it needs at least \d+x\d+", *settings, recipe=recipe)


def test_a_checkpoint_of_another_model(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", str(RECIPE), *ONE_EPOCH, "--out", str(run)]) == 0
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("32,", "16,"))
    (run / "manifest.json").unlink()  # which would tell that the recipe was changed
    (run / "result.json").unlink()  # as of a run that was killed
    assert main(["train", "--resume", str(run)]) == 2
    error = capsys.readouterr().err
    assert "weights of another model" in error
    assert error.count("\n") == 1


def test_resuming_where_there_is_no_run(refused, tmp_path):
    refused("no run there", "--resume", str(tmp_path))


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path, capsys):
    run = tmp_path / "run"
    command = ["train", str(RECIPE), *ONE_EPOCH, "--out", str(run)]
    assert main(command) == 0
    before = (run / "model.safetensors").read_bytes()
    assert main(command) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (run / "model.safetensors").read_bytes() == before


def test_an_output_folder_in_use_by_a_running_training(refused, tmp_path):
    held = RunFolder(tmp_path / "held")
    refused("in use by a running training", "--out", str(tmp_path / "held"))
    held.close()


def test_a_log_that_cannot_be_written_is_one_line(tmp_path, capsys, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    assert main(["train", str(RECIPE), *ONE_EPOCH, "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert error.count("\n") == 1


def test_a_disk_that_fills_up_loses_nothing(tmp_path, capsys, monkeypatch):
    settings = [*ONE_EPOCH, "--set", "epochs=2", "--set", "save.every_steps=5"]
    assert main(["train", str(RECIPE), *settings, "--out", str(tmp_path / "whole")]) == 0
    flushed = [0]
    flush = checkpoint.flush

    def full(path: Path) -> None:
        flushed[0] += 1
        if flushed[0] > 12:  # in the middle of the third checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(path)

    for module in (checkpoint, files):
        monkeypatch.setattr(module, "flush", full)
    run = tmp_path / "run"
    assert main(["train", str(RECIPE), *settings, "--out", str(run)]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "--resume" in error
    assert error.count("\n") == 1
    monkeypatch.undo()
    assert len(list((run / "checkpoints").iterdir())) == 2
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
