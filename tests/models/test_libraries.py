"""Networks of timm, torchvision and transformers by name: they fit the data, and train as kasoku's own do."""

import copy
import json
import re
import shutil
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("timm", reason="needs timm: pip install 'kasoku[timm]'")
pytest.importorskip("torchvision", reason="needs torchvision: pip install 'kasoku[torchvision]'")
import timm

from helpers import pages
from helpers.photos import coloured_photos
from kasoku.cli import main
from kasoku.config.libraries import build as network_of
from kasoku.config.libraries import normalisation
from kasoku.config.recipe import Recipe, dumps, from_document
from kasoku.config.toml import Factory, table
from kasoku.core import Comm, InputError, Job, Threads
from kasoku.core.blocks import blocks
from kasoku.device import Compile
from kasoku.distributed import VirtualRanks
from kasoku.distributed.batchnorm.grouped import norms
from kasoku.memory import SavedMemory
from kasoku.optim import adamw, lars
from kasoku.training.trained_run import load as read_back
from kasoku.training.trainer import build

pytestmark = pytest.mark.extras

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 8}
NETWORKS = {  # the families, with fewer and thinner layers
    "resnet50": {"channels": [16, 16, 24, 32], "layers": [1, 1, 1, 1], "stem_width": 16},
    "convnext_atto": {"dims": [16, 24, 32, 48], "depths": [1, 1, 2, 1]},
    "vit_tiny_patch16_224": {"embed_dim": 48, "depth": 2, "num_heads": 2},
    "test_efficientnet": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "torchvision.models.mobilenet_v3_small": {},
    "vit": SMALL,
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 2]},
}
OF_TRANSFORMERS = ("vit", "resnet")
NO_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'kasoku[huggingface]'"
)
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[NO_TRANSFORMERS] * (name in OF_TRANSFORMERS)) for name in NETWORKS]
)
STEPS = 4


def model_of(name: str, **more: object) -> Factory:
    keys = {**NETWORKS.get(name, {}), **more}
    if "." in name:
        return Factory(name, keys)
    use = "kasoku.models.huggingface" if name in OF_TRANSFORMERS else "timm.create_model"
    return Factory(use, {"model_name": name, **keys})


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return coloured_photos(tmp_path_factory.mktemp("data") / "photos", images=12, side=40)


@pytest.fixture(scope="module")
def recipe_of(photos):
    """A recipe of four steps of eight photos of 32 pixels."""

    def made(name: str, **settings: object) -> Recipe:
        document = {
            "epochs": 1.0,
            "batch": 8,
            "model": {"use": "kasoku.models.cnn4"},
            "data": {"use": "kasoku.data.folder", "root": str(photos), "size": 32},
            "optimizer": {"use": "kasoku.optim.sgd", "lr": 0.02},
            "device": {"threads": 1, "precision": "fp32"},
            **settings,
        }
        return replace(from_document(document), model=model_of(name))

    return made


@pytest.fixture(scope="module")
def runs(recipe_of, tmp_path_factory):
    """The run folder of a training with a checkpoint at each step, by network; made once."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(name: str) -> Path:
        file = folder / f"{name}.toml"
        file.write_text(dumps(recipe_of(name, save={"every_steps": 1, "keep": 9})))
        assert main(["train", str(file), "--quiet", "--out", str(folder / name)]) == 0
        return folder / name

    return run


@EVERY
def test_a_network_of_a_library_fits_the_data(name, runs):
    run = runs(name)
    result, data = (json.loads((run / f"{file}.json").read_text()) for file in ("result", "data"))
    assert result["steps"] == STEPS
    own = normalisation(model_of(name))
    assert own is None or (tuple(data["mean"]), tuple(data["std"])) == own
    assert read_back(run).logits(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


@EVERY
def test_a_library_network_resumes_to_the_same_bits(name, runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs(name), run)
    for file in [*run.glob("checkpoints/step-*[34]"), run / "checkpoints" / "step-00000000"]:
        shutil.rmtree(file, ignore_errors=True)
    for file in ("result.json", "manifest.json", "best.safetensors", "model.safetensors"):
        (run / file).unlink(missing_ok=True)
    assert len([*run.glob("checkpoints/*")]) == 2
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (runs(name), run))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def trained(recipe: Recipe, *, ranks: int = 1, steps: int = 2) -> dict[str, torch.Tensor]:
    """The weights after some steps of a plain loop."""

    def train(comm: Comm) -> dict[str, torch.Tensor]:
        job = build(recipe, comm).job
        for micro, (x_NCHW, y_N) in enumerate(job.loader, 1):
            job.backward(job.loss(job.model(x_NCHW), y_N))
            if micro % job.accumulate == 0:
                job.optimizer.step()
                job.optimizer.zero_grad()
            if micro == steps * job.accumulate:
                break
        job.drain()
        return {key: x.detach().clone() for key, x in job.model.state_dict().items()}

    return Threads(ranks).run(train)[0]


def assert_near(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    off = {k: float((found[k].float() - w.float()).norm() / (1e-3 + w.float().norm())) for k, w in wanted.items()}
    worst = max(off, key=off.__getitem__)
    assert off[worst] < tolerance, (worst, off[worst])


@EVERY
def test_two_ranks_train_a_library_network_as_one_does(name, recipe_of):
    recipe = recipe_of(name, norm_batch=4)
    assert_near(trained(recipe, ranks=2), trained(recipe), 1e-4)


@pytest.fixture(scope="module")
def plain(recipe_of):
    """The weights after one step, by network."""
    return cache(lambda name: trained(recipe_of(name), steps=1))


@EVERY
def test_compiled_blocks_of_a_library_network_train_as_eager_ones(name, recipe_of, plain):
    compiled = replace(recipe_of(name), techniques=(Compile(backend="eager"),))
    assert_near(trained(compiled, steps=1), plain(name), 1e-4)


@EVERY
def test_saved_memory_takes_a_library_network_or_refuses_it_in_a_line(name, recipe_of, plain, capsys):
    try:
        found = trained(replace(recipe_of(name), techniques=(SavedMemory(),)), steps=1)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert_near(found, plain(name), 1e-3)
    clear = re.match(r"SavedMemory: .*(leave SavedMemory out|leave it out|set factor)", refusal)
    assert clear or "kasoku: " in capsys.readouterr().out, refusal


@EVERY
def test_norms_and_biases_of_a_library_network_do_not_decay(name):
    with torch.device("meta"):
        model = network_of(model_of(name), 3, 3, 32)
    owners = {p: type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False)}
    of_timm = getattr(model, "no_weight_decay", set)()
    exempt = {n for n, p in model.named_parameters() if "Norm" in owners[p] or n.endswith("bias") or n in of_timm}
    products = {n for n, p in model.named_parameters() if re.search("Linear|Conv", owners[p]) and p.ndim > 1}
    assert {"pos_embed", "cls_token"} <= of_timm or not name.startswith("vit_")
    for rule in (adamw(model, lr=0.01, weight_decay=0.1), lars(model, lr=0.1, weight_decay=0.1)):
        decay = {p: group["weight_decay"] for group in rule.param_groups for p in group["params"]}
        decayed = {n for n, p in model.named_parameters() if decay[p]}
        assert products <= decayed
        assert not decayed & exempt


@EVERY
def test_a_library_network_is_simulated_and_profiled(name, recipe_of, tmp_path, capsys):
    file, out = tmp_path / "recipe.toml", tmp_path / "profile"
    file.write_text(dumps(recipe_of(name)))
    assert main(["profile", str(file), "--steps", "1", "--out", str(out)]) == 0
    assert (
        main(
            [
                "simulate",
                str(file),
                "--cluster",
                "dgx-a100",
                "--gpus",
                "1",
                "--profile",
                str(out),
                "--out",
                str(tmp_path / "s"),
            ]
        )
        == 0
    )
    assert re.search(r"images/s", capsys.readouterr().out)


def test_the_pages_five_lines_train_a_network_of_timm(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos)
    five = next(b for b in pages.blocks(pages.ROOT / "docs" / "recipes.md") if b.title == "timm.toml")
    Path("timm.toml").write_text(five.text)
    assert len(five.text.splitlines()) == 5
    settings = ["--set", "epochs=1", "--set", "data.size=32", "--set", "device.threads=1"]
    assert main(["train", "timm.toml", *settings, "--quiet", "--out", "run"]) == 0


def test_weights_of_timm_fit_other_classes_sizes_and_channels(recipe_of, tmp_path):
    for name in ("vit_tiny_patch16_224", "resnet50"):
        file = tmp_path / f"{name}.safetensors"
        published = network_of(model_of(name), 7, 3, 64).state_dict()
        save_file(published, file)
        found = network_of(model_of(name, checkpoint_path=str(file)), 3, 1, 32).state_dict()
        changed = {key for key in found if not torch.equal(found[key], published[key])}
        first, head = ("patch_embed.proj", "head") if name.startswith("vit") else ("conv1", "fc")
        assert changed == {f"{first}.weight", f"{head}.weight", f"{head}.bias"} | {"pos_embed"} & found.keys()
        torch.testing.assert_close(found[f"{first}.weight"], published[f"{first}.weight"].sum(1, keepdim=True))
    recipe = replace(recipe_of("resnet50"), model=model_of("resnet50", checkpoint_path=str(file)))
    (tmp_path / "recipe.toml").write_text(dumps(recipe))
    assert main(["train", str(tmp_path / "recipe.toml"), "--quiet", "--out", str(tmp_path / "run")]) == 0
    save_file({"other": torch.ones(3)}, file)
    assert main(["eval", str(tmp_path / "run")]) == 0  # the weights are those of the training
    with pytest.raises(InputError, match=r"not weights of this ResNet; .*missing"):
        network_of(recipe.model, 3, 3, 32)


@NO_TRANSFORMERS
def test_a_folder_of_transformers_gives_network_weights_and_normalisation(tmp_path):
    folder = tmp_path / "vit"
    saved = network_of(model_of("vit"), 7, 3, 32)
    saved.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1]}')
    published = saved.state_dict()
    model = Factory("kasoku.models.huggingface", {"model_name": str(folder), "pretrained": True})
    assert normalisation(model) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    found = network_of(model, 3, 3, 32)
    assert found(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    for key, value in found.state_dict().items():
        assert key.startswith("classifier") or torch.equal(value, published[key]), key
    with pytest.raises(InputError, match=r"not weights of this .*position.*image size"):
        network_of(model, 3, 3, 64)


def test_compiled_blocks_group_a_batchnorm_that_also_activates(recipe_of):
    eager = recipe_of("test_efficientnet", norm_batch=4)
    compiled = replace(eager, techniques=(Compile(backend="eager"),))
    assert_near(trained(compiled), trained(eager), 1e-4)


def test_a_batchnorm_that_also_activates_is_grouped_whole():
    with torch.random.fork_rng():
        plain = timm.create_model("test_efficientnet", num_classes=3)
        x = torch.randn(8, 3, 32, 32)
    grouped = copy.deepcopy(plain)
    job = Job(grouped, lambda m: adamw(m, lr=0.01), loader=[(x, torch.zeros(8, dtype=torch.long))])
    job.apply(VirtualRanks(norm_batch=8))
    torch.testing.assert_close(job.model(x), plain(x))
    assert int(norms(grouped)[0].num_batches_tracked) == 0  # the step counts
    job.loss(job.model(x), torch.zeros(8, dtype=torch.long)).backward()
    job.optimizer.step()
    assert int(norms(grouped)[0].num_batches_tracked) == 1


@EVERY
def test_library_networks_have_blocks_to_compile_and_to_overlap(name):
    with torch.device("meta"):
        found = [n for n, _ in blocks(network_of(model_of(name), 3, 3, 32))]
    assert len(found) > 4, found


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"model_name": "resnet5o"},
            r'model\.model_name = "resnet5o": timm has no such network: did you mean resnet50\?',
        ),
        ({"model_name": "resnet50.a1"}, r"timm has no such network: did you mean resnet50\.\w+\?"),
        ({"model_name": ""}, r'model\.model_name = "": timm has no such network'),
        ({"model_name": "local-dir:x"}, r"model\.model_name: makes timm load a file that can run code"),
        ({"model_name": "resnet18", "checkpoint_path": "x.pth"}, r"checkpoint_path: makes timm load a file"),
        ({"model_name": "resnet18", "checkpoint_path": "x.safetensors"}, r"x\.safetensors: no such file"),
        (
            {"model_name": "vit_tiny_patch16_224"},
            r"vit_tiny_patch16_224 does not fit images of 3x8x8: it needs at least 16x16",
        ),
        ({"use": "timm.models.resnet5o"}, r"no such name: did you mean resnet50\?"),
        (
            {"use": "kasoku.models.huggingface", "model_name": "vti"},
            r"no such image classifier, .*: did you mean vit\?",
        ),
        (
            {"use": "kasoku.models.huggingface", "model_name": "vit", "hidden_sise": 3},
            r"hidden_sise: ViTConfig has no such setting: did you mean hidden_size\?",
        ),
        (
            {"use": "kasoku.models.huggingface", "model_name": "vit", "attn_implementation": "someone/kernel"},
            r"names code of a hub",
        ),
    ],
)
def test_a_wrong_name_or_size_of_a_library_is_one_line(model, line, recipe_of, tmp_path, capsys):
    file = tmp_path / "recipe.toml"
    document = table(recipe_of("resnet50"))
    document["model"] = {"use": "timm.create_model", **model}
    document["data"]["size"] = 8
    file.write_text(tomli_w.dumps(document))
    assert main(["train", str(file), "--quiet", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert re.search(line, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "wanted"), [("timm", "NAME"), ("convnext_atto", "convnext_atto")])
def test_list_says_how_a_network_of_timm_is_named(name, wanted, capsys):
    assert main(["list", name]) == 2
    line = f'"{name}": not of kasoku but of timm: in a recipe write model = '
    assert f'{line}{{use = "timm.create_model", model_name = "{wanted}"}}' in capsys.readouterr().err
