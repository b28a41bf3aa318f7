import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import made
from kasoku.core import InputError
from kasoku.data import cifar10, cifar100, digits, fashion_mnist, idx, mnist
from kasoku.data.datasets import binary
from kasoku.data.datasets.binary import CIFAR10, CIFAR100, load


def same(a, b):
    return a.images_NHWC.equal(b.images_NHWC) and a.labels_N.equal(b.labels_N)


# ---- digits


def test_digits_is_split_in_proportion_and_the_same_each_time():
    d = digits()
    assert (len(d.train), len(d.test), d.image_size, d.channels) == (1437, 360, (8, 8), 1)
    assert d.train.images_NHWC.dtype == torch.uint8
    assert d.train.images_NHWC.is_contiguous()
    assert (int(d.train.images_NHWC.min()), int(d.train.images_NHWC.max())) == (0, 255)
    whole_K = torch.bincount(torch.cat([d.train.labels_N, d.test.labels_N]))
    assert ((torch.bincount(d.test.labels_N) - whole_K * 360 / 1797).abs() <= 1).all()
    assert same(d.train, digits().train)
    assert not d.test.images_NHWC.equal(digits(seed=1).test.images_NHWC)


@pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="scikit-learn is not installed")
def test_digits_are_the_ones_scikit_learn_has():
    from sklearn.datasets import load_digits

    theirs, ours = load_digits(), digits()
    want = sorted(
        (image.astype(int).tobytes(), label) for image, label in zip(theirs.images, theirs.target, strict=True)
    )
    got = []
    for part in (ours.train, ours.test):
        back = (part.images_NHWC[..., 0].numpy().astype(int) * 16 + 127) // 255
        got += [(image.tobytes(), label) for image, label in zip(back, part.labels_N.tolist(), strict=True)]
    assert sorted(got) == want


def test_mean_and_std_are_measured_on_the_training_images():
    d = digits()
    values = d.train.images_NHWC.double() / 255
    assert d.mean[0] == pytest.approx(values.mean().item(), rel=1e-9)
    assert d.std[0] == pytest.approx(values.std(correction=0).item(), rel=1e-9)


# ---- CIFAR


@pytest.mark.parametrize("layout", [made.SMALL10, made.SMALL100], ids=["cifar10", "cifar100"])
def test_cifars_images_labels_and_names_are_those_of_its_files(tmp_path, layout):
    made.write_binary(layout, tmp_path / "b" / layout.folder)
    binary, inside = load(layout, str(tmp_path / "b")), load(layout, str(tmp_path / "b" / layout.folder))
    assert same(binary.train, inside.train)
    assert binary.classes == tuple(made.names(layout))
    _, pixels_N3HW, labels_N = next(made.pixels(layout))
    assert binary.train.images_NHWC[3].numpy().tolist() == pixels_N3HW[3].transpose(1, 2, 0).tolist()
    assert binary.train.labels_N[: len(labels_N)].tolist() == labels_N.tolist()
    assert binary.train.images_NHWC.is_contiguous()


def test_cifar_without_its_names_file_numbers_the_classes(tmp_path):
    made.write_binary(made.SMALL10, tmp_path / "x")
    (tmp_path / "x" / "batches.meta.txt").unlink()
    assert load(made.SMALL10, str(tmp_path / "x")).classes == tuple("0123456789")


def test_official_sizes_are_the_official_ones():
    assert CIFAR10.train_images * len(CIFAR10.train) == CIFAR100.train_images == 50_000
    assert (CIFAR10.label_bytes, CIFAR100.label_bytes) == (1, 2)


@pytest.mark.data
def test_real_cifar10_survives_the_binary_format(tmp_path, monkeypatch, real_data):
    mosaic = np.asarray(Image.open(real_data / "cifar10" / "test_00.webp").convert("RGB"))
    tiles_N3HW = mosaic.reshape(20, 32, 50, 32, 3).transpose(0, 2, 4, 1, 3).reshape(1000, 3, 32, 32)
    labels_N = np.fromfile(real_data / "cifar10" / "test_00.labels", np.uint8)
    record_NB = np.concatenate([labels_N[:, None], tiles_N3HW.reshape(1000, -1)], 1)
    for stem, part in zip((*CIFAR10.train, CIFAR10.test), np.split(record_NB[:600], 6), strict=True):
        part.tofile(tmp_path / f"{stem}.bin")
    monkeypatch.setattr(binary, "CIFAR10", made.replace(CIFAR10, train_images=100, test_images=100))
    d = cifar10(str(tmp_path))
    assert d.train.images_NHWC[51].numpy().tolist() == mosaic[32:64, 32:64].tolist()
    assert d.train.labels_N.tolist() == labels_N[:500].tolist()
    assert d.mean == pytest.approx((0.491, 0.482, 0.447), abs=0.03)


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def relabel(path, at, label):
    body = bytearray(path.read_bytes())
    body[at] = label
    path.write_bytes(body)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "data_batch_3.bin").unlink(), r"data_batch_3\.bin: missing; cifar10 needs data_batch_1\.bin"),
        (lambda f: cut(f / "test_batch.bin", 30_000), r"test_batch\.bin: 30000 bytes, expected 30730 \(10 records"),
        (lambda f: cut(f / "test_batch.bin", 9 * 3073), r"test_batch\.bin: 27657 bytes, expected 30730"),
        (
            lambda f: relabel(f / "data_batch_1.bin", 2 * 3073, 10),
            r"data_batch_1\.bin: image 2 has label 10, allowed are 0 to 9",
        ),
    ],
)
def test_a_damaged_cifar_binary_is_one_clear_line(tmp_path, damage, message):
    made.write_binary(made.SMALL10, tmp_path / "x")
    damage(tmp_path / "x")
    with pytest.raises(InputError, match=message) as caught:
        load(made.SMALL10, str(tmp_path / "x"))
    assert "\n" not in str(caught.value)


# ---- where data is looked for


def test_missing_data_names_the_files_and_folders_looked_for(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"looked for data_batch_1\.bin.*`kasoku data cifar10`.*give root=.*-bin>"):
        cifar10(str(tmp_path))
    with pytest.raises(InputError, match=r"cifar100: no data in .*train\.bin, test\.bin, which `kasoku data cifar100`"):
        cifar100(str(tmp_path))
    with pytest.raises(InputError, match=r"cifar10: no folder .*gone"):
        cifar10(str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"mnist: no data in .*train-images-idx3-ubyte.*plain or \.gz"):
        mnist(str(tmp_path))
    monkeypatch.delenv("KASOKU_DATA", raising=False)
    with pytest.raises(InputError, match=r"fashion_mnist: no root given and \$KASOKU_DATA is not set"):
        fashion_mnist()
    monkeypatch.setenv("KASOKU_DATA", str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"mnist: no folder .*gone/mnist \(from \$KASOKU_DATA\)"):
        mnist()


def test_without_a_root_the_folder_of_that_name_in_kasoku_data_is_read(tmp_path, monkeypatch):
    made.write_idx(tmp_path / "mnist" / "raw", packed=True)
    monkeypatch.setenv("KASOKU_DATA", str(tmp_path))
    assert same(mnist().train, idx(str(tmp_path / "mnist")).train)


# ---- IDX


def test_idx_plain_and_gz_are_equal(tmp_path):
    made.write_idx(tmp_path / "plain", packed=False)
    made.write_idx(tmp_path / "gz", packed=True)
    plain, packed = idx(str(tmp_path / "plain")), idx(str(tmp_path / "gz"), ("a", "b", "c"))
    assert same(plain.train, packed.train)
    assert same(plain.test, packed.test)
    assert plain.train.images_NHWC.shape == (30, 6, 5, 1)
    assert (plain.classes, packed.classes) == (("0", "1", "2"), ("a", "b", "c"))


def test_padding_puts_black_around_each_image(tmp_path):
    made.write_idx(tmp_path, packed=False)
    plain, padded = idx(str(tmp_path)), idx(str(tmp_path), pad=2)
    height, width = plain.image_size
    assert padded.image_size == (height + 4, width + 4)
    inner = padded.train.images_NHWC[:, 2:-2, 2:-2]
    assert torch.equal(inner, plain.train.images_NHWC)
    assert padded.train.images_NHWC.sum() == inner.sum()
    with pytest.raises(InputError, match="pad=-1: pixels on each side, 0 or more"):
        idx(str(tmp_path), pad=-1)


@pytest.mark.data
def test_real_fashion_mnist(real_data):
    d = fashion_mnist(str(real_data / "fashion_mnist"))
    assert (len(d.train), len(d.test), d.image_size, d.channels) == (60_000, 10_000, (28, 28), 1)
    assert torch.bincount(d.train.labels_N).tolist() == [6000] * 10
    assert d.classes[9] == "Ankle boot"
    assert d.train.labels_N[:5].tolist() == [9, 0, 0, 3, 0]
    assert d.mean == pytest.approx((0.2860,), abs=1e-4)
    assert d.std == pytest.approx((0.3530,), abs=1e-4)


IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def repack(path, change):
    path.write_bytes(made.gzip.compress(change(made.gzip.decompress(path.read_bytes()))))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / LABELS).unlink(), r"train-labels-idx1-ubyte: missing; idx needs train-images.*plain or \.gz"),
        (lambda f: cut(f / IMAGES, 400), "train-images-idx3-ubyte.gz: truncated or damaged gzip"),
        (lambda f: cut(f / IMAGES, -4), "truncated or damaged gzip"),
        (lambda f: relabel(f / IMAGES, 500, 0), "truncated or damaged gzip"),
        (lambda f: (f / IMAGES).write_bytes(b"<html>not found</html>"), "truncated or damaged gzip"),
        (
            lambda f: repack(f / IMAGES, lambda b: b[:-7]),
            r"only 893 bytes after the head, expected 900 for \(30, 6, 5\)",
        ),
        (lambda f: repack(f / IMAGES, lambda b: b + b"!"), "more bytes after the head, expected 900"),
        (lambda f: repack(f / IMAGES, lambda b: b[:9]), "starts with 00000803, expected 00000803.*truncated"),
        (lambda f: repack(f / IMAGES, lambda b: b""), "starts with nothing, expected 00000803"),
        (lambda f: repack(f / LABELS, lambda b: b"\0\0\x0d\1" + b[4:]), "starts with 00000d01, expected 00000801"),
        (
            lambda f: (f / LABELS).write_bytes(made.gzip.compress(made.idx_bytes(np.zeros(29)))),
            "30 images, but train-labels-idx1-ubyte.gz has 29 labels",
        ),
        (lambda f: repack(f / LABELS, lambda b: b[:12] + b"\7" + b[13:]), "image 4 has label 7, allowed are 0 to 2"),
        (
            lambda f: [(f / f"train-{n}.gz").write_bytes(made.gzip.compress(made.idx_bytes(a))) for n, a in EMPTY],
            "no images in it",
        ),
        (
            lambda f: (f / "t10k-images-idx3-ubyte.gz").write_bytes(
                made.gzip.compress(made.idx_bytes(np.zeros((10, 5, 5))))
            ),
            r"training images are \(6, 5\), test images \(5, 5\)",
        ),
    ],
)
def test_a_damaged_idx_file_is_one_clear_line(tmp_path, damage, message):
    made.write_idx(tmp_path, packed=True)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        idx(str(tmp_path), ("a", "b", "c"))
    assert "\n" not in str(caught.value)


EMPTY = (("images-idx3-ubyte", np.zeros((0, 6, 5))), ("labels-idx1-ubyte", np.zeros(0)))
