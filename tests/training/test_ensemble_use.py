"""What is done with trained runs and ensembles: predict's CSV, exports of an ensemble, its report."""

import csv
import json
import re
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import kasoku
from helpers.photos import coloured_photos
from helpers.shown import text_of
from kasoku import data, models
from kasoku.cli import main
from kasoku.commands.predict import class_numbers
from kasoku.config.recipe import load
from kasoku.core import InputError, Solo
from kasoku.data import Files, loader
from kasoku.training import ensemble, trained_run

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "digits_cnn_98.toml"
SHORT = ["epochs=2", "schedule.epochs=2", "schedule.warmup=0", "device.threads=1", "device.precision=fp32"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ensemble of two, a folder of its test images with one folder a class, and one with all of them."""
    folder = tmp_path_factory.mktemp("digits")
    recipes = ensemble.varied(lambda more: load(RECIPE, [*SHORT, *more]), 2, [])
    paths = [folder / "run" / f"member-{i + 1}" for i in range(2)]
    ensemble.train(recipes, paths, Solo(), started=0.0, quiet=True)
    ensemble.evaluate(paths, Solo(), quiet=True)
    test = data.digits().test
    for i, label in enumerate(test.labels_N.tolist()):
        image = Image.fromarray(test.images_NHWC[i, :, :, 0].numpy())
        for file in (folder / "classes" / str(label) / f"{i}.png", folder / "all" / "deep" / f"{i:03}_{label}.png"):
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)
    return folder


def predicted(run: Path, *images: Path, out: Path, code: int = 0) -> list[dict[str, str]]:
    assert main(["predict", str(run), *map(str, images), "--out", str(out)]) == code
    with out.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def hits(rows: list[dict[str, str]], label: str, among: int) -> float:
    """The share of images whose class is among the first ones; `label`: what finds it in a path."""
    found = [re.search(label, row["image"])[1] in [row[f"class_{i + 1}"] for i in range(among)] for row in rows]
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["member-1", ""])
def test_predict_has_the_accuracy_of_eval(name, digits, tmp_path):
    scores = kasoku.evaluate(digits / "run" / name)
    rows = predicted(digits / "run" / name, digits / "all", out=tmp_path / "digits.csv")
    assert [row["image"] for row in rows] == [str(file) for file in sorted((digits / "all" / "deep").iterdir())]
    assert [hits(rows, r"_(\d)\.png", among) for among in (1, 5)] == pytest.approx([scores.top1, scores.top5])
    assert scores.images == len(rows) == 360


def test_a_submission_has_the_five_likeliest_of_each_image_in_order(digits, tmp_path, capsys):
    (tmp_path / "numbers.txt").write_text("".join(f"{k} {10 * k + 7} digit_{k}\n" for k in reversed(range(10))))
    command = ["predict", str(digits / "run"), str(digits / "all"), "--numbers", str(tmp_path / "numbers.txt")]
    assert main([*command, "--out", str(tmp_path / "submission.txt")]) == 0
    lines = (tmp_path / "submission.txt").read_text().splitlines()
    rows = predicted(digits / "run", digits / "all", out=tmp_path / "digits.csv")
    assert lines == [" ".join(str(10 * int(row[f"class_{i}"]) + 7) for i in range(1, 6)) for row in rows]
    truth = [10 * int(file.stem[-1]) + 7 for file in sorted((digits / "all" / "deep").iterdir())]
    right = sum(str(number) in line.split() for line, number in zip(lines, truth, strict=True))
    assert right / 360 == pytest.approx(kasoku.evaluate(digits / "run").top5)
    (tmp_path / "numbers.txt").write_text("1 1\n2 two\n")
    assert main(command) == 2
    assert "no number of class 0: lines of a class and its number are wanted" in capsys.readouterr().err


def test_the_number_of_a_class_is_the_last_word_of_its_line(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text(
        "black cat 3\n\ncat\t12\ncat 2 7\n  dog   4  \ncat 2 x 8 \n"
        "n02119789 1 kit_fox\nn02 5 red fox, Vulpes\nn03 6 fox_2\nno number\n"
    )
    numbers = {
        "black cat": "3",
        "cat": "12",
        "cat 2": "7",
        "dog": "4",
        "n02119789": "1",
        "n02": "5",
        "cat 2 x": "8",
        "n03": "6",
    }
    assert class_numbers(file, list(numbers)) == numbers
    with pytest.raises(InputError, match="no number of class no: lines of a class and its number are wanted"):
        class_numbers(file, ["no"])


def test_a_submission_has_a_line_for_an_image_that_cannot_be_read(digits, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(b"no image")
    (tmp_path / "images" / "1.png").write_bytes(next((digits / "all" / "deep").iterdir()).read_bytes())
    (tmp_path / "numbers.txt").write_text("".join(f"{k} {k + 1}\n" for k in range(10)))
    command = ["predict", str(digits / "run"), str(tmp_path / "images"), "--numbers", str(tmp_path / "numbers.txt")]
    assert main([*command, "--out", str(tmp_path / "out.txt")]) == 2
    first, second = (tmp_path / "out.txt").read_text().splitlines()
    assert first == "0 0 0 0 0"
    assert len({*second.split()} & {*map(str, range(1, 11))}) == 5


def test_an_ensemble_predicts_the_mean_probability_of_its_members(digits):
    images = sorted((digits / "all" / "deep").iterdir())[:20]
    runs = [digits / "run", digits / "run" / "member-1", digits / "run" / "member-2"]
    whole, *members = (kasoku.predict(run, images, top=10) for run in runs)
    assert list(whole) == images
    for image in images:
        shares = [dict(found[image]) for found in members]
        mean = {name: (shares[0][name] + shares[1][name]) / 2 for name in shares[0]}
        assert dict(whole[image]) == pytest.approx(mean, abs=1e-6)
        assert max(mean, key=mean.get) == whole[image][0][0]


def test_grey_images_in_class_folders_are_evaluated(digits):
    folder, memory = (astuple(kasoku.evaluate(digits / "run", data)) for data in (digits / "classes", None))
    assert folder == pytest.approx(memory)


def test_colours_become_grey_as_pillow_makes_them_grey(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    image = Files((str(tmp_path / "colour.png"),), torch.zeros(1, dtype=torch.int64))
    grey = data.Dataset("grey", ("0",), image, image, 1, (16, 16), (0.0,), (1.0,))
    ((x_NCHW, _),) = loader(grey, "test", 1)
    wanted = np.asarray(Image.fromarray(pixels).convert("L"))
    assert np.array_equal((255 * x_NCHW[0, 0]).round().byte().numpy(), wanted)


def test_a_run_on_photos_predicts_what_it_was_evaluated_with(tmp_path):
    photos = coloured_photos(tmp_path / "photos")
    settings = ["epochs=2", "data.size=32", "device.threads=1", "device.precision=fp32"]
    settings += ["model={use='kasoku.models.cifarnet', widths=[8, 8]}"]
    command = ["train", "--data", str(photos), *(part for each in settings for part in ("--set", each)), "--quiet"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    (member,) = trained_run.load_members([tmp_path / "run"], precision="fp32")
    dataset = kasoku.load_recipe(tmp_path / "run" / "recipe.toml").data()
    batch = member.recipe.evaluate.batch or member.recipe.images_at_once(1)
    logits = torch.cat([member.logits(x) for x, _ in loader(dataset, "test", batch)])
    found = kasoku.predict(tmp_path / "run", dataset.test.paths, top=3)
    shares = [[dict(classes)[name] for name in member.classes] for classes in found.values()]
    assert torch.equal(torch.tensor(shares), logits.softmax(1))


def test_images_that_cannot_be_read_have_a_row_and_end_with_2(digits, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    sources = sorted((digits / "all" / "deep").iterdir())
    for i in range(70):  # more than a batch
        (folder / f"{i:02}.png").write_bytes(sources[i].read_bytes())
    for i in (0, 65):
        (folder / f"{i:02}.png").write_bytes(b"\x89PNG no more")
    rows = predicted(digits / "run", folder, out=tmp_path / "out.csv", code=2)
    assert len(rows) == 70
    assert [i for i, row in enumerate(rows) if row["error"]] == [0, 65]
    assert {i for i, row in enumerate(rows) if not row["class_1"]} == {0, 65}
    error = capsys.readouterr().err
    assert error.startswith(f"kasoku: 2 of 70 images cannot be read, the first: {folder}/00.png: cannot be decoded")
    assert error.count("\n") == 1
    with pytest.raises(kasoku.InputError, match=r"00\.png: cannot be decoded"):
        kasoku.predict(digits / "run", folder)


def test_a_whole_batch_of_bad_images_is_named(digits, tmp_path):
    for i in range(130):
        (tmp_path / f"{i:03}.png").write_bytes(b"no image")
    rows = predicted(digits / "run" / "member-1", tmp_path, out=tmp_path / "out.csv", code=2)
    assert [Path(row["image"]).name for row in rows if row["error"]] == [f"{i:03}.png" for i in range(130)]


def test_predict_without_a_file_writes_the_same_to_standard_output(digits, tmp_path, capsys):
    image = digits / "all" / "deep" / sorted(file.name for file in (digits / "all" / "deep").iterdir())[0]
    predicted(digits / "run", image, out=tmp_path / "out.csv")
    assert main(["predict", str(digits / "run"), str(image)]) == 0
    assert capsys.readouterr().out.encode() == (tmp_path / "out.csv").read_bytes()


# ---- exports


def pixels_and_log_mean(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Some test digits as pixels from 0 to 1, and the logarithm of the members' mean probability, in fp32."""
    members = trained_run.load_members([run], precision="fp32")
    test = data.digits().test.images_NHWC[:7]
    x = data.normalise(test, members[0].mean, members[0].std)
    probabilities = sum(member.logits(x).softmax(1) for member in members) / len(members)
    return test.permute(0, 3, 1, 2).float() / 255, probabilities.log()


def test_an_exported_ensemble_gives_what_predict_averages(digits, tmp_path, capsys):
    path = tmp_path / "ensemble.pt2"
    assert main(["export", str(digits / "run"), "--format", "torch-export", "--out", str(path)]) == 0
    assert "of the ensemble the logarithms of its 2 members' mean probabilities" in capsys.readouterr().out
    pixels, wanted = pixels_and_log_mean(digits / "run")
    program = torch.export.load(path).module()
    for n in (7, 3):
        torch.testing.assert_close(program(pixels[:n]), wanted[:n], rtol=1e-4, atol=1e-5)


def test_an_ensemble_as_onnx_gives_what_predict_averages(digits, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install "kasoku[onnx]"')
    path = tmp_path / "ensemble.onnx"
    assert main(["export", str(digits / "run"), "--format", "onnx", "--out", str(path)]) == 0
    pixels, wanted = pixels_and_log_mean(digits / "run")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (7, 1):
        out = session.run(None, {"pixels": pixels[:n].numpy()})[0]
        np.testing.assert_allclose(out, wanted[:n].numpy(), rtol=1e-3, atol=1e-4)


def test_an_ensemble_as_safetensors_holds_each_member(digits):
    assert main(["export", str(digits / "run"), "--format", "safetensors"]) == 0
    weights = load_file(digits / "run" / "export.safetensors")
    for member in ("member-1", "member-2"):
        best = load_file(digits / "run" / member / "best.safetensors")
        own = {name.removeprefix(f"{member}."): w for name, w in weights.items() if name.startswith(f"{member}.")}
        assert own.keys() == best.keys()
        assert all(own[name].equal(best[name]) for name in best)
        models.cifarnet(in_channels=1, widths=(32, 64)).load_state_dict(own)
    with safe_open(digits / "run" / "export.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["output"].endswith("; of the ensemble the logarithms of its 2 members' mean probabilities")
    assert json.loads(facts["classes"]) == [*"0123456789"]


# ---- report


def test_the_report_of_an_ensemble_has_its_accuracy_below_its_members(digits, tmp_path):
    pytest.importorskip("plotly", reason='needs pip install "plotly>=6"')
    out = tmp_path / "page.html"
    assert main(["report", str(digits / "run"), "--out", str(out)]) == 0
    text = re.sub(r"\s+", " ", text_of(out))
    scores = kasoku.evaluate(digits / "run")
    row = re.search(rf"{digits / 'run'} \(ensemble\)(( -| [\d.]+ ?%?)+)", text)[1]
    assert f"{scores.top1:.2%} {scores.top5:.2%}" in row
    assert text.index("member-2") < text.index("(ensemble)")
    member = kasoku.evaluate(digits / "run" / "member-2")
    assert f"{member.top1:.2%} {member.top5:.2%}" in text
