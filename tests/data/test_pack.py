import gc
import io
import json
import os
import shutil
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.web import serving, web
from kasoku.core import InputError
from kasoku.data import folder, loader
from kasoku.data.decode.decode import decode
from kasoku.data.loading.shuffle import order
from kasoku.data.packs import writer as pack_module
from kasoku.data.packs.reader import shards
from kasoku.data.packs.writer import Form, pack, verify
from kasoku.data.remote.cache import Pieces
from kasoku.data.remote.store import Store

shards_module = sys.modules["kasoku.data.packs.reader"]  # the package has a function of that name

SMALL = 20_000  # bytes a shard: a few images


def picture(number, width=40, height=30):
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path):
    """Two classes of twelve photos to train on and of four others, of all sizes and kinds."""
    for part, count in (("train", 12), ("val", 4)):
        for label, name in enumerate(("cat", "dog")):
            home = tmp_path / "photos" / part / name
            home.mkdir(parents=True)
            for number in range(count):
                image = picture(100 * label + number, 30 + 9 * number, 90 - 5 * number)
                image.save(home / f"{number:02}.{'png' if number % 3 else 'jpg'}", quality=85)
    return tmp_path / "photos"


def files_of(home):
    """Name -> bytes of what a pack consists of."""
    return {path.name: path.read_bytes() for path in sorted(home.iterdir()) if not path.name.startswith(".")}


def sources_of(photos):
    """Name -> file and label of each photo."""
    d = folder(str(photos))
    parts = (d.train, d.test)
    return [{p.name(i): (p.paths[i], int(p.labels_N[i])) for i in range(len(p))} for p in parts]


def splits(dataset):
    return dataset.train, dataset.test


def test_a_pack_read_as_a_folder_of_photos_is_told_what_reads_it(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32)
    with pytest.raises(InputError, match=r'for this pack, data\.use = "kasoku\.data\.shards"$'):
        folder(str(tmp_path / "p"))


@pytest.mark.parametrize("side", [0, 32, 500])
def test_a_jpeg_pack_has_reencoded_files_with_their_labels_and_names(photos, tmp_path, side):
    line = pack(str(photos), str(tmp_path / "p"), side=side, shard_bytes=SMALL)
    d, was = shards(str(tmp_path / "p"), 64), folder(str(photos))
    assert line.startswith(f"{tmp_path / 'p'}: 32 images of 2 classes, ")
    assert (d.name, d.classes, len(d.train), len(d.test)) == ("photos", ("cat", "dog"), 24, 8)
    for split, there, whole in zip(splits(d), sources_of(photos), splits(was), strict=True):
        assert split.labels_N.dtype == torch.int64
        names = [split.name(i) for i in range(len(split))]
        assert names == [whole.name(i) for i in order(len(whole), 0, 0).tolist()]
        for i, name in enumerate(names):
            path, label = there[name]
            assert int(split.labels_N[i]) == label
            if side == 0 and path.endswith("jpg"):
                assert split.read(i) == Path(path).read_bytes()
                continue
            out = io.BytesIO()
            Image.fromarray(decode(path, side)).save(out, "JPEG", quality=90, subsampling=2)
            assert (decode(split.read(i)) == decode(out.getvalue())).all()


@pytest.mark.parametrize("side", [0, 32])
def test_a_raw_pack_has_the_pixels_bit_for_bit(photos, tmp_path, side):
    pack(str(photos), str(tmp_path / "p"), side=side, format="raw", shard_bytes=SMALL)
    d = shards(str(tmp_path / "p"))
    for split, there in zip(splits(d), sources_of(photos), strict=True):
        for i in range(len(split)):
            path, label = there[split.name(i)]
            want = decode(path, side)
            assert (split.read(i).shape, int(split.labels_N[i])) == (want.shape, label)
            assert (split.read(i) == want).all()


@pytest.mark.parametrize("format", ["jpeg", "raw"])
def test_other_tools_read_the_shards_as_tar_files_with_webdataset_s_keys(photos, tmp_path, format):
    pack(str(photos), str(tmp_path / "p"), side=32, format=format, shard_bytes=SMALL)
    d, seen, suffix = shards(str(tmp_path / "p")), 0, {"jpeg": "jpg", "raw": "npy"}[format]
    for path in sorted((tmp_path / "p").glob("train-*.tar")):
        assert path.stat().st_size < 2 * SMALL
        with tarfile.open(path, errorlevel=2) as opened:
            members = opened.getmembers()
            assert members
            for image, label in zip(members[::2], members[1::2], strict=True):
                assert (image.name, label.name) == (f"{seen:08d}.{suffix}", f"{seen:08d}.cls")
                assert (image.mtime, image.uid, image.gid, image.mode, image.isreg()) == (0, 0, 0, 0o644, True)
                data = opened.extractfile(image).read()
                assert int(opened.extractfile(label).read()) == int(d.train.labels_N[seen])
                if format == "jpeg":
                    assert data == d.train.read(seen)
                else:
                    got = np.load(io.BytesIO(data), allow_pickle=False)
                    assert (got.transpose(1, 2, 0) == d.train.read(seen)).all()
                seen += 1
    assert seen == 24
    assert len(list((tmp_path / "p").glob("train-*.tar"))) > 1


def test_without_pack_json_the_shards_are_still_shards(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    d = shards(str(tmp_path / "p"))
    (tmp_path / "p" / "pack.json").unlink()
    e = shards(str(tmp_path / "p"))
    for ours, theirs in zip(splits(d), splits(e), strict=True):
        assert ours.labels_N.tolist() == theirs.labels_N.tolist()
        assert [ours.read(i) for i in range(len(ours))] == [theirs.read(i) for i in range(len(theirs))]


@pytest.mark.parametrize("format", ["jpeg", "raw"])
def test_the_bytes_are_the_same_whatever_the_workers(photos, tmp_path, format):
    for workers in (1, 4):
        pack(str(photos), str(tmp_path / str(workers)), side=32, format=format, shard_bytes=SMALL, workers=workers)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "4")


def interrupt(monkeypatch, after):
    """Has the encoding of images end the run after so many; returns how often it was asked."""
    encoded, asked, lock = Form.encoded, [], threading.Lock()

    def stops(self, source, name):
        with lock:
            asked.append(name)
            if len(asked) > after:
                raise KeyboardInterrupt
        return encoded(self, source, name)

    monkeypatch.setattr(Form, "encoded", stops)
    return asked


@pytest.mark.parametrize("after", [10, 34, 45])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(photos, tmp_path, monkeypatch, after):
    pack(str(photos), str(tmp_path / "never"), side=32, shard_bytes=SMALL)
    target = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        interrupt(patched, after)
        with pytest.raises(KeyboardInterrupt):
            pack(str(photos), str(target), side=32, shard_bytes=SMALL, workers=2)
    if after > 24:  # the estimate
        with pytest.raises(InputError, match="a pack that is not whole; run the same `kasoku pack` again"):
            shards(str(target))
    whole = {path.stem: path.with_suffix(".tar").stat().st_mtime_ns for path in target.glob("*.npz")}
    asked = interrupt(monkeypatch, 1000)
    pack(str(photos), str(target), side=32, shard_bytes=SMALL)
    assert files_of(target) == files_of(tmp_path / "never")
    assert {stem: (target / f"{stem}.tar").stat().st_mtime_ns for stem in whole} == whole
    done = sum(shard["images"] for shard in json.loads((target / "pack.json").read_text())["shards"][: len(whole)])
    assert len(asked) == 32 - done + (24 if after == 10 else 0)
    assert bool(whole) == (after > 24)


def test_a_shard_without_its_index_or_of_another_size_is_made_again(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    first = files_of(tmp_path / "p")
    (tmp_path / "p" / "train-00000.npz").unlink()
    (tmp_path / "p" / "train-00001.tar").write_bytes(b"cut")
    (tmp_path / "p" / "val-00000.npz").write_bytes(b"damaged")
    pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    assert files_of(tmp_path / "p") == first


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"side": 16}, "side=32, asked for is side=16"),
        ({"format": "raw"}, "format=jpeg, asked for is format=raw"),
        ({"quality": 80}, "quality=90, asked for is quality=80"),
        ({"shard_bytes": 9}, f"shard_bytes={SMALL}, asked for is shard_bytes=9"),
    ],
)
def test_other_settings_than_the_pack_s_are_refused(photos, tmp_path, change, told):
    same = {"side": 32, "shard_bytes": SMALL}
    pack(str(photos), str(tmp_path / "p"), **same)
    first = files_of(tmp_path / "p")
    with pytest.raises(InputError, match=f"has a pack with {told}; give the same settings or another folder"):
        pack(str(photos), str(tmp_path / "p"), **(same | change))
    assert files_of(tmp_path / "p") == first


def test_other_images_than_the_pack_s_are_refused(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32)
    picture(1).save(photos / "train" / "cat" / "new.png")
    with pytest.raises(InputError, match=r"has a pack with source=.*24 images.*asked for is source=.*25 images"):
        pack(str(photos), str(tmp_path / "p"), side=32)


def test_a_folder_with_something_else_is_left_alone(photos, tmp_path):
    before = sorted(photos.rglob("*"))
    with pytest.raises(InputError, match=r"photos: not empty, and no pack; give another folder"):
        pack(str(photos), str(photos))
    assert sorted(photos.rglob("*")) == before
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "pack.json").write_text("{")
    with pytest.raises(InputError, match=r"pack\.json: cannot be read \(.*\); give an empty folder"):
        pack(str(photos), str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"side": -1}, "side=-1: at least 0; 0 keeps images as they are"),
        ({"format": "gif"}, 'format="gif": "jpeg" or "raw"'),
        ({"quality": 0}, "quality=0: at least 1 and at most 100"),
        ({"shard_bytes": 0}, "shard_bytes=0: at least 1"),
        ({"workers": -1}, "workers=-1: at least 0; 0 for one a core"),
    ],
)
def test_wrong_settings_are_clear_lines(photos, tmp_path, settings, message):
    with pytest.raises(InputError, match=message):
        pack(str(photos), str(tmp_path / "p"), **settings)
    assert not (tmp_path / "p").exists()


def test_a_pack_is_not_written_far_away_nor_where_nothing_can_be_written(photos, tmp_path):
    with pytest.raises(InputError, match="a pack is written to a folder of this machine"):
        pack(str(photos), "s3://bucket/p")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        pack(str(photos), str(tmp_path / "file" / "p"))


def test_only_one_process_packs_into_a_folder(photos, tmp_path):
    with (
        pack_module._locked(tmp_path / "p"),
        pytest.raises(InputError, match="another process is packing into it; wait for it"),
    ):
        pack(str(photos), str(tmp_path / "p"))


def test_a_bad_image_is_left_out_and_told_and_two_are_too_many(photos, tmp_path):
    (photos / "train" / "cat" / "03.jpg").write_bytes(b"\xff\xd8\xff nothing")
    line = pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    assert "; 1 left out: cat/03.jpg: cannot be decoded as an image (" in line
    assert "\n" not in line
    told = json.loads((tmp_path / "p" / "pack.json").read_text())
    assert told["counts"] == {"train": 23, "val": 8}
    assert [text.partition(":")[0] for text in told["bad"]] == ["cat/03.jpg"]
    d = shards(str(tmp_path / "p"))
    assert len(d.train) == 23
    assert "cat/03.jpg" not in {d.train.name(i) for i in range(23)}
    assert verify(str(tmp_path / "p")) == f"31 images in {len(told['shards'])} shards are whole"
    assert pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL) == line
    cut = photos / "train" / "dog" / "06.jpg"
    cut.write_bytes(cut.read_bytes()[:-300])
    with pytest.raises(
        InputError, match=r"more than 1 of 32 images cannot be packed: .*(dog/06|cat/03)\.jpg"
    ) as caught:
        pack(str(photos), str(tmp_path / "q"), side=0)
    assert "\n" not in str(caught.value)


def test_a_truncated_baseline_jpeg_is_not_kept_as_it_is(tmp_path):
    out = io.BytesIO()
    picture(1, 200, 200).save(out, "JPEG")
    form = Form(0, "jpeg", 90)
    assert form.encoded(out.getvalue(), "x") == out.getvalue()
    with pytest.raises(InputError, match="x: cannot be decoded"):
        form.encoded(out.getvalue()[:-400], "x")


@pytest.mark.parametrize("options", [{"progressive": True}, {"format": "PNG"}])
def test_what_is_no_baseline_jpeg_is_encoded_anew(options):
    out = io.BytesIO()
    picture(1, 64, 64).save(out, **({"format": "JPEG"} | options))
    got = Form(0, "jpeg", 90).encoded(out.getvalue(), "x")
    assert got != out.getvalue()
    assert pack_module._baseline(got)
    assert not pack_module._baseline(out.getvalue())


@pytest.mark.parametrize("body", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8" + b"\xff" * 99, b"\xff\xd8\xff\xe0\0\0" * 9])
def test_scraps_of_a_jpeg_are_not_taken_for_a_baseline_one(body):
    assert not pack_module._baseline(body)


@pytest.mark.parametrize(("width", "height"), [(40, 30), (256, 341), (16, 16), (500, 17)])
def test_markers_every_64_pixels_of_a_packed_jpeg_change_no_pixel(width, height):
    pixels_HWC = np.asarray(picture(3, width, height))
    got = Form(0, "jpeg", 90).encoded(pixels_HWC, "x")
    scan = got[got.index(b"\xff\xda") :]
    marks = [scan[at + 1] for at in range(len(scan) - 1) if scan[at] == 0xFF and 0xD0 <= scan[at + 1] <= 0xD7]
    units = -(-width // 16) * -(-height // 16)
    assert marks == [0xD0 + number % 8 for number in range((units - 1) // 4)]
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "JPEG", quality=90, subsampling=2)
    assert (np.asarray(Image.open(io.BytesIO(got))) == np.asarray(Image.open(out))).all()


def test_noise_is_packed_all_the_same():
    noise_HWC = np.random.default_rng(0).integers(0, 2, (300, 300, 3), np.uint8) * 255
    assert decode(Form(0, "jpeg", 90).encoded(noise_HWC, "x")).shape == (300, 300, 3)


def test_verify_finds_a_flipped_byte_and_names_the_image(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    d = shards(str(tmp_path / "p"))
    shard, offset, size = d.train.place_N5[9, :3].tolist()
    file = tmp_path / "p" / d.train.files[shard]
    good = bytearray(file.read_bytes())
    for at, told in (
        (offset + size // 2, rf"{file.name}: {d.train.name(9)} is damaged; "),
        (offset - 512, rf"{file.name}: all images are whole, but a header or a label is damaged; "),
        (len(good) - 1, rf"{file.name}: all images are whole, but"),
    ):
        bad = bytearray(good)
        bad[at] ^= 1
        file.write_bytes(bad)
        with pytest.raises(InputError, match=told):
            verify(str(tmp_path / "p"))
    file.write_bytes(good)
    assert verify(str(tmp_path / "p")).startswith("32 images in ")


def test_a_pack_that_does_not_fit_its_own_index_is_refused(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=32, shard_bytes=SMALL)
    good = tmp_path / "good"
    shutil.copytree(tmp_path / "p", good)

    def flip(name):
        body = bytearray((tmp_path / "p" / name).read_bytes())
        body[len(body) // 2] ^= 1
        (tmp_path / "p" / name).write_bytes(body)

    def cut(name):
        os.truncate(tmp_path / "p" / name, 3000)

    def swap(name):
        shutil.copy(tmp_path / "p" / "train-00001.npz", tmp_path / "p" / name)

    for change, name, told in (
        (flip, "train-00000.npz", r"train-00000\.npz: has changed since it was packed"),
        (swap, "train-00000.npz", r"train-00000\.npz: has changed since it was packed"),
        (cut, "train-00000.tar", r"train-00000\.tar: 3,000 bytes, but it was packed with [\d,]+"),
    ):
        change(name)
        for read, hint in ((shards, "run `kasoku pack --verify /"), (verify, "run the same `kasoku pack`")):
            with pytest.raises(InputError, match=f"{told}; .*{hint}"):
                read(str(tmp_path / "p"))
        shutil.copy(good / name, tmp_path / "p" / name)
    (tmp_path / "p" / "val-00000.tar").unlink()
    for read in (shards, verify):
        with pytest.raises(InputError, match=r"val-00000\.tar"):
            read(str(tmp_path / "p"))


@pytest.mark.parametrize("format", ["jpeg", "raw"])
def test_of_a_pack_far_away_each_image_read_is_checked(photos, tmp_path, monkeypatch, format):
    home = tmp_path / "p"
    pack(str(photos), str(home), side=32, format=format, shard_bytes=SMALL)
    here = shards(str(home))

    class Far(Store):
        def __init__(self, root, **settings):
            super().__init__(str(home))
            self.local, self.pieces = False, Pieces(home, 0, root)

        def list_files(self):
            raise AssertionError("a pack needs no list")

    for module in (shards_module, pack_module):
        monkeypatch.setattr(module, "Store", Far)
    d = shards("s3://bucket/p")
    for ours, theirs in zip(splits(here), splits(d), strict=True):
        assert all(bytes(ours.read(i)) == bytes(theirs.read(i)) for i in range(len(ours)))
    assert d.index() == here.index()
    assert verify("s3://bucket/p") == verify(str(home))
    shard, offset = d.train.place_N5[3, :2].tolist()
    with open(home / d.train.files[shard], "r+b") as file:
        file.seek(offset + 200)
        byte = file.read(1)[0]
        file.seek(offset + 200)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(InputError, match=rf"^{d.train.name(3)}: its bytes in train-\d+\.tar are not those that"):
        d.train.read(3)


def test_a_pack_and_photos_at_an_address_are_read_and_packed_as_here(photos, tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    address = f"/{tmp_path.name}"
    pack(str(photos), str(tmp_path / "p"), side=48, shard_bytes=SMALL)
    memory.put(str(tmp_path / "p"), f"{address}/p", recursive=True)
    memory.put(str(photos), f"{address}/photos", recursive=True)
    try:
        here, there = (shards(root) for root in (str(tmp_path / "p"), f"memory:/{address}/p"))
        assert there.index() == here.index()
        assert [there.train.read(i) for i in range(24)] == [here.train.read(i) for i in range(24)]
        pack(f"memory:/{address}/photos", str(tmp_path / "q"), side=48, shard_bytes=SMALL)
        assert files_of(tmp_path / "q") == files_of(tmp_path / "p")
        pack(f"memory:/{address}/p", str(tmp_path / "r"), side=32, shard_bytes=SMALL)
        assert len(shards(str(tmp_path / "r")).train) == 24
    finally:
        memory.rm(address, recursive=True)


def test_packing_what_is_far_away_keeps_no_copy_of_it(photos, tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    address = f"/{tmp_path.name}"
    memory.put(str(photos), f"{address}/photos", recursive=True)
    try:
        pack(f"memory:/{address}/photos", str(tmp_path / "p"), shard_bytes=SMALL)
        memory.put(str(tmp_path / "p"), f"{address}/p", recursive=True)
        pack(f"memory:/{address}/p", str(tmp_path / "q"), side=32, shard_bytes=SMALL)
    finally:
        memory.rm(address, recursive=True)
    assert not list(tmp_path.glob("cache/kasoku/**/*.piece"))


def test_a_loader_takes_batches_from_packs(photos, tmp_path):
    for format in ("jpeg", "raw"):
        pack(str(photos), str(tmp_path / format), side=0, format=format)
        d = shards(str(tmp_path / format), 32)
        x_NCHW, y_N = next(iter(loader(d, "test", 8)))
        assert (x_NCHW.shape, y_N.tolist()) == ((8, 3, 32, 32), d.test.labels_N.tolist())


def test_what_is_no_whole_pack_is_not_verified(photos, tmp_path):
    with pytest.raises(InputError, match="photos: no whole pack"):
        verify(str(photos))
    with pytest.raises(InputError, match="no such folder"):
        verify(str(tmp_path / "gone"))


def test_a_pack_is_packed_again_from_its_shards(photos, tmp_path):
    pack(str(photos), str(tmp_path / "a"), side=48, format="raw", shard_bytes=SMALL)
    pack(str(tmp_path / "a"), str(tmp_path / "b"), side=32, format="raw")
    a, b = shards(str(tmp_path / "a")), shards(str(tmp_path / "b"))
    assert (b.name, b.classes) == ("photos", ("cat", "dog"))
    rows = {a.train.name(i): i for i in range(len(a.train))}
    assert len(rows) == len(b.train) == 24
    for i in range(24):
        pixels_HWC = a.train.read(rows[b.train.name(i)])
        scale = min(1, 32 / min(pixels_HWC.shape[:2]))
        size = (round(pixels_HWC.shape[1] * scale), round(pixels_HWC.shape[0] * scale))
        want = Image.fromarray(np.ascontiguousarray(pixels_HWC)).resize(size, Image.Resampling.BILINEAR)
        assert (b.train.read(i) == np.asarray(want)).all()
    pack(str(tmp_path / "b"), str(tmp_path / "c"), side=0, format="raw")
    c = shards(str(tmp_path / "c"))
    kept = {b.train.name(i): b.train.read(i) for i in range(24)}
    assert all((kept[c.train.name(i)] == c.train.read(i)).all() for i in range(24))


def test_no_more_than_a_window_of_images_is_in_flight(photos, tmp_path, monkeypatch):
    encoded, lock, begun, most = Form.encoded, threading.Lock(), [0], [0]
    written = pack_module.member

    def counts(self, source, name):
        with lock:
            begun[0] += 1
            most[0] = max(most[0], begun[0])
        return encoded(self, source, name)

    def writes(name, data):
        if name.endswith(".jpg"):
            time.sleep(0.005)  # slower than encoding
            begun[0] -= 1
        return written(name, data)

    monkeypatch.setattr(pack_module, "_ESTIMATED", 1)
    monkeypatch.setattr(Form, "encoded", counts)
    monkeypatch.setattr(pack_module, "member", writes)
    pack(str(photos), str(tmp_path / "p"), side=32, workers=2)
    assert most[0] <= 2 * 4 + 2


@pytest.mark.data
def test_real_photos_come_back_from_a_pack(real_data, tmp_path):
    source = real_data / "imagenette224"
    for part, count in (("train", 4), ("val", 2)):
        for kind in sorted((source / part).iterdir()):
            (tmp_path / "set" / part / kind.name).mkdir(parents=True)
            for path in sorted(kind.iterdir())[:count]:
                shutil.copy(path, tmp_path / "set" / part / kind.name / path.name)
    there = sources_of(tmp_path / "set")
    for format in ("jpeg", "raw"):
        home = str(tmp_path / format)
        pack(str(tmp_path / "set"), home, side=160, format=format, shard_bytes=2**20)
        assert verify(home).startswith("60 images in ")
        d = shards(home)
        assert (len(d.train), len(d.test), len(d.classes)) == (40, 20, 10)
        for split, was in zip(splits(d), there, strict=True):
            for i in range(len(split)):
                path, label = was[split.name(i)]
                want, data = decode(path, 160), split.read(i)
                assert int(split.labels_N[i]) == label
                if format == "raw":
                    assert (data == want).all()
                else:
                    off = decode(data).astype(int) - want
                    assert np.abs(off).mean() < 6


@web
def test_one_bad_answer_of_a_server_is_asked_again_and_not_kept(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("kasoku.data.remote.store._FIRST_WAIT_S", 0.01)
    pack(str(photos), str(tmp_path / "p"), side=16, quiet=True)
    here = shards(str(tmp_path / "p"))
    wanted = [here.train.read(i) for i in range(len(here.train))]
    with serving() as site:
        site.files = {file.name: file.read_bytes() for file in (tmp_path / "p").iterdir() if file.name[0] != "."}
        number, requests = 0, 1
        while number < requests:  # each request in turn: pack.json, the indices, the images
            cache = str(tmp_path / f"cache-{number}")
            site.reads.clear()
            site.garbage = {number}
            for _ in range(2):
                far = shards(site.root, cache=cache)
                assert [far.train.read(i) for i in range(len(far.train))] == wanted
                requests, site.garbage = max(requests, len(site.reads) - 1), set()
            number += 1
    assert number > len(wanted)


@web
def test_a_source_that_stays_wrong_is_one_line_and_heals(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("kasoku.data.remote.store._FIRST_WAIT_S", 0.01)
    pack(str(photos), str(tmp_path / "p"), side=16, quiet=True)
    with serving() as site:
        site.files = {file.name: file.read_bytes() for file in (tmp_path / "p").iterdir() if file.name[0] != "."}
        far = shards(site.root, cache=str(tmp_path / "cache"))
        site.garbage = set(range(999))
        with pytest.raises(InputError) as caught:
            far.train.read(0)
        assert str(caught.value) == (
            f"{far.train.name(0)}: its bytes in train-00000.tar are not those that were packed, after 4 tries; the "
            f"cache {next((tmp_path / 'cache').glob('pieces-*'))} keeps none of them: upload that file again (`kasoku "
            "pack --verify` finds all such images)"
        )
        site.garbage = set()
        assert far.train.read(0) == shards(str(tmp_path / "p")).train.read(0)


def test_verify_asks_the_source_and_not_the_cache(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pack_module, "cores", lambda: 1)
    monkeypatch.setattr("kasoku.data.remote.store._FIRST_WAIT_S", 0.01)
    pack(str(photos), str(tmp_path / "p"), side=16, quiet=True)
    with serving() as site:
        site.files = {file.name: file.read_bytes() for file in (tmp_path / "p").iterdir() if file.name[0] != "."}
        far = shards(site.root)  # with the cache that verify would have
        for index in range(len(far.train)):
            far.train.read(index)
        site.reads.clear()
        assert "are whole" in verify(site.root)
        assert sum(stop - first for _, first, stop in site.reads) == sum(map(len, site.files.values()))
        image = next(i for i, (path, first, _) in enumerate(site.reads) if path.endswith(".tar") and first == 512)
        site.reads.clear()
        site.garbage = {image}  # one bad answer
        assert "are whole" in verify(site.root)
        site.garbage = set(range(9999))
        with pytest.raises(InputError):
            verify(site.root)


@pytest.mark.parametrize("form", ["jpeg", "raw"])
def test_a_changed_bit_of_a_local_pack_is_named(photos, tmp_path, form):
    pack(str(photos), str(tmp_path / "p"), side=16, format=form, quiet=True)
    split = shards(str(tmp_path / "p")).train
    shard, offset, size, *_ = split.place_N5[3].tolist()
    path = tmp_path / "p" / split.files[shard]
    data = bytearray(path.read_bytes())
    data[offset + size - 5] ^= 1
    path.write_bytes(data)
    split = shards(str(tmp_path / "p")).train
    for index in range(len(split)):
        if index == 3:
            with pytest.raises(InputError, match=f"{split.name(3)}: its bytes in .* changed: bring that file back"):
                split.read(index)
        else:
            split.read(index)


def test_a_raw_image_is_compared_when_it_is_first_read(photos, tmp_path, monkeypatch):
    pack(str(photos), str(tmp_path / "p"), side=16, format="raw", quiet=True)
    split, compared = shards(str(tmp_path / "p")).train, []
    monkeypatch.setattr("zlib.crc32", lambda data, crc32=zlib.crc32: compared.append(1) or crc32(data))
    for _ in range(3):
        for index in range(len(split)):
            split.read(index)
    assert len(compared) == len(split)


def test_a_pack_that_is_refused_leaves_no_file_open(photos, tmp_path):
    pack(str(photos), str(tmp_path / "p"), side=16, quiet=True)
    index = next((tmp_path / "p").glob("train-*.npz"))
    index.write_bytes(index.read_bytes()[:-9])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(InputError, match="has changed since it was packed"):
            shards(str(tmp_path / "p"))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
