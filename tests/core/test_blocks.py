"""What the blocks of a model are."""

from torch import nn

from kasoku.core.blocks import blocks


def test_stages_are_opened_and_all_parameters_are_in_some_block():
    stage = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(2, 2))
    model.add_module("stage", stage)
    model.add_module("head", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    found = blocks(model)
    assert [name for name, _ in found] == ["stem", "stage.0", "stage.1", "head"]
    inside = {p for _, block in found for p in block.parameters()}
    assert inside == set(model.parameters())
