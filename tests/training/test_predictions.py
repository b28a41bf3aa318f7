"""What an evaluation notes of each image: confusion and the worst, over ranks, with pictures."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from kasoku.core import Comm, Solo, Threads
from kasoku.data import Files, GoneError, digits, loader
from kasoku.training.evaluation import PredictionLog, evaluate

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()


def found(model: nn.Module, batch: int, comm: Comm, dataset=None) -> dict:
    dataset = dataset or digits()
    batches = loader(dataset, "test", batch, comm=comm)
    judged = PredictionLog(batches)
    with torch.no_grad():
        evaluate(model, batches, comm=comm, also=judged.add)
    return judged.gather(dataset, comm)


def pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def test_counts_and_worst_images_are_those_of_a_slow_count(model):
    data = digits()
    told = found(model, 64, Solo())
    x, y = next(iter(loader(data, "test", 360)))
    with torch.no_grad():
        logits = model(x)
    pairs = list(zip(y.tolist(), logits.argmax(1).tolist(), strict=True))
    assert told["confusion"] == [[*pair, pairs.count(pair)] for pair in sorted(set(pairs))]
    assert told["classes"] == list("0123456789")
    losses = nn.functional.cross_entropy(logits, y, reduction="none")
    order = losses.argsort(descending=True)[:16].tolist()
    assert [image["name"] for image in told["worst"]] == [f"image {i}" for i in order]
    assert [image["loss"] for image in told["worst"]] == pytest.approx(losses[order].tolist(), abs=1e-4)
    assert [image["label"] for image in told["worst"]] == [str(int(y[i])) for i in order]
    for image, i in zip(told["worst"], order, strict=True):
        assert (pixels(image["png"]) == data.test.images_NHWC[i, :, :, 0].numpy()).all()


@pytest.mark.parametrize(("ranks", "batch"), [(3, 60), (4, 48), (7, 357)])
def test_ranks_together_see_what_one_sees(model, ranks, batch):
    alone = found(model, 64, Solo())
    each = Threads(ranks).run(lambda comm: found(model, batch, comm))
    for theirs in each:
        assert theirs["confusion"] == alone["confusion"]
        assert [image["name"] for image in theirs["worst"]] == [image["name"] for image in alone["worst"]]
    assert [image["png"] for image in each[0]["worst"]] == [image["png"] for image in alone["worst"]]
    assert not any(image["png"] for image in each[1]["worst"])  # only one rank writes them


def files(tmp_path: Path) -> Files:
    paths = []
    for i in range(6):
        (tmp_path / f"k{i % 2}").mkdir(exist_ok=True)
        path = tmp_path / f"k{i % 2}" / f"{i}.png"
        Image.new("RGB", (40 + i, 50), (40 * i, 0, 0)).save(path)
        paths.append(str(path))
    return Files(tuple(paths), torch.arange(6) % 2)


def colour() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2)).eval()


def photos(tmp_path: Path):
    part = files(tmp_path)
    base = replace(digits(), train=part, test=part, classes=("k0", "k1"), channels=3, image_size=(16, 16))
    return replace(base, mean=(0.5,) * 3, std=(0.2,) * 3, max_bad_fraction=0.5)


def test_files_are_named_by_class_and_file_also_after_a_skipped_one(tmp_path):
    data = photos(tmp_path)
    Path(data.test.paths[2]).write_bytes(b"no image")
    told = found(colour(), 6, Solo(), data)
    wanted = ["k0/0.png", "k0/4.png", "k1/1.png", "k1/3.png", "k1/5.png"]
    assert sorted(image["name"] for image in told["worst"]) == wanted
    assert sum(n for _, _, n in told["confusion"]) == 5
    reds = {image["name"]: int(pixels(image["png"])[8, 8, 0]) for image in told["worst"]}
    assert reds == {f"k{i % 2}/{i}.png": 40 * i for i in (0, 1, 3, 4, 5)}


def test_an_unreadable_picture_is_left_out_and_a_gone_source_not_retried(tmp_path, monkeypatch):
    data = photos(tmp_path)
    batches = loader(data, "test", 6)
    judged = PredictionLog(batches)
    with torch.no_grad():
        evaluate(colour(), batches, also=judged.add)
    Path(data.test.paths[3]).unlink()
    told = judged.gather(data, Solo())
    assert {image["name"] for image in told["worst"] if not image["png"]} == {"k1/3.png"}
    tries = []

    def gone(self: Files, index: int) -> bytes:
        tries.append(index)
        raise GoneError("gone")

    monkeypatch.setattr(Files, "read", gone)
    assert not any(image["png"] for image in judged.gather(data, Solo())["worst"])
    assert len(tries) == 1


def test_a_training_leaves_the_classes_of_its_last_evaluation(digits_run):
    told = json.loads((digits_run / "classes.json").read_text())
    result = json.loads((digits_run / "result.json").read_text())
    counts = told["confusion"]
    assert sum(n for _, _, n in counts) == 360
    assert sum(n for label, predicted, n in counts if label == predicted) / 360 == pytest.approx(result["top1"])
    assert len(told["worst"]) == 16
    assert all(image["png"] for image in told["worst"])
