"""An error in the user's own code is one line that says where; an error in kasoku's own code is not hidden."""

import json
import re
import sys

import pytest
from safetensors.torch import load_file, save_file

from helpers.photos import coloured_photos
from kasoku.cli import main
from kasoku.core import InputError, attributed

MINE = """
from dataclasses import dataclass, replace
import torch
from torch import nn
from kasoku.core import Stage, Technique
from kasoku.data import Items, digits

class Net(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.layers(x)

def sequential(num_classes: int):
    return Net(num_classes).layers

def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)

def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)

@dataclass(frozen=True)
class Nothing(Technique):
    def apply(self, job):
        job.before_step(self.act)

    def act(self):
        pass

class Photos:
    targets = [0] * 100

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return torch.zeros(1, 8, 8, dtype=torch.uint8), 0

def data(processes: int = 0):
    return digits()

def read():
    return replace(digits(), train=Items(Photos()), mean=(0.5,) * 1, std=(0.5,) * 1)
"""
RECIPE = """
epochs = 2
batch = 64
device = { threads = 1 }
[model]
use = "mine.Net"
[data]
use = "mine.data"
[optimizer]
use = "mine.adam"
[loss]
use = "mine.loss"
[[techniques]]
use = "mine.Nothing"
"""


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Trains with the user's module, in which `old` is replaced by `new`.

    Returns the exit code, and what stderr says, with LINE in the place of the number of the first line that is new.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(old: str, new: str, *arguments: str) -> tuple[int, str]:
        assert old in MINE
        text = MINE.replace(old, new)
        line = 1 + text[: text.index(new.strip())].count("\n")
        (tmp_path / "mine.py").write_text(text)
        (tmp_path / "own.toml").write_text(RECIPE)
        code = main(["train", str(tmp_path / "own.toml"), "--quiet", "--out", str(tmp_path / "run"), *arguments])
        sys.modules.pop("mine", None)
        return code, re.sub(rf"(mine\.py(:|\", line )){line}\b", r"\1LINE", capsys.readouterr().err)

    return run


@pytest.mark.parametrize(
    ("old", "new", "settings", "line"),
    [
        (
            "\nclass Net",
            "1 / 0\nclass Net",
            (),
            r"import of mine: ZeroDivisionError: division by zero \(at .*mine\.py:LINE\)",
        ),
        ("\nclass Net", "1 +\nclass Net", (), r"import: SyntaxError: .* \(at .*mine\.py:LINE\)"),
        (
            "super().__init__()",
            "raise KeyError('width')",
            (),
            r"mine\.Net\.__init__: KeyError: 'width' \(at .*mine\.py:LINE, where num_classes is 10\)",
        ),
        (
            "return self.layers(x)",
            "return self.layers(x if x.is_meta else x.reshape(1, 7))",
            (),
            r"mine\.Net\.forward: RuntimeError: shape '\[1, 7\]' is invalid for input of size 4096 "
            r"\(at .*mine\.py:LINE, where x is float32 \[64, 1, 8, 8\]\)",
        ),
        (
            "return self.layers(x)",
            "return self.layers(x) if self.training else self.layer(x)",
            (),
            r"mine\.Net\.forward: AttributeError: .* no attribute .layer. \(at .*mine\.py:LINE, where x is float32",
        ),
        (
            "Net(num_classes).layers",
            "nn.Sequential(*Net(num_classes).layers, nn.BatchNorm1d(num_classes))",
            ("model.use=mine.sequential", "accumulate=64"),
            r"torch\.nn\.modules\.container\.Sequential: ValueError: Expected more than 1 value per channel",
        ),
        (
            "return torch.optim.Adam(model.parameters(), lr=1e-3)",
            "return torch.optim.Adam(model.parameters(), lr=-1)",
            (),
            r"mine\.adam: ValueError: Invalid learning rate: -1 \(at .*mine\.py:LINE, where model is Net\)",
        ),
        (
            "return nn.functional.cross_entropy(outputs, labels)",
            "return outputs.logits",
            (),
            r"mine.loss: AttributeError: .*LINE, where outputs is float32 \[2, 10\], labels is int64 \[2\]\)",
        ),
        ("pass\n", "raise KeyError\n", (), r"mine\.Nothing\.act: KeyError: KeyError \(at .*mine\.py:LINE\)"),
        (
            "job.before_step(self.act)",
            "job.nothing()",
            (),
            r"mine\.Nothing\.apply: AttributeError: .* \(at .*mine\.py:LINE",
        ),
        ("return digits()", "return digits", (), r"data\.use: a Dataset is wanted, this gives a function"),
        (
            "return digits()",
            "return open('nowhere')",
            (),
            r"mine\.data: FileNotFoundError: .*nowhere.* \(at .*mine\.py:LINE",
        ),
    ],
)
def test_an_error_in_the_users_code_is_one_line_with_its_place(trained, old, new, settings, line):
    code, err = trained(old, new, *(word for setting in settings for word in ("--set", setting)))
    assert code == 2, err
    assert re.fullmatch(f"kasoku: {line}.*\n", err), err
    assert "Traceback" not in err


def test_a_data_source_that_raises_while_it_is_read_is_named_with_its_place(trained):
    code, err = trained(
        "return torch.zeros(1, 8, 8, dtype=torch.uint8), 0", "return {}[i]", "--set", "data.use=mine.read"
    )
    assert code == 2
    assert re.search(
        r"item \d+: mine\.Photos\.__getitem__: KeyError: \d+ \(at .*mine\.py:LINE, where i is \d+\)", err
    ), err
    assert "Traceback" not in err


def test_the_option_shows_the_traceback_before_the_line(trained):
    code, err = trained("return self.layers(x)", "return self.layer(x)", "--traceback")
    assert code == 2
    assert "Traceback" in err
    assert 'mine.py", line LINE, in forward' in err
    assert re.fullmatch(r"kasoku: mine\.Net\.forward: AttributeError: .*", err.splitlines()[-1])


@pytest.mark.parametrize("only", ["self.training", "not self.training"])
@pytest.mark.parametrize("loss", ["kasoku.optim.cross_entropy", "torch.nn.functional.cross_entropy"])
def test_a_model_that_returns_no_tensor_is_told_what_is_wanted(trained, only, loss):
    new = f"return (self.layers(x),) if {only} else self.layers(x)"
    code, err = trained("return self.layers(x)", new, "--set", f"loss.use={loss}")
    assert code == 2
    assert "the model returns a tuple: one tensor of logits, (N, K), is wanted" in err or (
        "torch.nn.functional.cross_entropy: TypeError: " in err and "not tuple" in err
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "loss.use=torch.nn.CrossEntropyLoss",
            r'loss\.use = "torch\.nn\.CrossEntropyLoss": a function \(outputs, labels\)',
        ),
        (
            "optimizer.use=torch.optim.SGD",
            r"optimizer\.use = torch\.optim\.SGD: .*a function model -> optimizer is wanted",
        ),
        (
            "model={use='torch.nn.Linear', in_features=-3, out_features=1}",
            r"torch\.nn\.Linear: RuntimeError: .*negative",
        ),
        ("loss.use=torch.nn.functional.bilinear", r"loss|torch\.nn\.functional\.bilinear"),
    ],
)
def test_what_a_library_refuses_is_said_with_its_name(trained, setting, line):
    code, err = trained("pass", "pass", "--set", setting)
    assert code == 2, err
    assert re.match(f"kasoku: {line}", err), err
    assert err.count("\n") == 1


def test_too_few_outputs_are_said_before_the_start(trained, tmp_path):
    code, err = trained("nn.Linear(64, num_classes)", "nn.Linear(64, 5)")
    assert code == 2
    assert "mine.Net has fewer outputs than the data has classes (10)" in err
    assert not (tmp_path / "run").exists()


def test_outputs_without_a_class_are_said_in_a_line_and_never_predicted(trained, tmp_path, capsys):
    code, err = trained("nn.Linear(64, num_classes)", "nn.Linear(64, 12)")
    assert code == 0
    weights = load_file(tmp_path / "run" / "best.safetensors")
    next(x for x in weights.values() if x.shape == (12,))[11] = 100.0
    save_file(weights, tmp_path / "run" / "best.safetensors")
    (tmp_path / "run" / "manifest.json").unlink()
    assert err == "kasoku: mine.Net has 12 outputs, and the data has 10 classes: give it num_classes\n"
    photos = coloured_photos(tmp_path / "photos", classes=1, images=1)
    assert main(["predict", str(tmp_path / "run"), str(photos), "--allow", "mine", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["images"][0]["classes"]) == 5
    sys.modules.pop("mine")


@pytest.mark.parametrize("library", ["sympy", "sqlalchemy", "torchvision.io"])
def test_an_error_in_a_library_of_a_library_is_not_the_users(library):
    with pytest.raises(KeyError) as caught:
        exec(compile("raise KeyError('inside')", "lib.py", "exec"), {"__name__": library})
    error = caught.value.with_traceback(caught.tb.tb_next)  # without the frame of this test
    assert attributed(error) is error


def test_a_network_with_lazy_layers_trains(trained, tmp_path):
    code, err = trained("nn.Linear(64, num_classes)", "nn.LazyLinear(num_classes)")
    assert (code, err) == (0, "")
    assert main(["eval", str(tmp_path / "run"), "--allow", "mine"]) == 0
    sys.modules.pop("mine")


def test_an_error_of_kasokus_own_is_raised(trained, monkeypatch):
    monkeypatch.setattr("kasoku.training.trainer.updates", None)
    with pytest.raises(TypeError, match="NoneType"):
        trained("pass", "pass")


def test_errors_of_ours_and_of_the_machine_are_left_as_they_are():
    for error in (InputError("mine"), MemoryError(), ValueError("no traceback")):
        assert attributed(error) is error


def test_every_command_has_the_option(capsys):
    from kasoku.cli import VERBS

    for verb in [*VERBS.keys() - {"launch"}, "launch local"]:
        with pytest.raises(SystemExit):
            main([*verb.split(), "--help"])
        assert "--traceback" in capsys.readouterr().out, verb
