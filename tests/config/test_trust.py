"""Recipes name code: kasoku's, torch's and the user's own; nobody else's runs, wherever the recipe comes from."""

import enum
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kasoku.cli import main
from kasoku.config import trust
from kasoku.config.toml import Factory, resolve
from kasoku.core import InputError

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_cnn_98.toml"
FOREIGN = [
    "os.system",
    "posix.system",
    "subprocess.Popen",
    "builtins.eval",
    "sys.exit",
    "torch.os.system",
    "torch.hub.load",
    "torch.load",
    "torch.utils.cpp_extension.load",
    "torch.nn.modules.module.functools.partial",
    "kasoku.core.files.os.remove",
    "kasoku.core.files.write_text",
    "kasoku.cli.main",
    "kasoku.config.toml.resolve",
    "kasoku.distributed.local_launch.spawn",
    "kasoku.__main__.main",
    "kasoku.report.environment",
    "torch.nn.attention._fa3._fa3_import_module",
    "torch.nn.modules.__builtins__.eval",
    "torch.nn.Module.load_state_dict",
    "torch.nn.utils.clip_grad_norm_",
    "torch.utils.model_dump.__main__.x",
]
OURS = [
    "kasoku.models.resnet50",
    "kasoku.distributed.ddp.overlap.Overlap",
    "kasoku.optim.lars.lars.LARS",
    "torch.nn.Linear",
    "torch.nn.functional.cross_entropy",
    "torch.optim.SGD",
    "torch.optim.lr_scheduler.StepLR",
]
BESIDE = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nfrom kasoku.models import cifarnet as mine\n"


@pytest.mark.parametrize("name", FOREIGN)
def test_code_of_others_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trust.allow_beside(tmp_path / "recipe.toml")
    with pytest.raises(InputError, match=r"not a name (for recipes|that a recipe may use)"):
        resolve(name, "model.use")


def network(pretrained=False, **settings):
    """A network that a stand-in for torchvision or timm lists."""
    return torch.nn.Linear(2, 2)


def loads_a_pickle(checkpoint_path=""):
    raise AssertionError("called")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchvision", "timm"):
        models = types.ModuleType(f"{package}.models")
        for function in (network, loads_a_pickle):
            own = types.FunctionType(function.__code__, globals(), function.__name__, function.__defaults__)
            own.__module__ = f"{package}.models._inside"
            setattr(models, function.__name__, own)
        models.Weights = enum.Enum("Weights", {"DEFAULT": "x"})
        models.list_models = lambda: ["network"]
        models.get_model_builder = models.model_entrypoint = lambda name, models=models: models.network
        models.is_model = lambda name: name == "network"
        for module in (types.ModuleType(package), models):
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("stand_ins")
def test_of_torchvision_and_timm_the_listed_networks_are_taken() -> None:
    for package in ("torchvision", "timm"):
        assert isinstance(Factory(f"{package}.models.network", {"pretrained": True})(), torch.nn.Linear)
        for name in ("loads_a_pickle", "list_models", "_hub.load", "Weights.DEFAULT.__class__"):
            with pytest.raises(InputError, match="not a name that a recipe may use"):
                resolve(f"{package}.models.{name}", "model.use")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("key", ["pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"])
def test_of_timm_no_argument_that_loads_a_pickle_is_taken(key: str) -> None:
    with pytest.raises(InputError, match=f"{key}: makes timm load a file that can run code"):
        Factory("timm.models.network", {key: "x"})
    trust.allow(["timm"])
    Factory("timm.models.network", {key: "x"})


@pytest.mark.usefixtures("stand_ins")
def test_of_timm_safetensors_and_plain_names_are_taken() -> None:
    Factory("timm.models.network", {"checkpoint_path": "x.safetensors"})
    Factory("timm.models.network", {"model_name": "resnet50.a1_in1k"})
    for name in ("local-dir:x", "hf-hub:someone/network"):
        with pytest.raises(InputError, match="model_name: makes timm load a file that can run code"):
            Factory("timm.models.network", {"model_name": name})


@pytest.mark.process
def test_the_alarm_of_make_fuzz_rings() -> None:
    folder = Path(__file__).parents[1] / "fuzz"
    code = "import common, os; common.main = lambda words: os.system('true'); common.command()"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "FindingError: runs os.system" in done.stderr


@pytest.mark.parametrize("name", OURS)
def test_names_for_recipes_are_taken(name: str) -> None:
    assert callable(resolve(name, "model.use"))


def test_a_recipe_names_modules_beside_it_and_a_run_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], digits_run: Path
) -> None:
    own, run, path = tmp_path / "own", tmp_path / "run", list(sys.path)
    own.mkdir()
    (own / "beside.py").write_text(BESIDE)
    (own / "recipe.toml").write_text(RECIPE.read_text().replace("kasoku.models.cifarnet", "beside.mine"))
    monkeypatch.setattr(sys, "path", list(path))
    assert main(["train", str(own / "recipe.toml"), "--dry-run"]) == 0
    assert (own / "ran").exists()

    (own / "ran").unlink()
    del sys.modules["beside"]
    sys.path[:] = path
    shutil.copytree(digits_run, run)  # of another's making: it names a module, and lists a folder that has it
    (run / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("kasoku.models.cifarnet", "beside.mine"))
    (run / "manifest.json").unlink()
    (run / "plan.json").write_text(f'{{"import_folders": ["{own}"]}}')
    shutil.copy(own / "beside.py", run)
    commands = ["eval", str(run)], ["train", "--resume", str(run)], ["export", str(run), "--format", "safetensors"]
    for command in commands:
        assert main(command) == 2
        assert "--allow beside" in capsys.readouterr().err
        assert not (own / "ran").exists()
        assert not (run / "ran").exists()
    assert main([*commands[0], "--allow", "beside"]) == 0
    assert "360 test images" in capsys.readouterr().out
