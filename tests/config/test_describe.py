"""The settings that `kasoku list NAME` and the manual show are complete, and their ranges are the ones checked."""

import re

import pytest
import torch
from torch import nn

from kasoku.config import describe
from kasoku.config.recipe import Recipe, from_document
from kasoku.config.toml import Factory
from kasoku.core import InputError

LISTED = [(name, thing) for section in describe.listed().values() for name, thing in section.items()]
NUMBERS = {"number": 0.001, "integer": 1}  # type: the smallest change that leaves a range
REQUIRED = {
    "Pretrained": {"weights": "w.pth"},
    "LowResolution": {"side": 8, "until": 1.0},
    "SkipEasy": {"share": 0.4},
}
RECIPE = {
    "model": {"use": "kasoku.models.cnn11"},
    "data": {"use": "kasoku.data.digits"},
    "optimizer": {"use": "kasoku.optim.sgd"},
    "epochs": 1,
    "batch": 8,
}


def numbers():
    """(name, thing, setting) of all settings that are numbers, but of those that files and addresses belong to."""
    for name, thing in LISTED:
        if not name.startswith("kasoku.data.") or isinstance(thing, type):
            yield from ((name, thing, s) for s in describe.settings_of(thing) if s.type in NUMBERS)


def outside(setting):
    """The values just outside the range that a setting's line states; None where it states none."""
    step = NUMBERS[setting.type]
    if match := re.search(r"from (\d+) to below (\d+)", setting.line):
        return [-step, float(match[2])]
    if match := re.search(r"from (\d+) to (\d+)", setting.line):
        return [int(match[1]) - step, int(match[2]) + step]
    if match := re.search(r"above (\d+)(?: and (at most|below) ([\d,]+))?", setting.line):
        most = int(match[3].replace(",", "")) + step * (match[2] == "at most") if match[3] else None
        return [int(match[1]), *([most] if most else [])]
    if match := re.search(r"at least (\d+)|(\d+) or more", setting.line):
        return [int(match[1] or match[2]) - step] if not re.search(r"at least 1.* 0: ", setting.line) else [-step]
    if match := re.search(r"\bbelow (\d+)", setting.line):
        return [float(match[1])]
    return [] if "any number" in setting.line or "any multiple" in setting.line else None


def make(name, thing, values):
    if thing is Recipe:
        return from_document({**RECIPE, **values})
    made = Factory(name, {**REQUIRED.get(thing.__name__, {}), **values})
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    if name.startswith("kasoku.models.") and not isinstance(thing, type):
        with torch.device("meta"):  # whose weights take no time
            return made()
    return made(model) if name.startswith("kasoku.optim.") and not isinstance(thing, type) else made()


def test_every_setting_has_its_line_and_every_name_its_summary():
    missing = [f"{name}.{s.name}" for name, thing in LISTED for s in describe.settings_of(thing) if not s.line]
    missing += [name for name, thing in LISTED if not describe.summary_of(thing)]
    assert not missing, "write them under Args: of the docstring"


def test_every_number_states_its_range():
    assert not [f"{name}.{s.name}: {s.line}" for name, _, s in numbers() if outside(s) is None]


@pytest.mark.parametrize(("name", "thing", "setting"), [pytest.param(*x, id=f"{x[0]}.{x[2].name}") for x in numbers()])
def test_a_number_outside_the_stated_range_is_refused(name, thing, setting):
    for value in outside(setting):
        with pytest.raises(InputError):
            make(name, thing, {setting.name: value})
