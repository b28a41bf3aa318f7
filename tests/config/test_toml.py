"""Recipes are strict: every mistake is one line that names the path and what to do."""

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import pytest

from kasoku.config.toml import Factory, override, parse, table
from kasoku.core import Constant, InputError, Linear, Schedule, Technique
from kasoku.optim import EMA, Rate, SGDSettings


@dataclass(frozen=True)
class Inner:
    size: int = 1
    rate: float = 0.5
    on: bool = False
    kind: Literal["fast", "slow"] = "fast"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InputError(f"size={self.size}: 0 or more")


@dataclass(frozen=True)
class Outer:
    batch: int
    inner: Inner = Inner()
    rule: Factory = Factory("kasoku.optim.sgd")  # noqa: RUF009 - frozen
    schedule: Schedule = Constant()  # noqa: RUF009 - frozen
    techniques: tuple[Technique, ...] = ()
    widths: tuple[int, ...] = (1, 2)
    pair: tuple[float, float] = (0.0, 1.0)
    note: str | None = None
    plain: dict = field(default_factory=dict)


BAD = {
    "unknown key, nearest name": ({"batch": 1, "inner": {"sise": 2}}, "inner.sise: no such key: did you mean size?"),
    "unknown key, all names": (
        {"batch": 1, "inner": {"zzz": 2}},
        "inner.zzz: no such key: one of kind, on, rate, size",
    ),
    "missing": ({}, "batch: missing, and it has no default"),
    "true is not an integer": ({"batch": True}, "batch = true: an integer is wanted, this is true or false"),
    "1 is not true": ({"batch": 1, "inner": {"on": 1}}, "inner.on = 1: true or false is wanted, this is an integer"),
    "a number in quotes": (
        {"batch": 1, "inner": {"rate": "1"}},
        'inner.rate = "1": a number is wanted, this is a string',
    ),
    "1.5 is not an integer": ({"batch": 1.5}, "batch = 1.5: an integer is wanted, this is a number"),
    "impossible": ({"batch": 1, "inner": {"size": -1}}, "inner: size=-1: 0 or more"),
    "not a choice": ({"batch": 1, "inner": {"kind": "fest"}}, 'inner.kind = "fest": one of "fast", "slow"'),
    "a value for a table": ({"batch": 1, "inner": 3}, "inner = 3: a table is wanted, this is an integer"),
    "a value for a list": ({"batch": 1, "widths": 3}, "widths = 3: a list is wanted, this is an integer"),
    "a wrong item": ({"batch": 1, "widths": [1, "2"]}, 'widths[1] = "2": an integer is wanted, this is a string'),
    "too many items": ({"batch": 1, "pair": [1, 2, 3]}, "pair: 2 items are wanted, there are 3"),
    "use misspelt": (
        {"batch": 1, "rule": {"use": "kasoku.optim.sdg"}},
        'rule.use = "kasoku.optim.sdg": no such name: did you mean sgd?',
    ),
    "use missing": (
        {"batch": 1, "rule": {"lr": 1}},
        'rule.use: missing; it names what to use, such as use = "kasoku.models.resnet50"',
    ),
    "schedule without use": (
        {"batch": 1, "schedule": {"warmup": 1}},
        'schedule.use: missing; it names what to use, such as use = "kasoku.models.resnet50"',
    ),
    "no module": (
        {"batch": 1, "rule": {"use": "nowhere.sgd"}},
        'rule.use = "nowhere.sgd": there is no module nowhere on the import path; if the run used its own, add '
        "--allow nowhere",
    ),
    "not dotted": (
        {"batch": 1, "rule": {"use": "sgd"}},
        'rule.use = "sgd": a dotted name such as kasoku.models.resnet50 is wanted',
    ),
    "not callable": (
        {"batch": 1, "rule": {"use": "torch.nn.functional.math"}},
        'rule.use = "torch.nn.functional.math": a class or function is wanted, this is module',
    ),
    "a factory's key": (
        {"batch": 1, "rule": {"use": "kasoku.optim.sgd", "momentun": 0.9}},
        "rule.momentun: no such key: did you mean momentum?",
    ),
    "a factory's type": (
        {"batch": 1, "rule": {"use": "kasoku.optim.sgd", "nesterov": 1}},
        "rule.nesterov = 1: true or false is wanted, this is an integer",
    ),
    "another kind of thing": (
        {"batch": 1, "schedule": {"use": "kasoku.optim.EMA"}},
        'schedule.use = "kasoku.optim.EMA": a Schedule is wanted, this is EMA',
    ),
    "in a list of tables": (
        {"batch": 1, "techniques": [{"use": "kasoku.optim.EMA", "decay": 2.0}]},
        "techniques[0]: decay=2.0: at least 0 and below 1",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_with_its_path(name: str):
    document, line = BAD[name]
    with pytest.raises(InputError) as error:
        parse(Outer, document)
    assert str(error.value) == line


def test_a_document_comes_back_as_it_was():
    outer = Outer(
        batch=8,
        inner=Inner(rate=2.0, kind="slow"),
        rule=Factory("kasoku.optim.muon", {"lr": 0.1, "rest": {"bias_lr": 3}}),
        schedule=Linear(epochs=3),
        techniques=(EMA(decay=0.9), Rate(Linear(epochs=2, warmup=1))),
        note="x",
    )
    assert outer.rule.keys["rest"] == SGDSettings(bias_lr=3.0)
    assert parse(Outer, table(outer)) == outer
    assert table(outer)["techniques"][1]["schedule"]["use"] == "kasoku.core.schedule.Linear"
    assert "note" not in table(Outer(batch=1))


def test_an_integer_is_a_number():
    made = parse(Outer, {"batch": 1, "inner": {"rate": 2}}).inner.rate
    assert made == 2.0
    assert isinstance(made, float)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("batch=256", ("batch",), 256),
        ("inner.rate=1e-3", ("inner", "rate"), 1e-3),
        ("inner.on=true", ("inner", "on"), True),
        ("inner.kind=slow", ("inner", "kind"), "slow"),
        ('note="a=b"', ("note",), "a=b"),
        ("flag=True", ("flag",), True),
        ("widths=[1, 2]", ("widths",), [1, 2]),
        ("techniques.0.decay=0.5", ("techniques", 0, "decay"), 0.5),
        ("new.table=1", ("new", "table"), 1),
        ("techniques.1.use=kasoku.optim.Ghost", ("techniques", 1, "use"), "kasoku.optim.Ghost"),
        ("techniques.1={use='other'}", ("techniques", 1), {"use": "other"}),
        ("points.0.batch=8", ("points", 0, "batch"), 8),
        ("inner.widths.0=8", ("inner", "widths", 0), 8),
    ],
)
def test_set_reaches_every_place(setting: str, path: tuple[str | int, ...], value: object):
    document: dict = {"batch": 1, "inner": {}, "techniques": [{"use": "kasoku.optim.EMA"}]}
    override(document, setting)
    at: object = document
    for key in path:
        at = at[key]  # type: ignore[index]
    assert at == value


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("batch", "--set batch: path=value is wanted, such as --set batch=256"),
        ("=1", "--set =1: path=value is wanted, such as --set batch=256"),
        ("batch.x=1", "--set batch.x=1: batch is a value, not a table"),
        ("techniques.3.x=1", "--set techniques.3.x: 3 is no index of a list of 1: 0 to 1; that adds one"),
        ("none.1.x=1", "--set none.1.x: 1 is no index of a list of 0: 0 to 0; that adds one"),
    ],
)
def test_a_wrong_set_is_one_line(setting: str, line: str):
    with pytest.raises(InputError) as error:
        override({"batch": 1, "techniques": [{}], "none": []}, setting)
    assert str(error.value) == line


def test_a_factory_is_called_with_the_rest_and_names_what_lacks():
    from contracts import Net

    optimizer = Factory("kasoku.optim.sgd", {"lr": 0.3})(Net(), lr=9.0, colour="red")
    assert optimizer.param_groups[0]["lr"] == 0.3
    with pytest.raises(InputError, match=r"kasoku.optim.sgd: missing a required argument: 'model'"):
        Factory("kasoku.optim.sgd")()


def test_naming_another_thing_says_whose_the_other_arguments_are_and_how_to_replace_the_table():
    document = {"model": {"use": "kasoku.models.cifarnet", "widths": [8], "norm_momentum": 0.1}}
    with pytest.raises(InputError) as refused:
        override(document, "model.use=kasoku.models.resnet18")
    assert "widths, norm_momentum in [model] are of kasoku.models.cifarnet" in str(refused.value)
    setting = re.search(r"--set '(.*)'$", str(refused.value))[1]
    override(document, setting)
    assert document == {"model": {"use": "kasoku.models.resnet18"}}


@pytest.mark.parametrize("use", ["kasoku.models.cifarnet", "kasoku.models.cnn11"])  # itself; one with the same argument
def test_a_table_whose_arguments_fit_keeps_them(use):
    document = {"model": {"use": "kasoku.models.cifarnet", "widths": [8]}}
    override(document, f"model.use={use}")
    assert document == {"model": {"use": use, "widths": [8]}}


def test_a_torchvision_of_another_build_is_said_with_both_versions(monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    versions = {"torch": "0.0+cpu", "torchvision": "1.0+cpu"}
    found = [SimpleNamespace(name=name, version=version) for name, version in versions.items()]
    monkeypatch.setattr("kasoku.config.toml.distributions", lambda: found)
    monkeypatch.setattr("importlib.import_module", broken)
    line = r"nms does not exist \(torch 0\.0\+cpu; torchvision 1\.0\+cpu\): install the torchvision built for this"
    with pytest.raises(InputError, match=line):
        Factory("timm.create_model", {"model_name": "resnet18"})
