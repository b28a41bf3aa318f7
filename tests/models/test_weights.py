"""Weights come in from both formats, only as tensors, only into their model; frozen blocks stay as they are."""

import copy
import os
import pickle
import re

import pytest
import safetensors.torch
import torch
from torch import nn

from kasoku import models
from kasoku.core import Job
from kasoku.core.errors import InputError
from kasoku.models.resnet import BasicBlock, ResNet


def net(num_classes=10, **options):
    return models.cifarnet(num_classes, widths=(8, 8, 8), **options)


def save(state, path):
    safetensors.torch.save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return path


def same(model, state, but=()):
    own = model.state_dict()
    return all(torch.equal(own[name], state[name]) for name in own if name not in but)


@pytest.fixture
def state():
    return net().state_dict()


@pytest.mark.parametrize("file", ["w.safetensors", "w.pth"])
def test_weights_round_trip_in_both_formats(tmp_path, state, file):
    model = net()
    assert models.load(model, save(state, tmp_path / file)) == []
    assert same(model, state)


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_and_prefixes_of_checkpoints_are_taken_off(tmp_path, state, wrapper, prefix):
    content = {wrapper: {prefix + name: tensor for name, tensor in state.items()}, "epoch": 3}
    model = net()
    models.load(model, save(content, tmp_path / "w.pth"))
    assert same(model, state)


def test_another_number_of_classes_keeps_a_fresh_head_and_says_so(tmp_path):
    state = models.resnet18(num_classes=10).state_dict()
    model = models.resnet18(num_classes=3)
    fresh = copy.deepcopy(model.fc.state_dict())
    replaced = models.load(model, save(state, tmp_path / "w.safetensors"))
    assert replaced == ["fc.weight", "fc.bias"]
    assert same(model, state, but=replaced)
    assert torch.equal(model.fc.weight, fresh["weight"])


def test_a_model_on_the_meta_device_is_compared_without_a_warning(tmp_path, state, recwarn):
    path = save(state, tmp_path / "w.pth")
    with torch.device("meta"):
        assert models.load(net(3), path) == ["head.weight"]
        with pytest.raises(InputError, match="not weights of this PlainCNN"):
            models.load(models.cnn11(), path)
    assert not recwarn.list


def test_files_without_batch_counts_load(tmp_path):
    state = {n: t for n, t in models.resnet18().state_dict().items() if not n.endswith("num_batches_tracked")}
    model = models.resnet18()
    models.load(model, save(state, tmp_path / "w.pth"))
    assert torch.equal(model.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path, state):
    model = models.cifar_vgg16()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"28 missing: features\.0\.weight.*, \.\.\..*not in the model: ") as caught:
        models.load(model, save({n: t for n, t in state.items() if "head" not in n}, tmp_path / "w.pth"))
    assert "\n" not in str(caught.value)
    assert same(model, before)


def test_other_widths_are_refused_by_name_and_shape(tmp_path, state):
    with pytest.raises(InputError, match=re.escape("whitening.weight (24x3x2x2, the model has 8x1x2x2)")):
        models.load(net(in_channels=1), save(state, tmp_path / "w.safetensors"))


@pytest.mark.parametrize("file", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.999])
def test_truncated_files_are_refused(tmp_path, state, file, kept):
    path = save(state, tmp_path / file)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(InputError, match=r"cannot be read as weights") as caught:
        models.load(net(), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [{}, {"a": 1}, [1, 2], torch.ones(2), {"state_dict": {}}])
def test_files_without_a_state_dict_are_refused(tmp_path, content):
    with pytest.raises(InputError, match="holds no state_dict"):
        models.load(net(), save(content, tmp_path / "w.pth"))


def test_no_file_and_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        models.load(net(), tmp_path / "nowhere.pth")
    (tmp_path / "photo.pth").write_bytes(b"\xff\xd8\xff\xe0 not weights")
    with pytest.raises(InputError, match="cannot be read as weights"):
        models.load(net(), tmp_path / "photo.pth")


@pytest.mark.parametrize(
    "writer", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))]
)
def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path, state, writer):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "w.pth"
    writer({**state, "head.weight": Malicious()}, path)
    with pytest.raises(InputError, match="cannot be read as weights"):
        models.load(net(), path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet50", ["conv1+bn1", "layer1", "layer2", "layer3", "layer4"]),
        ("vgg16", ["features.0+features.2", "features.5+features.7", "features.10+features.12+features.14"]),
        ("alexnet", ["features.0", "features.3", "features.6+features.8+features.10"]),
        ("cnn11", ["features.0+features.1", "features.4+features.5+features.7+features.8"]),
        ("cifarnet", ["whitening", "group1", "group2", "group3"]),
    ],
)
def test_blocks_are_the_stages_of_the_network(name, blocks):
    with torch.device("meta"):
        model = getattr(models, name)()
    assert models.freeze(model, len(blocks)) == blocks
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    starts = tuple(part + "." for block in blocks for part in block.split("+"))
    assert frozen >= {n for n, _ in model.named_parameters() if n.startswith(starts)}
    assert all(p.requires_grad for p in list(model.children())[-1].parameters())


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, pickled])
def test_frozen_blocks_keep_weights_and_statistics_in_training(copied):
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1), 2, 3, stem="imagenet")
    models.freeze(model, 2)
    model = copied(model).train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    optimizer.step()
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert not any(name.startswith(("conv1", "bn1", "layer1")) for name in changed)
    assert {"layer2.0.bn1.running_mean", "layer2.0.conv1.weight", "fc.weight"} <= changed
    assert not model.bn1.training
    assert model.layer2.training


def test_a_plain_sequence_freezes_too():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    assert models.freeze(model, 1) == ["0+1"]
    assert models.freeze(nn.Sequential(nn.Linear(2, 2)), 0) == []


@pytest.mark.parametrize("blocks", [-1, 6])
def test_more_blocks_than_there_are_is_refused(blocks):
    with torch.device("meta"):
        model = models.resnet18()
    with pytest.raises(InputError, match=rf"freeze={blocks}: ResNet has 5 blocks before its head .*give 0 to 5"):
        models.freeze(model, blocks)


def test_pretrained_loads_and_freezes_and_lets_train_again_when_taken_off(tmp_path, state):
    model = net()
    job = Job(model, torch.optim.SGD(model.parameters(), 0.1))
    job.apply(models.Pretrained(weights=str(save(state, tmp_path / "w.pth")), freeze=2))
    assert same(model, state)
    assert not model.group1.conv1.weight.requires_grad
    assert model.group2.conv1.weight.requires_grad
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.training for norm in norms} == {True, False}
    job.close()
    assert all(norm.training for norm in norms)
    assert not any("train" in vars(norm) for norm in norms)
    assert model.group1.conv1.weight.requires_grad
    assert not model.whitening.weight.requires_grad
