import io
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kasoku.core import InputError
from kasoku.data import find_images, folder, loader, read_image, shards
from kasoku.data.decode import native
from kasoku.data.decode.decode import crop, decode
from kasoku.data.packs.writer import pack
from kasoku.data.remote.store import Store


@pytest.fixture
def tree(tmp_path):
    """Root with two classes of ten images."""
    for name in ("cat", "dog"):
        fill(tmp_path / "photos" / name, 10)
    return tmp_path / "photos"


def fill(where, count):
    where.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(where / f"{number:02}.png")


def test_class_folders_are_split_in_proportion_by_file_names_alone(tree, tmp_path):
    d = folder(str(tree), size=64, validation=0.2)
    assert (d.classes, len(d.train), len(d.test), d.image_size) == (("cat", "dog"), 16, 4, (64, 64))
    assert torch.bincount(d.test.labels_N).tolist() == [2, 2]
    assert not set(d.train.paths) & set(d.test.paths)
    moved = tmp_path / "moved"
    os.rename(tree, moved)
    again = folder(str(moved), validation=0.2)
    assert [p.replace("/moved/", "/photos/") for p in again.test.paths] == list(d.test.paths)
    assert folder(str(moved), validation=0.2, seed=1).test.paths != again.test.paths


@pytest.mark.parametrize("away", ["val", "valid", "validation", "test"])
def test_train_and_validation_folders_are_taken_as_they_are(tree, tmp_path, away):
    for name in ("cat", "dog"):
        (tmp_path / "set" / "train").mkdir(parents=True, exist_ok=True)
        os.rename(tree / name, tmp_path / "set" / "train" / name)
        fill(tmp_path / "set" / away / name, 3)
    d = folder(str(tmp_path / "set"))
    assert (len(d.train), len(d.test)) == (20, 6)
    assert all(f"/{away}/" in path for path in d.test.paths)
    assert all(f"/{d.classes[label]}/" in p for p, label in zip(d.train.paths, d.train.labels_N.tolist(), strict=True))


def test_train_without_validation_is_split(tmp_path):
    for name in ("a", "b"):
        fill(tmp_path / "train" / name, 5)
    (tmp_path / "test").mkdir()  # unlabelled images lie flat in many: no classes, no validation part
    d = folder(str(tmp_path))
    assert (len(d.train), len(d.test)) == (8, 2)


def test_images_for_validation_without_class_folders_are_named(tmp_path, capsys):
    for name in ("a", "b"):
        fill(tmp_path / "train" / name, 5)
    fill(tmp_path / "val", 2)
    assert len(folder(str(tmp_path)).test) == 2
    assert "val: its images are in no class folders, so they are not used" in capsys.readouterr().err


@pytest.mark.parametrize("names", [("bus", "train"), ("test_negative", "test_positive"), ("not_valid", "valid")])
def test_a_class_may_be_called_as_a_part_is(tmp_path, names):
    for name in names:
        fill(tmp_path / name, 5)
    assert folder(str(tmp_path)).classes == names


def test_parts_with_other_names_and_one_class_alone_are_named(tmp_path, capsys):
    for part in ("Testing", "Training"):
        fill(tmp_path / "set" / part / "a", 5)
    with pytest.raises(InputError, match=r"parts are called train and val .*, not Testing, Training"):
        folder(str(tmp_path / "set"))
    folder(str(tmp_path / "set" / "Training"))
    assert "Training: only one class (a); classification needs two or more" in capsys.readouterr().err


def test_hidden_and_other_files_are_left_out_and_endings_ignore_case(tree):
    for name in (".hidden.png", "notes.txt", "00.JPEG", "01.WebP"):
        (tree / "cat" / name).write_bytes(b"")
    (tree / ".git").mkdir()
    d = folder(str(tree))
    assert d.classes == ("cat", "dog")
    assert len(d.train) + len(d.test) == 22


def test_each_start_sees_what_has_changed_in_a_folder(tree):
    folder(str(tree))
    fill(tree / "cow", 4)
    assert folder(str(tree)).classes == ("cat", "cow", "dog")
    (tree / "cow" / "00.png").unlink()
    d = folder(str(tree))
    assert len(d.train) + len(d.test) == 23
    for file in (tree / "cow").iterdir():
        file.unlink()
    (tree / "cow").rmdir()
    assert folder(str(tree)).classes == ("cat", "dog")


def one_class(tree):
    (tree / "void").mkdir()
    (tree / "void" / "readme.txt").write_text("")


def val_only(tree):
    for name in ("train/a", "val/a", "val/zebra"):
        fill(tree / name, 2)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (one_class, {}, r"void: a class folder with no image \(\.jpg .*\); add some or remove it"),
        (val_only, {}, "val/zebra: a class that .*train does not have"),
        (lambda tree: (tree / "train").mkdir(), {}, "train: no class folders in it; expected"),
        (lambda tree: None, {"size": 0}, "size=0: at least 1 pixel"),
        (lambda tree: None, {"validation": 0.0}, "validation=0.0: more than 0 and less than 1"),
    ],
)
def test_a_wrong_tree_is_one_clear_line(tree, change, settings, message):
    change(tree)
    with pytest.raises(InputError, match=message):
        folder(str(tree), **settings)


def test_no_folder_no_class_and_single_images_are_clear_lines(tmp_path):
    with pytest.raises(InputError, match=r"root=.*gone: no such folder"):
        folder(str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"data\.root is not given"):
        folder("")
    fill(tmp_path / "flat", 2)
    with pytest.raises(InputError, match="flat: no class folders in it"):
        folder(str(tmp_path / "flat"))
    fill(tmp_path / "one" / "a", 1)
    with pytest.raises(InputError, match="no class has two images"):
        folder(str(tmp_path / "one"))


def test_find_images_walks_a_folder_and_takes_a_file_as_it_is(tree):
    fill(tree / ".cache", 1)
    (tree / "notes.txt").write_text("")
    assert [str(path.relative_to(tree)) for path in find_images(tree)][:2] == ["cat/00.png", "cat/01.png"]
    assert len(find_images(tree)) == 20
    assert find_images(tree / "notes.txt") == [tree / "notes.txt"]
    empty = tree / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no image in it"):
        find_images(empty)
    with pytest.raises(InputError, match="no such file or folder"):
        find_images(tree / "gone")


@pytest.mark.data
def test_real_imagenette_has_its_classes_and_counts(real_data):
    d = folder(str(real_data / "imagenette224"))
    assert (len(d.classes), len(d.train), len(d.test)) == (10, 1700, 600)
    assert d.classes[0] == "n01440764"
    assert torch.bincount(d.train.labels_N).tolist() == [170] * 10


# ---- far away


@pytest.fixture
def far():
    """A file system in memory that fsspec reaches at memory://far."""
    memory = pytest.importorskip("fsspec", reason="fsspec is not installed: no data far away").filesystem("memory")
    yield memory
    memory.rm("/far", recursive=True)


def upload(far, tree, where):
    for file in tree.rglob("*"):
        if file.is_file():
            far.pipe(f"{where}/{file.relative_to(tree)}", file.read_bytes())


@pytest.mark.parametrize("parts", [("",), ("train", "val")])
def test_a_folder_far_away_gives_the_same_classes_split_and_pixels(tmp_path, monkeypatch, far, parts):
    for part in parts:
        for name in ("cat", "dog"):
            fill(tmp_path / "photos" / part / name, 10)
            fill(tmp_path / "photos" / part / name / "nested", 1)
            (tmp_path / "photos" / part / name / "notes.txt").write_text("")
    fill(tmp_path / "photos" / ".hidden", 1)
    upload(far, tmp_path / "photos", "/far/photos")
    monkeypatch.setenv("BUCKET", "memory://far")
    here, there = folder(str(tmp_path / "photos"), 8), folder("$BUCKET/photos/", 8)
    assert (there.name, there.classes, there.index()) == ("photos", here.classes, here.index())
    for split in ("train", "test"):
        (x_NCHW, y_N), (z_NCHW, w_N) = (next(iter(loader(d, split, 4))) for d in (here, there))
        assert x_NCHW.equal(z_NCHW)
        assert y_N.equal(w_N)
    assert there.train.read(0) == here.train.read(0)


def test_a_wrong_tree_far_away_is_one_clear_line(tree, far):
    upload(far, tree, "/far/flat")
    far.pipe("/far/flat/void/readme.txt", b"")
    with pytest.raises(InputError, match=r"memory://far/flat/void: a class folder with no image"):
        folder("memory://far/flat")
    far.pipe("/far/empty/00.png", b"")
    with pytest.raises(InputError, match=r"memory://far/empty: no class folders in it"):
        folder("memory://far/empty")


def test_a_file_gone_far_away_is_told_by_its_name(tree, far):
    upload(far, tree, "/far/photos")
    d = folder("memory://far/photos")
    far.rm(f"/far/photos/{d.train.name(3)}")
    with pytest.raises(InputError, match=d.train.name(3)):
        d.train.read(3)


def test_no_more_than_cache_bytes_of_a_folder_far_away_are_kept(tree, far, tmp_path):
    upload(far, tree, "/far/photos")
    for cache_bytes, copies in ((0, 0), (3 * 4096, 3), (2**30, 18)):
        d = folder("memory://far/photos", cache=str(tmp_path / f"{cache_bytes}"), cache_bytes=cache_bytes)
        for _ in range(2):
            assert all(d.train.read(i) == (tree / d.train.name(i)).read_bytes() for i in range(18))
        assert len(list((tmp_path / f"{cache_bytes}").rglob("*.piece"))) == copies
    with pytest.raises(InputError, match="cache_bytes=-1: 0 bytes or more"):
        folder("memory://far/photos", cache_bytes=-1)


@pytest.mark.timeout(30)  # a pipe that is read waits for ever
@pytest.mark.parametrize("read", ["train", "pack", "predict"])
def test_only_regular_files_are_images(tree, tmp_path, capsys, read):
    kind = next(p for p in tree.iterdir() if p.is_dir())
    os.mkfifo(kind / "pipe.jpg")
    (kind / "zero.jpg").symlink_to("/dev/zero")
    (kind / "itself.jpg").symlink_to(kind / "itself.jpg")
    (kind / "loop").symlink_to(kind / "loop")
    before = len(list(kind.glob("*.png")))
    if read == "predict":
        found = find_images(kind)
        for name, reason in (("pipe", "not a regular file"), ("zero", "not a regular file"), ("itself", "symbolic")):
            for open_image in (decode, lambda path: read_image(Path(path), (8, 8))):
                with pytest.raises(InputError, match=rf"{name}\.jpg: cannot be decoded as an image \(.*{reason}"):
                    open_image(str(kind / f"{name}.jpg"))
    elif read == "train":
        d = folder(str(tree))
        found = [p for split in (d.train, d.test) for p in split.paths if Path(p).parent == kind]
    else:
        pack(str(tree), str(tmp_path / "pack"), side=16, quiet=True)
        d = shards(str(tmp_path / "pack"))
        found = [n for split in (d.train, d.test) for n in split.names if n.startswith(f"{kind.name}/")]
    assert len(found) == before
    if read != "predict":
        lines = capsys.readouterr().err
        assert all(f"{kind}/{name}.jpg: not a regular file; left out" in lines for name in ("pipe", "zero", "itself"))


def test_a_pipe_in_place_of_a_photo_is_named_at_once(tree):
    split = folder(str(tree)).train
    os.unlink(split.paths[0])
    os.mkfifo(split.paths[0])
    with pytest.raises(InputError, match=r"cannot be read \(not a regular file\)"):
        split.read(0)


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    Image.new("L", (9000, 9000)).save(tmp_path / "bomb.png")
    with pytest.raises(InputError, match=r"9,000 x 9,000 pixels, more than 67,108,864: .*KASOKU_MAX_PIXELS"):
        decode((tmp_path / "bomb.png").read_bytes(), name="bomb.png")
    monkeypatch.setenv("KASOKU_MAX_PIXELS", "100000000")
    assert decode(str(tmp_path / "bomb.png"), 8).shape == (8, 8, 3)


def encoded(kind):
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_limit_of_pixels_holds_for_each_decoder(monkeypatch, kind):
    data, out_HWC = encoded(kind), np.empty((8, 8, 3), np.uint8)
    for limit, by_pillow in ((4095, None), (4095, 1000), (4096, None), (4096, 1000)):
        monkeypatch.setenv("KASOKU_MAX_PIXELS", str(limit))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", by_pillow)  # Pillow refuses twice as many
        for read in (partial(crop, box=lambda *_: (0, 0, 64, 64), out_HWC=out_HWC), decode):
            if limit == 4096:
                read(data)
            else:
                with pytest.raises(
                    InputError, match=r"(4096 |64 x 64 )pixels.*: if you trust it, set KASOKU_MAX_PIXELS"
                ):
                    read(data)


def test_pillow_decodes_what_is_too_large_for_our_own_decoder(monkeypatch):
    monkeypatch.setenv("KASOKU_MAX_PIXELS", "5000")
    monkeypatch.setattr(native, "_MOST", 4095)
    assert native.jpeg_size(encoded("JPEG")) is None
    out_HWC = np.ones((8, 8, 3), np.uint8)
    crop(encoded("JPEG"), lambda *_: (0, 0, 64, 64), out_HWC)
    assert not out_HWC.any()


def test_the_limit_of_pixels_of_other_programs_is_never_lowered(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    for limit, want in (("", 10**6), ("100000", 10**6), ("10000000", 10**7)):
        monkeypatch.setenv("KASOKU_MAX_PIXELS", limit)
        decode(encoded("PNG"))
        assert want == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("text", ["64M", "0", "-5", "1e6", "1" * 5000])
def test_a_limit_that_is_no_number_is_one_line(tree, monkeypatch, text):
    monkeypatch.setenv("KASOKU_MAX_PIXELS", text)
    message = rf"^KASOKU_MAX_PIXELS={text[:20]}.*: a whole number above 0 is wanted$"
    for read in (lambda: folder(str(tree)), lambda: shards(str(tree)), lambda: decode(encoded("PNG"))):
        with pytest.raises(InputError, match=message):
            read()


@pytest.mark.parametrize("kind", ["images", "shards"])
def test_names_left_out_are_few_printable_and_of_what_is_wanted(tree, capsys, kind):
    ending = ".tar" if kind == "shards" else ".png"
    names = [f"bell\a{number}{ending}" for number in range(5)]
    for name in (*names, "socket.other"):
        (tree / "cat" / name).symlink_to("gone")
    if kind == "images":
        folder(str(tree))
    else:
        Store(str(tree)).list_files()
    shown = [f"kasoku: {tree}/cat/bell?{number}{ending}: not a regular file; left out" for number in range(3)]
    assert capsys.readouterr().err.splitlines() == [*shown, f"kasoku: {tree}/cat: 2 more are left out"]
