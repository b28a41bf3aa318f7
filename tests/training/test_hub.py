"""Results that travel: folders for model hubs, and exports that say how a photo becomes pixels."""

import csv
import json
import math
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import load_file

import kasoku
from helpers.photos import coloured_photos
from kasoku import data
from kasoku.cli import main
from kasoku.data.augment.basic import stored_side
from kasoku.training.trained_run import load

TIMM = pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: pip install 'kasoku[timm]'")
TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'kasoku[huggingface]'"
)
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 8}
NETWORKS: dict[str, dict[str, Any]] = {  # the name of a network: its table
    "cnn4": {"use": "kasoku.models.cnn4"},
    "test_resnet": {"use": "timm.create_model", "model_name": "test_resnet.r160_in1k", "drop_rate": 0.1},
    "test_vit": {
        "use": "timm.create_model",
        "model_name": "vit_tiny_patch16_224",
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 2,
    },
    "test_convnext": {"use": "timm.models.test_convnext"},
    "vit": {"use": "kasoku.models.huggingface", **VIT},
}
FILES = {"model.safetensors", "config.json", "preprocessor_config.json", "README.md", "recipe.toml", "data.json"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of several sizes: some JPEGs are decoded smaller, one lies on its side, one is a transparent PNG."""
    folder = coloured_photos(tmp_path_factory.mktemp("data") / "photos", images=12, side=90)
    first, second, third = (folder / f"colour{k}" / "0.jpg" for k in range(3))
    with Image.open(first) as opened:
        opened.resize((400, 330)).save(first)
    with Image.open(second) as opened:
        turned, exif = opened.resize((150, 110)), Image.Exif()
        exif[0x0112] = 6
        turned.save(second, exif=exif)
    with Image.open(third) as opened:
        opened.putalpha(Image.linear_gradient("L").resize(opened.size))
        opened.save(third.with_suffix(".png"))
    third.unlink()
    return folder


@pytest.fixture(scope="module")
def runs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of a short training on the photos at 32 pixels, by network; made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Path:
        file, model = folder / f"{name}.toml", dict(NETWORKS[name])
        if name == "vit":  # the folder of its config, which does not travel
            from transformers import AutoConfig

            AutoConfig.for_model("vit", **VIT).save_pretrained(folder / "config")
            model = {"use": model["use"], "model_name": str(folder / "config")}
        table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in model.items())
        file.write_text(
            f"epochs = 2\nbatch = 8\nseed = 7\n[model]\n{table}\n"
            f'[data]\nuse = "kasoku.data.folder"\nroot = "{photos}"\nsize = 32\n'
            '[optimizer]\nuse = "kasoku.optim.sgd"\nlr = 0.02\n[device]\nthreads = 1\nprecision = "fp32"\n'
        )
        assert main(["train", str(file), "--quiet", "--out", str(folder / name)]) == 0
        return folder / name

    return run


@pytest.fixture(scope="module")
def hubs(runs: Any) -> Any:
    """The folder for model hubs of a run, by network; made once."""

    @cache
    def hub(name: str) -> Path:
        run: Path = runs(name)
        path = run.with_name(f"{name}-hub")
        assert main(["export", str(run), "--format", "hub", "--out", str(path)]) == 0
        shutil.rmtree(run.parent / "config", ignore_errors=True)
        return path

    return hub


EVERY = pytest.mark.parametrize(
    "name",
    [
        "cnn4",
        *(pytest.param(name, marks=[pytest.mark.extras, TIMM]) for name in NETWORKS if name.startswith("test_")),
        pytest.param("vit", marks=[pytest.mark.extras, TRANSFORMERS]),
    ],
)
OF_TIMM = pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("test_")])


def inputs(side: int = 32) -> torch.Tensor:
    return torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))


def logits_of(run: Path) -> torch.Tensor:
    """What kasoku makes of the inputs with a run."""
    return load(run, precision="fp32").logits(inputs())


def found_in(run: Path, images: Path) -> list[tuple[Path, list[tuple[str, float]]]]:
    return [*kasoku.predict(run, images).items()]


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A photo whose colours change slowly in both directions, so that a wrong crop is seen and rounding is not."""
    colours = np.random.default_rng(1).integers(0, 256, (6, 7, 3), np.uint8)
    file = tmp_path_factory.mktemp("smooth") / "photo.png"
    Image.fromarray(colours).resize((150, 111), Image.Resampling.BICUBIC).save(file)
    return file


def assert_near(x_CHW: torch.Tensor, run: Path, file: Path) -> None:
    """Holds another library's input against kasoku's: a part of one byte on average, of 255."""
    trained = load(run)
    pixels_HWC = data.read_image(file, trained.image_size)
    wanted_CHW = data.normalise(pixels_HWC[None], trained.mean, trained.std)[0]
    assert x_CHW.shape == wanted_CHW.shape
    off = ((x_CHW - wanted_CHW) * torch.tensor(trained.std).view(3, 1, 1)).abs().mean() * 255
    assert float(off) < 1, float(off)


@EVERY
def test_a_hub_folder_predicts_and_evaluates_as_its_run(
    name: str, runs: Any, hubs: Any, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = hubs(name)
    if name != "vit":  # whose run needs the folder of its config
        assert found_in(hub, photos) == found_in(runs(name), photos)
    capsys.readouterr()
    assert main(["eval", str(hub), "--json"]) == 0
    (score,) = json.loads(capsys.readouterr().out)["scores"]
    assert score["top1"] == pytest.approx(json.loads((runs(name) / "result.json").read_text())["best_top1"])
    assert {file.name for file in hub.iterdir()} == FILES


@pytest.mark.extras
@TIMM
@OF_TIMM
def test_timm_reads_a_hub_folder_to_the_same_logits(name: str, hubs: Any) -> None:
    import timm

    network = timm.create_model(f"local-dir:{hubs(name)}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(network(inputs()), logits_of(hubs(name)), rtol=1e-5, atol=1e-6)
    config = network.pretrained_cfg
    assert (config["num_classes"], tuple(config["input_size"])) == (3, (3, 32, 32))
    assert [*config["label_names"]] == ["colour0", "colour1", "colour2"]


@pytest.mark.extras
@TIMM
@OF_TIMM
def test_timm_prepares_a_photo_as_kasoku_does(name: str, hubs: Any, smooth: Path) -> None:
    timm = pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    network = timm.create_model(f"local-dir:{hubs(name)}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network))
    with Image.open(smooth) as opened:
        assert_near(transform(opened), hubs(name), smooth)


@pytest.mark.extras
@TRANSFORMERS
def test_transformers_reads_a_hub_folder_to_the_same_logits(hubs: Any) -> None:
    from transformers import AutoModelForImageClassification

    network = AutoModelForImageClassification.from_pretrained(hubs("vit"), local_files_only=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(network(inputs()).logits, logits_of(hubs("vit")), rtol=1e-5, atol=1e-6)
    assert network.config.id2label == {k: f"colour{k}" for k in range(3)}


@pytest.mark.extras
@TRANSFORMERS
def test_transformers_prepares_a_photo_as_kasoku_does(hubs: Any, smooth: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(hubs("vit"), local_files_only=True)
    with Image.open(smooth) as opened:
        assert_near(processor(opened, return_tensors="pt")["pixel_values"][0], hubs("vit"), smooth)


def test_the_card_is_made_of_the_result(hubs: Any, runs: Any) -> None:
    yaml = pytest.importorskip("yaml")
    result = json.loads((runs("cnn4") / "result.json").read_text())
    _, front, text = (hubs("cnn4") / "README.md").read_text().split("---\n", 2)
    (entry,) = yaml.safe_load(front)["model-index"]
    assert entry["results"][0]["metrics"] == [{"type": "accuracy", "value": result["best_top1"]}]
    assert entry["results"][0]["dataset"]["name"] == "photos"
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if " | " in line[2:-2])
    assert rows["network"] == "kasoku.models.cnn4"
    assert rows["data"] == "photos (kasoku.data.folder), 3 classes"
    assert f"best {result['best_top1']:.2%}" in rows["test accuracy"]
    assert rows["time in all"] == f"{result['seconds']:.1f} s"
    environment = json.loads((runs("cnn4") / "environment.json").read_text())
    assert rows["machine"].startswith(f"{environment['machine']['cpu']}, {environment['machine']['cores']} cores")
    assert f"torch {torch.__version__}" in rows["software"]
    assert rows["recipe"].startswith("2 epochs, batch 8, kasoku.optim.sgd")
    assert rows["seed"] == "7"


def test_a_hub_folder_has_the_best_weights_and_the_config_in_timms_form(hubs: Any, runs: Any) -> None:
    best, own = (
        load_file(folder / name)
        for folder, name in ((runs("cnn4"), "best.safetensors"), (hubs("cnn4"), "model.safetensors"))
    )
    assert best.keys() == own.keys()
    assert all(torch.equal(best[key], own[key]) for key in best)
    with safe_open(hubs("cnn4") / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers refuses the file
    config = json.loads((hubs("cnn4") / "config.json").read_text())
    assert (config["architecture"], config["num_classes"]) == ("kasoku.models.cnn4", 3)
    assert config["label_names"] == ["colour0", "colour1", "colour2"]
    prepared, format_ = config["pretrained_cfg"], json.loads((runs("cnn4") / "data.json").read_text())
    assert (prepared["mean"], prepared["std"]) == (format_["mean"], format_["std"])
    assert (prepared["input_size"], prepared["interpolation"]) == ([3, 32, 32], "bilinear")


def test_the_share_that_timm_crops_gives_the_side_that_kasoku_resizes_to(digits_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(digits_run, tmp_path / "run")
    (run / "manifest.json").unlink()
    format_ = json.loads((run / "data.json").read_text())
    for side in (8, 30, 49, 64, 160, 224, 288, 331):
        (run / "data.json").write_text(json.dumps(format_ | {"image_size": [side, side]}))
        assert main(["export", str(run), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
        config = json.loads((tmp_path / "hub" / "config.json").read_text())["pretrained_cfg"]
        assert math.floor(side / config["crop_pct"]) == stored_side(side), side
    assert config["input_size"] == [1, 331, 331]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        ("result.json", "no model card can be made: result.json or environment.json is missing or damaged"),
        ("environment.json", "no model card can be made: result.json or environment.json is missing or damaged"),
        ("", "holds a run, which would be lost"),
        ("ensemble", "a hub takes one network, not an ensemble's: export a member"),
    ],
)
def test_what_makes_no_hub_folder_is_one_line(
    damage: str, line: str, digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "member-1"
    shutil.copytree(digits_run, run)
    out, trained = tmp_path / "hub", run
    if damage == "ensemble":
        shutil.copytree(digits_run, run.with_name("member-2"))
        trained = run.parent
    elif damage:
        (run / damage).write_text('{"machine": 3}')
    else:
        out = run
    capsys.readouterr()
    assert main(["export", str(trained), "--format", "hub", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert line in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "hub").exists()
    assert load(run).path == run  # as it was


def as_described(file: Path, described: dict[str, Any]) -> np.ndarray:
    """Pixels_NCHW of a photo by Pillow and by what an export says alone."""
    edge, crop = described["size"]["shortest_edge"], described["crop_size"]
    with Image.open(file) as opened:
        scale = edge / min(opened.size)
        opened.draft(None, (int(opened.width * scale) + 1, int(opened.height * scale) + 1))
        upright = ImageOps.exif_transpose(opened)
    white = Image.new("RGBA", upright.size, "white")
    image = Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    scale = edge / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), described["resample"])
    left, top = (image.width - crop["width"]) // 2, (image.height - crop["height"]) // 2
    image = image.crop((left, top, left + crop["width"], top + crop["height"]))
    pixels_HWC = np.asarray(image, np.float32) * np.float32(described["rescale_factor"])
    if described["do_normalize"]:
        pixels_HWC = (pixels_HWC - np.float32(described["image_mean"])) / np.float32(described["image_std"])
    return pixels_HWC.transpose(2, 0, 1)[None]


@pytest.mark.parametrize("name", ["cnn4", pytest.param("test_vit", marks=[pytest.mark.extras, TIMM])])
def test_onnxruntime_and_pillow_give_the_answers_of_predict(
    name: str, hubs: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason='needs pip install "kasoku[onnx]"')
    file = tmp_path / "export.onnx"
    assert main(["export", str(hubs(name)), "--format", "onnx", "--out", str(file)]) == 0
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    about = json.loads((tmp_path / "export.onnx.json").read_text())
    inside = session.get_modelmeta().custom_metadata_map
    assert json.loads(inside["preprocessing"]) == about["preprocessing"]
    assert json.loads(inside["classes"]) == about["classes"] == ["colour0", "colour1", "colour2"]
    assert about["preprocessing"]["do_normalize"] is False  # the network does it
    capsys.readouterr()
    assert main(["predict", str(hubs(name)), str(photos)]) == 0
    rows = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert len(rows) == 36
    for row in rows:
        pixels_NCHW = as_described(Path(row["image"]), about["preprocessing"])
        exact_HWC = data.read_image(row["image"], (32, 32)).numpy()
        assert np.abs(pixels_NCHW[0].transpose(1, 2, 0) * 255 - exact_HWC).max() < 1.5, row["image"]
        (logits_K,) = session.run(None, {"pixels": pixels_NCHW})[0]
        shares_K = np.exp(logits_K - logits_K.max())
        shares_K /= shares_K.sum()
        assert about["classes"][shares_K.argmax()] == row["class_1"], row["image"]
        assert float(shares_K.max()) == pytest.approx(float(row["probability_1"]), abs=1e-3), row["image"]


def test_each_export_says_how_a_photo_becomes_its_input(runs: Any, tmp_path: Path) -> None:
    for form, file, normalised in (("safetensors", "w.safetensors", True), ("torch-export", "p.pt2", False)):
        assert main(["export", str(runs("cnn4")), "--format", form, "--out", str(tmp_path / file)]) == 0
        about = json.loads((tmp_path / f"{file}.json").read_text())
        assert about["preprocessing"]["do_normalize"] is normalised
        assert about["preprocessing"]["size"] == {"shortest_edge": 37}
        assert "upright as its EXIF says, white where it is transparent" in about["resize"]


@pytest.mark.parametrize("module", ["timm", "transformers"])
def test_a_network_of_kasoku_is_exported_without_other_libraries(
    module: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["export", str(runs("cnn4")), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    assert {file.name for file in (tmp_path / "hub").iterdir()} == FILES
