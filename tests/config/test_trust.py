"""Recipes name code: kasoku's, torch's and the user's own; nobody else's runs, wherever the recipe comes from."""

import shutil
import sys
from pathlib import Path

import pytest

from kasoku.cli import main
from kasoku.config import trust
from kasoku.config.toml import resolve
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
    "torchvision.models.ResNet18_Weights.DEFAULT.get_state_dict",
    "torchvision.models.get_weight",
    "timm.models.load_state_dict",
    "timm.models.create_model",
    "timm.models._hub.load_state_dict_from_hf",
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
    with pytest.raises(InputError, match=r"not a name for recipes|if you trust it, add --allow|there is no module"):
        resolve(name, "model.use")


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
    trust.forget()
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
