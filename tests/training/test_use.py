"""What is done with trained runs: eval, predict, export, list; and training on a folder of photos without a recipe."""

import csv
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import kasoku
from helpers.photos import coloured_photos
from helpers.ranks import on_processes
from helpers.started import clean
from kasoku import data, models
from kasoku.cli import main
from kasoku.commands.export import _weights
from kasoku.core import Comm, Solo
from kasoku.training.trained_run import load

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "digits_cnn_98.toml"
SHORT = ["--set", "epochs=4", "--set", "schedule.epochs=4", "--set", "evaluate.stop=false"]
ONE = ["--set", "device.threads=1"]
SHORT += [*ONE, "--quiet"]


@pytest.fixture(scope="module")
def digit_runs(tmp_path_factory) -> list[Path]:
    """Two members of an ensemble."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        out = ["--out", str(folder / f"seed{seed}")]
        assert main(["train", str(RECIPE), *SHORT, "--set", f"seed={seed}", *out]) == 0
    return [folder / "seed0", folder / "seed1"]


def test_eval_gives_the_accuracy_of_the_training_and_an_ensemble_beside_it(digit_runs, capsys):
    assert main(["eval", *map(str, digit_runs)]) == 0
    shown = capsys.readouterr().out
    percents = re.findall(r"(\d+\.\d\d)%", shown)
    assert len(percents) == 6  # top-1 and top-5 of two members and the ensemble
    for run, percent in zip(digit_runs, percents[::2], strict=False):
        assert float(percent) == pytest.approx(
            100 * json.loads((run / "result.json").read_text())["best_top1"], abs=0.01
        )
    assert "ensemble of 2" in shown


def test_the_ensemble_is_the_mean_of_probabilities(digit_runs, capsys):
    assert main(["eval", *map(str, digit_runs)]) == 0
    shown = float(re.search(r"ensemble of 2\W+(\d+\.\d\d)%", capsys.readouterr().out)[1])
    members = [load(run) for run in digit_runs]
    hits = total = 0
    for x, y in data.loader(data.digits(), "test", 90):
        together = sum(member.logits(x).softmax(1) for member in members)
        hits += int((together.argmax(1) == y).sum())
        total += len(y)
    assert shown == pytest.approx(100 * hits / total, abs=0.01)


def test_runs_on_other_data_make_no_ensemble(digit_runs, tmp_path, capsys):
    photos = coloured_photos(tmp_path / "photos")
    out = tmp_path / "other"
    assert main(["train", "--data", str(photos), "--set", "epochs=3", *ONE, "--quiet", "--out", str(out)]) == 0
    assert main(["eval", str(digit_runs[0]), str(out)]) == 2
    assert "other data" in capsys.readouterr().err


def test_predict_names_the_digits_of_image_files(digit_runs, tmp_path, capsys):
    digits = data.digits()
    for i in range(20):
        pixels = digits.test.images_NHWC[i, :, :, 0].numpy()
        Image.fromarray(pixels).save(tmp_path / f"{i:02d}_{int(digits.test.labels_N[i])}.png")
    assert main(["predict", str(digit_runs[0]), str(tmp_path)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 20
    right = sum(Path(row["image"]).stem[-1] == row["class_1"] for row in rows)
    assert right >= 16
    assert all(float(row["probability_1"]) >= float(row["probability_5"]) >= 0 for row in rows)


def test_probabilities_are_not_rounded_to_bf16(digit_runs, tmp_path, capsys):
    run, digits = shutil.copytree(digit_runs[0], tmp_path / "run"), data.digits()
    (run / "manifest.json").unlink()
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace('precision = "auto"', 'precision = "bf16"'))
    Image.fromarray(digits.test.images_NHWC[0, :, :, 0].numpy()).save(tmp_path / "digit.png")
    assert main(["predict", str(run), str(tmp_path / "digit.png")]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    x_NCHW = data.normalise(digits.test.images_NHWC[:1], digits.mean, digits.std)
    exact, rounded = (load(run, **settings).logits(x_NCHW) for settings in ({"precision": "fp32"}, {}))
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())
    assert float(row["probability_1"]) == pytest.approx(float(exact.softmax(1).max()), abs=6e-5)


@pytest.mark.process
def test_a_file_name_that_is_no_text_is_printed_as_it_is(digit_runs, tmp_path):
    folder = os.fsencode(coloured_photos(tmp_path / "photos", classes=1, images=1) / "colour0")
    os.rename(folder + b"/0.jpg", folder + b"/caf\xe9.jpg")
    command = [sys.executable, "-m", "kasoku", "predict", str(digit_runs[0]), os.fsdecode(folder)]
    shown = subprocess.run(command, capture_output=True, check=True, env=clean({"PYTHONIOENCODING": "utf-8:strict"}))
    assert b"/caf\xe9.jpg," in shown.stdout


def test_predict_reads_relative_paths_as_absolute_ones(digit_runs, tmp_path, monkeypatch, capsys):
    coloured_photos(tmp_path / "photos", classes=1, images=3)
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(digit_runs[0]), str(tmp_path / "photos")]) == 0
    wanted = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    relative_run = os.path.relpath(digit_runs[0])
    assert main(["predict", relative_run, "photos"]) == main(["predict", relative_run, "./photos/colour0/0.jpg"]) == 0
    folder, file = capsys.readouterr().out.split("image,")[1:]
    assert f"image,{folder}" == wanted
    assert file.splitlines()[1] == wanted.splitlines()[1]
    found = kasoku.predict(relative_run, ["photos", Path("photos/colour0/1.jpg")])
    assert list(map(str, found)) == [line.partition(",")[0] for line in wanted.splitlines()[1:]]


@pytest.mark.usefixtures("one_core")
def test_photos_in_a_relative_folder_are_learnt_evaluated_and_packed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    coloured_photos(Path("photos"))
    assert main(["pack", "photos", "packed", "--side", "32", "--quiet"]) == 0
    assert main(["pack", "--verify", "packed"]) == 0
    assert len(data.shards("packed").train) == len(data.folder("photos").train)
    short = ["--set", "epochs=1", "--set", "data.size=32", *ONE, "--quiet"]
    assert main(["train", "--data", "photos", *short, "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["eval", "run", "--data", "photos"]) == 0
    assert "48 test images" in capsys.readouterr().out


def test_predict_refuses_what_is_no_run_and_what_is_no_image(digit_runs, tmp_path, capsys):
    assert main(["predict", str(tmp_path), str(RECIPE)]) == 2
    assert "no run there" in capsys.readouterr().err
    assert main(["predict", str(digit_runs[0]), str(RECIPE)]) == 2
    assert str(RECIPE) in capsys.readouterr().err


def pixels_and_logits(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Some test digits as pixels from 0 to 1, and what the plain network makes of them in fp32."""
    trained = load(run)
    trained.job.close()
    digits = data.digits()
    x = data.normalise(digits.test.images_NHWC[:7], trained.mean, trained.std)
    with torch.no_grad():
        logits = trained.job.model(x.contiguous())
    return digits.test.images_NHWC[:7].permute(0, 3, 1, 2).float() / 255, logits


def test_export_to_safetensors_keeps_every_bit(digit_runs, tmp_path):
    assert (
        main(["export", str(digit_runs[0]), "--format", "safetensors", "--out", str(tmp_path / "w.safetensors")]) == 0
    )
    model = models.cifarnet(in_channels=1, widths=(32, 64))
    assert models.load(model, tmp_path / "w.safetensors") == []
    best = load_file(digit_runs[0] / "best.safetensors")
    assert all(tensor.equal(best[name]) for name, tensor in load_file(tmp_path / "w.safetensors").items())


def test_tied_weights_are_exported_as_safetensors(digit_runs, tmp_path):
    member = load(digit_runs[0])
    member.job.model.again = next(m for m in member.job.model.modules() if isinstance(m, nn.Linear))
    save_file(_weights([member]), tmp_path / "tied.safetensors")
    assert load_file(tmp_path / "tied.safetensors")["again.weight"].equal(member.job.model.again.weight)


def test_the_torch_export_program_gives_the_logits_for_any_batch(digit_runs, tmp_path):
    path = tmp_path / "program.pt2"
    assert main(["export", str(digit_runs[0]), "--format", "torch-export", "--out", str(path)]) == 0
    pixels, logits = pixels_and_logits(digit_runs[0])
    program = torch.export.load(path).module()
    torch.testing.assert_close(program(pixels), logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(program(pixels[:3]), logits[:3], rtol=1e-4, atol=1e-5)


def test_the_onnx_program_gives_the_logits_for_any_batch(digit_runs, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install "kasoku[onnx]"')
    path = tmp_path / "program.onnx"
    assert main(["export", str(digit_runs[0]), "--format", "onnx", "--out", str(path)]) == 0
    pixels, logits = pixels_and_logits(digit_runs[0])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (7, 3, 1):
        out = session.run(None, {"pixels": pixels[:n].numpy()})[0]
        np.testing.assert_allclose(out, logits[:n].numpy(), rtol=1e-3, atol=1e-4)


FACTS = {
    "input": "pixels, float32, N x 1 x 8 x 8, grey from 0 to 1, not normalised",
    "resize": "shorter side to 9, bilinear, antialiased; then the middle 8 x 8;"
    " a JPEG is decoded at 1/2, 1/4 or 1/8 before that, where it stays larger;"
    " upright as its EXIF says, white where it is transparent",
    "output": "logits, float32, N x 10, before softmax",
    "classes": json.dumps([*"0123456789"]),
}


def exported(run: Path, form: str, path: Path, capsys) -> str:
    assert main(["export", str(run), "--format", form, "--out", str(path)]) == 0
    return capsys.readouterr().out


def test_an_export_says_what_goes_in_and_which_classes_come_out(digit_runs, tmp_path, capsys):
    said = exported(digit_runs[0], "torch-export", tmp_path / "p.pt2", capsys)
    assert (
        f"input: {FACTS['input']}\nfrom a photo: {FACTS['resize']}\noutput: {FACTS['output']}; the file holds" in said
    )
    extra = {"kasoku.json": ""}
    torch.export.load(tmp_path / "p.pt2", extra_files=extra)
    assert json.loads(extra["kasoku.json"]).items() >= FACTS.items()
    said = exported(digit_runs[0], "safetensors", tmp_path / "w.safetensors", capsys)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["classes"] == FACTS["classes"]
    trained = load(digit_runs[0])
    then = f"then normalised: (pixel - mean) / std, mean {list(trained.mean)}, std {list(trained.std)}"
    assert facts["input"] == FACTS["input"].replace("not normalised", then)
    assert facts["input"] in said


def test_an_onnx_file_says_so_too(digit_runs, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install "kasoku[onnx]"')
    exported(digit_runs[0], "onnx", tmp_path / "p.onnx", capsys)
    session = onnxruntime.InferenceSession(str(tmp_path / "p.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map.items() >= FACTS.items()
    assert (session.get_inputs()[0].name, session.get_outputs()[0].name) == ("pixels", "logits")
    graph = pytest.importorskip("onnx").load(tmp_path / "p.onnx").graph
    assert (graph.input[0].doc_string, graph.output[0].doc_string) == (FACTS["input"], FACTS["output"])


def test_list_names_every_model_source_technique_and_recipe(capsys, monkeypatch):
    monkeypatch.chdir("/")  # the recipes come with the package
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "kasoku.models.resnet50",
        "kasoku.optim.muon",
        "kasoku.data.cifar10",
        "kasoku.memory.SavedMemory",
        "kasoku.optim.EMA",
        "kasoku.core.ArcCotangent",
    ):
        line = next(line for line in shown.splitlines() if line.startswith(name + " "))
        assert len(line.removeprefix(name).strip()) > 10, line
    assert "digits_cnn_98 " in shown


@pytest.mark.usefixtures("one_core")
def test_photos_without_a_recipe_are_learnt_and_the_recipe_is_written(tmp_path, capsys):
    photos = coloured_photos(tmp_path / "photos")
    out = tmp_path / "run"
    assert main(["train", "--data", str(photos), "--set", "epochs=10", *ONE, "--quiet", "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["best_top1"] == 1.0
    assert "kasoku.data.folder" in (out / "recipe.toml").read_text()
    capsys.readouterr()
    assert main(["eval", str(out), "--data", str(photos)]) == 0
    assert "48 test images" in capsys.readouterr().out  # nothing is set aside for training here
    coloured_photos(tmp_path / "parts" / "train")
    assert main(["eval", str(out), "--data", str(tmp_path / "parts")]) == 0
    assert " 48 test" not in (shown := capsys.readouterr().out), shown
    assert "6 test images" in shown  # of train/ alone what a training holds out
    assert main(["predict", str(out), str(photos / "colour1" / "3.jpg")]) == 0
    assert "colour1" in capsys.readouterr().out


@pytest.mark.usefixtures("one_core")
def test_photos_are_fine_tuned_from_published_weights_with_blocks_frozen(tmp_path):
    torch.manual_seed(0)
    weights = {name: tensor.contiguous() for name, tensor in models.resnet18().state_dict().items()}
    save_file(weights, tmp_path / "resnet18.safetensors")
    photos = coloured_photos(tmp_path / "photos")
    out = tmp_path / "run"
    start = ["--weights", str(tmp_path / "resnet18.safetensors"), "--freeze", "2"]
    assert main(["train", "--data", str(photos), *start, "--set", "epochs=3", *ONE, "--quiet", "--out", str(out)]) == 0
    after = load_file(out / "model.safetensors")
    assert after["conv1.weight"].equal(weights["conv1.weight"])
    assert after["layer1.0.bn1.running_mean"].equal(weights["layer1.0.bn1.running_mean"])
    assert not after["layer4.0.conv1.weight"].equal(weights["layer4.0.conv1.weight"])
    assert after["fc.weight"].shape == (3, 512)


def test_weights_of_no_network_of_ours_are_refused(tmp_path, capsys):
    save_file({"w": torch.zeros(3)}, tmp_path / "odd.safetensors")
    photos = coloured_photos(tmp_path / "photos")
    command = ["train", "--data", str(photos), "--weights", str(tmp_path / "odd.safetensors")]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "none of our networks" in capsys.readouterr().err


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_core")
def test_example_plain_loop_learns_the_digits():
    assert example("plain_loop").main() > 0.95


def adopted(_: Comm) -> dict[str, torch.Tensor]:
    """The averaged weights of the example's loop with a small network, since resnet18 amplifies the last bit soon."""
    torch.set_num_threads(1)
    module = example("adopt")

    def small(num_classes: int, in_channels: int) -> nn.Module:
        convolution = nn.Conv2d(in_channels, 8, 5, stride=4, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 49, num_classes))

    module.resnet18 = small
    return module.main(epochs=2)[1]


@pytest.mark.process
def test_example_adopt_gives_on_two_ranks_the_weights_of_one():
    alone = adopted(Solo())
    first, second = on_processes(2, adopted)
    for name, weight in alone.items():
        assert first[name].equal(second[name]), name
        torch.testing.assert_close(first[name], weight, rtol=1e-3, atol=1e-5)


SMALL = """
import runpy
import kasoku.models
from torch import nn

def small(num_classes, in_channels):
    widths = (in_channels, 16, 32, 32)
    blocks = [[nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()] for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*sum(blocks, []), nn.Flatten(), nn.Linear(32 * 16, num_classes))

kasoku.models.resnet18 = small
runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.mark.process
def test_example_adopt_learns_under_torchrun(tmp_path):
    small = tmp_path / "small.py"  # the example as it is written, with a network that takes less time than resnet18
    small.write_text(SMALL.format(example=str(ROOT / "examples/adopt.py")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(small)]
    done = subprocess.run(command, env=clean({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"top-1 (.*)% of 360 test images on 2 ranks\n", done.stdout)
    assert float(line) > 90


@pytest.mark.usefixtures("one_core")
def test_example_own_technique_learns_the_digits():
    assert example("own_technique").main() > 0.8


@pytest.mark.usefixtures("one_core")
def test_example_fine_tune_learns_colours(tmp_path):
    torch.manual_seed(0)
    save_file({k: v.contiguous() for k, v in models.resnet18().state_dict().items()}, tmp_path / "w.safetensors")
    photos = coloured_photos(tmp_path / "photos")
    assert example("fine_tune").main(str(photos), str(tmp_path / "w.safetensors"), epochs=6, size=64) > 0.6


def test_a_users_own_parts_by_dotted_name(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "mine", None)
    del sys.modules["mine"]
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from dataclasses import dataclass\n"
        "from kasoku.core import Stage, Technique\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, hidden: int, num_classes: int):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, hidden), torch.nn.ReLU(),\n"
        "            torch.nn.Linear(hidden, num_classes))\n"
        "    def forward(self, x):\n"
        "        return self.layers(x)\n"
        "def adam(model, lr: float = 1e-3):\n"
        "    return torch.optim.Adam(model.parameters(), lr=lr)\n"
        "def loss(outputs, labels, *, power: float = 1.0):\n"
        "    return torch.nn.functional.cross_entropy(outputs, labels) ** power\n"
        "@dataclass(frozen=True)\n"
        "class Note(Technique):\n"
        "    file: str\n"
        "    def apply(self, job):\n"
        "        __import__('pathlib').Path(self.file).write_text('applied')\n"
    )
    (tmp_path / "own.toml").write_text(
        "epochs = 5\nbatch = 64\ndevice = { threads = 1 }\n"
        '[model]\nuse = "mine.Net"\nhidden = 32\n[data]\nuse = "kasoku.data.digits"\n'
        '[optimizer]\nuse = "mine.adam"\nlr = 0.01\n[loss]\nuse = "mine.loss"\npower = 1.0\n'
        f'[[techniques]]\nuse = "mine.Note"\nfile = "{tmp_path / "noted"}"\n'
    )
    run = str(tmp_path / "run")
    assert main(["train", str(tmp_path / "own.toml"), "--quiet", "--out", run]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["top1"] > 0.8
    assert (tmp_path / "noted").read_text() == "applied"
    monkeypatch.chdir("/")  # from elsewhere: the run knows where the modules were
    for command in (["eval", run], ["train", "--resume", run, "--quiet"]):
        command += ["--allow", "mine"]
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
        sys.modules.pop("mine")
        assert main(command) == 0
