import errno
import gc
import io
import json
import os
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from helpers.ranks import context
from helpers.web import serving, web
from kasoku.core import InputError
from kasoku.data import GoneError
from kasoku.data.packs import tar_index as tar
from kasoku.data.packs.reader import planes, shards
from kasoku.data.remote import store as store_module
from kasoku.data.remote.store import Store

shards_module = sys.modules["kasoku.data.packs.reader"]  # the package has a function of that name


def jpeg(number):
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (number, 0, 0)).save(out, "JPEG")
    return out.getvalue()


def npy(pixels_CHW):
    out = io.BytesIO()
    np.save(out, pixels_CHW)
    return out.getvalue()


def samples(labels, first=0):
    """Members of a shard: an image and its class under each key."""
    for number, label in enumerate(labels, first):
        yield f"{number:08d}.jpg", jpeg(number)
        yield f"{number:08d}.cls", str(label).encode()


def write_tar(path, members, form=tarfile.GNU_FORMAT):
    """A tar file; a member is (name, data), or (name, type, where to) of a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as out:
        for name, *rest in members:
            info = tarfile.TarInfo(name)
            if len(rest) == 2:
                info.type, info.linkname = rest
                out.addfile(info)
            else:
                info.size = len(rest[0])
                out.addfile(info, io.BytesIO(rest[0]))
    return path


@pytest.fixture
def two(tmp_path):
    """Twenty images of two classes to train on and four others, as another's shards."""
    write_tar(tmp_path / "set" / "train-0.tar", samples([0, 1] * 5))
    write_tar(tmp_path / "set" / "train-1.tar", samples([0, 1] * 5, 10))
    write_tar(tmp_path / "set" / "val-0.tar", samples([1, 0, 1, 0], 20))
    return tmp_path / "set"


def facts(dataset):
    return [[(p.name(i), int(p.labels_N[i]), bytes(p.read(i))) for i in range(len(p))] for p in dataset_parts(dataset)]


def dataset_parts(dataset):
    return dataset.train, dataset.test


class Far:
    """A folder that says it is far away, and tells what is read from it."""

    top, reads = "", []

    def __init__(self, root, **settings):
        self.here, self.local, self.shown = Store(self.top), False, store_module._plain(root)

    def __getattr__(self, name):
        return getattr(self.here, name)

    def read(self, path, start=0, stop=None, intact=None):
        data = self.here.read(path, start, stop)
        self.reads.append((path, start, len(data)))
        return data


@pytest.fixture
def far(two, monkeypatch):
    store = type("Here", (Far,), {"top": str(two), "reads": []})
    monkeypatch.setattr(shards_module, "Store", store)
    return store


def test_another_s_shards_are_images_with_the_labels_beside_them(two):
    d = shards(str(two), 64)
    assert (d.name, d.classes, len(d.train), len(d.test), d.image_size) == ("set", ("0", "1"), 20, 4, (64, 64))
    assert (d.train.labels_N.dtype, d.train.labels_N.tolist(), d.test.labels_N.tolist()) == (
        torch.int64,
        [0, 1] * 10,
        [1, 0, 1, 0],
    )
    assert [d.train.read(i) for i in range(20)] == [jpeg(i) for i in range(20)]
    assert d.train.name(13) == "train-1.tar/00000013.jpg"
    assert d.index() == shards(str(two)).index()
    (two / "classes.txt").write_text("cat\ndog\ncow\n")
    assert shards(str(two)).classes == ("cat", "dog", "cow")
    (two / "classes.txt").write_text("cat\n")
    with pytest.raises(InputError, match=r"classes\.txt: 1 names, but a label is 1"):
        shards(str(two))


@pytest.mark.parametrize(
    ("train", "away"),
    [
        ("train-000.tar", "validation-000.tar"),
        ("train/000.tar", "val/000.tar"),
        ("a/training/x.tar", "a/test/x.tar"),
        ("imagenet1k-train-0000.tar", "imagenet1k-validation-00.tar"),
    ],
)
def test_parts_are_told_by_the_names_of_files_or_folders(tmp_path, train, away):
    write_tar(tmp_path / train, samples([0, 1, 0]))
    write_tar(tmp_path / away, samples([1, 0], 3))
    write_tar(tmp_path / "latest.tar", samples([7], 5))  # of no part, and no "test" either
    d = shards(str(tmp_path))
    assert (len(d.train), len(d.test), d.test.labels_N.tolist()) == (3, 2, [1, 0])


@pytest.mark.parametrize("name", ["000.tar", "train-0.tar", "val-0.tar"])
def test_without_a_validation_part_a_share_of_each_class_is_split_off(tmp_path, name):
    write_tar(tmp_path / name, samples([0] * 10 + [1] * 20 + [2] * 2))
    d = shards(str(tmp_path), validation=0.2)
    assert d.test.labels_N.bincount().tolist() == [2, 4, 1]
    assert d.train.labels_N.bincount().tolist() == [8, 16, 1]
    names = [[part.name(i) for i in range(len(part))] for part in dataset_parts(d)]
    assert not set(names[0]) & set(names[1])
    assert facts(shards(str(tmp_path), validation=0.2)) == facts(d)
    assert facts(shards(str(tmp_path), validation=0.2, seed=1)) != facts(d)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_in_each_dialect_of_tar(tmp_path, form):
    long = "/".join(["folder" * 8] * 3)
    write_tar(tmp_path / "a.tar", [(f"{long}/{name}", data) for name, data in samples([0, 1, 0, 1])], form)
    if form != tarfile.USTAR_FORMAT:
        members = [(f"{'é' * 200}{name}", data) for name, data in samples([0, 1], 4)]
        write_tar(tmp_path / "b.tar", [*members, ("short.jpg", jpeg(6)), ("short.cls", b"0")], form)
    d = shards(str(tmp_path), validation=0.5)
    rows = sorted(row for part in facts(d) for row in part)
    assert rows[0] == (f"a.tar/{long}/00000000.jpg", 0, jpeg(0))
    if form != tarfile.USTAR_FORMAT:
        assert rows[4] == ("b.tar/short.jpg", 0, jpeg(6))  # a long name is one member's only
        assert rows[5] == (f"b.tar/{'é' * 200}00000004.jpg", 0, jpeg(4))


def test_labels_are_also_read_from_json_and_other_members_are_passed_over(tmp_path):
    write_tar(
        tmp_path / "a.tar",
        [
            ("README", b"no key"),
            ("./x/a.JPG", jpeg(1)),
            ("./x/a.json", b'{"label": 3, "text": "a"}'),
            ("./x/a.seg.png", b"another picture"),
            ("b.cls", b" 0\n"),
            ("b.txt", b"hello"),
            ("b.png", b"picture"),
        ],
    )
    whole = tar.walk(Store(str(tmp_path)), "a.tar")
    assert whole.names == ("a.tar/./x/a.jpg", "a.tar/b.png")
    assert (whole.rows_N4[:, 2].tolist(), whole.left_out) == ([3, 0], ())


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("cls", b"-1"),
        ("cls", b"cat"),
        ("cls", b"1" * 5000),
        ("cls", b"99999999"),
        ("cls", b""),
        ("json", b"{"),
        ("json", b"[]"),
        ("json", b'{"label": true}'),
        ("json", b'{"label": "1"}'),
        ("json", b"[" * 100_000),
    ],
)
def test_a_sample_without_a_usable_label_is_counted_and_told(tmp_path, capsys, suffix, text):
    write_tar(tmp_path / "a.tar", [*samples([0, 0]), ("x.jpg", jpeg(9)), (f"x.{suffix}", text), ("y.cls", b"0")])
    d = shards(str(tmp_path))
    assert len(d.train) + len(d.test) == 2
    assert capsys.readouterr().err.startswith("kasoku: a.tar: 2 without an image or a class left out\n")


def test_names_that_lead_elsewhere_are_only_keys_and_links_are_left_out(tmp_path):
    names = ["../../etc/x", "/etc/passwd", "a/../../../b", "train/..//y", "line\nbreak"]
    members = [(name + end, data) for name in names for end, data in ((".jpg", jpeg(1)), (".cls", b"0"))]
    links = [("l.jpg", tarfile.SYMTYPE, "/etc/passwd"), ("l.cls", b"0"), ("h.jpg", tarfile.LNKTYPE, "../../etc/x.jpg")]
    write_tar(tmp_path / "deep" / "set" / "a.tar", [*members, *links, ("h.cls", b"0")])
    before = sorted(tmp_path.rglob("*"))
    d = shards(str(tmp_path / "deep" / "set"), cache=str(tmp_path / "deep" / "cache"))
    got = sorted(row for part in facts(d) for row in part)
    assert [row[0] for row in got] == sorted(f"a.tar/{name}.jpg".replace("\n", "?") for name in names)
    assert {row[2] for row in got} == {jpeg(1)}
    after = [path for path in sorted(tmp_path.rglob("*")) if "cache" not in path.parts]
    assert after == before


def test_whole_samples_of_a_truncated_shard_are_used_with_a_warning(two, capsys):
    shard = two / "train-1.tar"
    index = tar.walk(Store(str(two)), "train-1.tar")
    shard.write_bytes(shard.read_bytes()[: index.rows_N4[6, 0] + 100])
    missing = int(index.rows_N4[6, 1]) - 100
    told = f"kasoku: train-1.tar: cut off, {missing:,} or more bytes are missing\n"
    for _ in range(2):
        d = shards(str(two))
        assert len(d.train) == 16
        assert capsys.readouterr().err.startswith(told)
    shard.write_bytes(shard.read_bytes()[: index.rows_N4[6, 0] - 300])  # in a header
    assert len(shards(str(two)).train) == 16
    assert "300 or more bytes are missing" in capsys.readouterr().err


def test_behind_a_damaged_header_nothing_is_guessed(two, capsys):
    shard = two / "train-0.tar"
    at = int(tar.walk(Store(str(two)), "train-0.tar").rows_N4[4, 0]) - 512
    data = bytearray(shard.read_bytes())
    data[at : at + 8] = b"\xff" * 8
    shard.write_bytes(data)
    assert len(shards(str(two)).train) == 14
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == f"kasoku: train-0.tar: damaged at byte {at:,}, the {len(data) - at:,} bytes from there on left out"
    )
    assert lines[1] == (
        f"kasoku: {two}: these shards have no checksums, so damage may go unnoticed; `kasoku pack` writes shards with "
        "checksums"
    )


@web
@pytest.mark.parametrize("garbage", [{3}, {3, 4}])
def test_headers_of_shards_far_away_are_fetched_again(two, tmp_path, monkeypatch, garbage):
    monkeypatch.setattr(store_module, "_FIRST_WAIT_S", 0.01)
    here = facts(shards(str(two)))
    with serving() as site:
        site.files = {file.name: file.read_bytes() for file in two.iterdir()}
        number, requests = 0, 1
        while number < requests:  # each request in turn
            site.reads.clear()
            site.garbage = {number, *garbage}
            far = shards(site.root, cache=str(tmp_path / f"{number}"))
            site.garbage = set()
            assert facts(far) == here
            requests = len(site.reads)
            assert facts(shards(site.root, cache=str(tmp_path / f"{number}"))) == here
            assert len(site.reads) == requests
            number += 1


def header(name, kind, size):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    ("kind", "size", "told"),
    [
        (tarfile.SYMTYPE, 1000, ""),  # nothing follows a link, whatever it says
        (tarfile.DIRTYPE, 1000, ""),
        (tarfile.REGTYPE, -512, "damaged at byte"),  # would lead back to itself for ever
        (tarfile.XHDTYPE, 2**20 + 512, "damaged at byte"),
        (tarfile.GNUTYPE_LONGNAME, 2**20 + 512, "damaged at byte"),
        (tarfile.REGTYPE, 2**62, "cut off, 4,611,686,018,"),
    ],
)
def test_sizes_that_cannot_be_are_seen_through(two, capsys, kind, size, told):
    data = (two / "train-0.tar").read_bytes()
    at = int(tar.walk(Store(str(two)), "train-0.tar").rows_N4[4, 0]) - 512
    room = b"\1" * (2**20 + 512) if size in range(2**20, 2**21) else b""
    (two / "train-0.tar").write_bytes(data[:at] + header("l.txt", kind, size) + room + data[at:])
    assert len(shards(str(two)).train) == (14 if told else 20)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("body", [b"", b"hello", b"\x1f\x8b" + bytes(range(256)) * 9, b"PK\x03\x04" * 500])
def test_what_is_no_tar_is_one_clear_line(two, body):
    (two / "train-1.tar").write_bytes(body)
    with pytest.raises(InputError, match=r"set/train-1\.tar: not a tar archive; mend or remove the file$"):
        shards(str(two))


def test_wrong_places_and_settings_are_clear_lines(two, tmp_path):
    write_tar(tmp_path / "none" / "a.tar", [])
    write_tar(tmp_path / "one" / "a.tar", samples([0, 1]))
    (tmp_path / "empty").mkdir()
    for root, settings_, message in (
        ("", {}, r"data\.root is not given"),
        (tmp_path / "gone", {}, r"gone: no such folder"),
        (tmp_path / "empty", {}, r"empty: no pack\.json and no \.tar file"),
        (tmp_path / "none", {}, r"none: no whole sample"),
        (tmp_path / "one", {}, r"one: no class has two images"),
        (two, {"size": 0}, "size=0: at least 1 pixel"),
        (two, {"validation": 1.0}, "validation=1.0: more than 0 and less than 1"),
    ):
        with pytest.raises(InputError, match=message):
            shards(str(root), **settings_)


def test_the_root_may_name_variables(two, monkeypatch):
    monkeypatch.setenv("SETS", str(two.parent))
    assert len(shards("$SETS/set").train) == len(shards(f"file://{two}").train) == 20


def test_a_second_start_reads_no_shard(two, monkeypatch):
    first = facts(shards(str(two)))
    read, count = Store.read, []
    monkeypatch.setattr(
        Store, "read", lambda self, path, *where, **w: count.append(path) or read(self, path, *where, **w)
    )
    again = shards(str(two))
    assert not [path for path in count if path.endswith(".tar")]
    assert facts(again) == first
    assert len(count) == 24 + 1  # each image once, and there is no pack.json
    os.utime(two / "val-0.tar", ns=(1, 1))
    count.clear()
    shards(str(two))
    assert {path for path in count if path.endswith(".tar")} == {"val-0.tar"}


def test_headers_are_read_not_images(tmp_path, monkeypatch):
    write_tar(
        tmp_path / "a.tar", [(name, data * (200 if name.endswith("jpg") else 1)) for name, data in samples([0] * 9)]
    )
    read, count = Store.read, []
    monkeypatch.setattr(Store, "read", lambda self, *where: count.append(where) or read(self, *where))
    tar.walk(Store(str(tmp_path)), "a.tar")
    assert len(count) == 10  # a window at the first header, and one behind each image
    assert sum(stop - start for _, start, stop, *_ in count) < os.path.getsize(tmp_path / "a.tar") / 1.5


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\0", b"\x80\x04."])
def test_a_damaged_index_of_another_s_shard_is_made_anew(two, tmp_path, body):
    first = facts(shards(str(two), cache=str(tmp_path / "c")))
    kept = sorted((tmp_path / "c" / "shards").iterdir())
    good = [path.read_bytes() for path in kept]
    assert len(kept) == 3
    kept[1].write_bytes(body)
    kept[2].write_bytes(good[2][: len(good[2]) // 2])
    assert facts(shards(str(two), cache=str(tmp_path / "c"))) == first
    assert [path.read_bytes() for path in kept] == good


def test_a_cache_that_cannot_be_written_is_no_error(two, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert len(shards(str(two), cache=str(tmp_path / "file" / "below")).train) == 20


def test_a_cache_disk_that_is_full_is_no_error_and_nothing_stays_behind(two, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    assert len(shards(str(two), cache=str(tmp_path / "c")).train) == 20
    assert not list((tmp_path / "c" / "shards").iterdir())


def test_shards_far_away_are_read_through_the_store(two, far):
    here = facts(shards(str(two)))
    far.reads.clear()
    d = shards("s3://name:secret@bucket/set")
    assert (d.name, facts(d)) == ("set", here)
    starts = [read for read in far.reads if read[0].endswith(".tar")]
    far.reads.clear()
    assert facts(shards("s3://name:secret@bucket/set")) == here
    assert len(starts) > len(far.reads) == len(here[0]) + len(here[1])  # no header
    (two / "classes.txt").write_text("one")
    with pytest.raises(InputError, match=r"s3://bucket/set/classes\.txt") as told:
        shards("s3://name:secret@bucket/set")
    assert "secret" not in str(told.value)


def test_a_source_that_is_gone_is_told_as_that(two, far):
    d = shards("s3://bucket/set")

    def gone(self, *_, **__):
        raise GoneError("no answer for 60 s")

    far.read = gone
    with pytest.raises(GoneError, match=r"^no answer"):
        d.train.read(0)
    with pytest.raises(GoneError):
        shards("s3://bucket/set")


def test_an_image_that_cannot_be_read_is_named(two):
    d = shards(str(two))
    with open(two / "train-0.tar", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        InputError, match=r"train-0\.tar/00000007\.jpg: its bytes in train-0\.tar are cut off or have changed"
    ):
        d.train.read(7)
    e = shards(str(two.parent), validation=0.5)
    (two / "train-1.tar").unlink()
    bad = next(i for i in range(len(e.train)) if "train-1" in e.train.name(i))
    with pytest.raises(InputError, match=r"train-1\.tar/000000\d\d\.jpg: .*cannot be read"):
        e.train.read(bad)


@pytest.mark.parametrize("local", [True, False])
def test_raw_pixels_are_planes_and_on_this_machine_no_copy(tmp_path, monkeypatch, local):
    pixels_NCHW = np.random.default_rng(0).integers(0, 256, (4, 3, 5, 7), np.uint8)
    members = [(f"{n}.{e}", d) for n in range(4) for e, d in (("npy", npy(pixels_NCHW[n])), ("cls", b"0"))]
    write_tar(tmp_path / "set" / "a.tar", members)
    if not local:
        monkeypatch.setattr(shards_module, "Store", type("Here", (Far,), {"top": str(tmp_path / "set"), "reads": []}))
    d = shards(str(tmp_path / "set") if local else "s3://bucket/set", validation=0.5)
    for part in dataset_parts(d):
        for i in range(len(part)):
            got = part.read(i)
            assert (got == pixels_NCHW[int(Path(part.name(i)).stem)].transpose(1, 2, 0)).all()
            assert (got.shape, got.strides, got.dtype) == ((5, 7, 3), (7, 1, 35), np.uint8)
            assert not got.flags.owndata
            assert not got.flags.writeable
    if local:
        assert np.shares_memory(part.read(0), part.mapped("a.tar"))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4, 4), np.float32),
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((3, 0, 4), np.uint8),
        np.zeros((3, 4), np.uint8),
        np.asfortranarray(np.zeros((3, 4, 4), np.uint8)),
    ],
)
def test_other_arrays_are_refused_by_name(tmp_path, array):
    write_tar(tmp_path / "a.tar", [("1.npy", npy(array)), ("1.cls", b"0"), ("2.npy", npy(array)[:-1]), ("2.cls", b"0")])
    d = shards(str(tmp_path))
    for part in dataset_parts(d):
        with pytest.raises(InputError, match=r"a\.tar/[12]\.npy: not an \.npy file of uint8 pixels"):
            part.read(0)


def test_an_npy_header_of_another_length_is_refused():
    good = npy(np.zeros((3, 4, 4), np.uint8))
    assert planes(np.frombuffer(good, np.uint8), "x").shape == (4, 4, 3)
    for at in (6, 8):
        bad = bytearray(good)
        bad[at] += 1
        with pytest.raises(InputError, match=r"x: not an \.npy file"):
            planes(np.frombuffer(bytes(bad), np.uint8), "x")


def test_nothing_is_unpickled(tmp_path):
    out = io.BytesIO()
    np.save(out, np.array([{"a": 1}], object), allow_pickle=True)
    write_tar(tmp_path / "a.tar", [("1.npy", out.getvalue()), ("1.cls", b"0"), ("2.npy", b"x"), ("2.cls", b"0")])
    d = shards(str(tmp_path))
    for part in dataset_parts(d):
        with pytest.raises(InputError, match="not an"):
            part.read(0)
    with pytest.raises(tar.Damaged):
        tar.Index.load(out.getvalue())


def test_threads_read_the_same(two):
    write_tar(two / "train-2.tar", [("x.npy", npy(np.full((3, 4, 4), 7, np.uint8))), ("x.cls", b"0")])
    d = shards(str(two))
    first = facts(d)[0]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: bytes(d.train.read(i % 21)), range(21 * 40)))
    assert got == [row[2] for row in first] * 40


def read_and_fork(folder):
    """Exits with 0 where a child that was forked after the first read reads the same."""
    d = shards(folder)
    first = facts(d)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if facts(d)[0] == first else 1)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_forked_processes_read_the_same(two):
    write_tar(two / "train-2.tar", [("x.npy", npy(np.full((3, 4, 4), 7, np.uint8))), ("x.cls", b"0")])
    process = context.Process(target=read_and_fork, args=(str(two),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_files_are_closed_with_the_last_split(two):
    write_tar(two / "train-2.tar", [("x.npy", npy(np.full((3, 4, 4), 7, np.uint8))), ("x.cls", b"0")])

    def held():
        return sorted(
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if fd.isdigit() and os.path.exists(f"/proc/self/fd/{fd}")
        )

    before = [path for path in held() if str(two) in path]
    d = shards(str(two))
    facts(d)
    pixels = d.train.read(20)
    train = d.train
    del d
    gc.collect()
    assert [path for path in held() if str(two) in path] != before
    del train
    gc.collect()
    assert int(pixels.sum()) == 7 * 48  # a view outlives the data set
    del pixels
    gc.collect()
    assert [path for path in held() if str(two) in path] == before


@given(st.binary(max_size=4096))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_as_a_shard_never_crash(tmp_path, body):
    (tmp_path / "a.tar").write_bytes(body)
    with pytest.raises(InputError):
        shards(str(tmp_path))


@given(st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_shard_with_random_headers_never_crashes(tmp_path, data):
    """Headers with right checksums and anything else in them."""
    kinds = st.sampled_from([b"0", b"\0", b"1", b"2", b"5", b"7", b"L", b"K", b"x", b"g", b"S", b"X", b"?"])
    out = []
    for _ in range(data.draw(st.integers(1, 6))):
        head = bytearray(tarfile.TarInfo(data.draw(st.sampled_from(["a.jpg", "a.cls", "b.npy"]))).tobuf())
        head[156:157] = data.draw(kinds)
        size = data.draw(st.sampled_from([0, 1, 3, 512, 513, -1, 2**40, 2**62]))
        head[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
        for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=3)):
            head[at] = byte
        head[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(head))[0]
        out.append(bytes(head) + data.draw(st.sampled_from([b"", b"3".ljust(512, b"\0"), b"14 path=a.jpg\n" * 40])))
    (tmp_path / "a.tar").write_bytes(b"".join(out))
    told = ""
    try:
        d = shards(str(tmp_path), cache="/dev/null/x")
        for part in dataset_parts(d):
            for i in range(len(part)):
                part.name(i)
    except InputError as error:
        told = str(error)
    assert "\n" not in told


@given(st.data())
@settings(deadline=None)
def test_a_changed_index_is_refused_or_read_but_never_crashes(data):
    good = tar.Index(np.arange(12).reshape(4, 3).T, ("a", "b", "c"), 1000, "f" * 64).dump()
    body = bytearray(good)
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)), max_size=4)):
        body[at] = byte
    body = bytes(body)[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else bytes(body)
    told = ""
    try:
        index = tar.Index.load(body)
        assert index.rows_N4.shape == (len(index.names), 4)
        assert (index.rows_N4[:, :2].sum(1) <= index.shard_bytes).all()
    except tar.Damaged as error:
        told = str(error)
    assert "\n" not in told


@given(st.binary(max_size=600))
def test_random_bytes_as_an_index_are_refused(body):
    with pytest.raises(tar.Damaged):
        tar.Index.load(body)


@pytest.mark.parametrize("row", [(-1, 5, 0, 0), (5, -1, 0, 0), (96, 5, 0, 0), (5, 2**62, 0, 0), (0, 5, -1, 0)])
def test_an_index_that_points_outside_its_shard_is_refused(row):
    good = np.array([[0, 100, 3, 9]])
    assert tar.Index.load(tar.Index(good, ("a",), 100).dump()).names == ("a",)
    with pytest.raises(tar.Damaged, match="its columns do not fit each other"):
        tar.Index.load(tar.Index(np.array([row]), ("a",), 100).dump())
    with pytest.raises(tar.Damaged, match="its columns do not fit each other"):
        tar.Index.load(tar.Index(good, ("a", "b"), 100).dump())


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_indices_are_read_by_threads_while_garbage_is_collected(count):
    good = tar.Index(np.zeros((2, 4), np.int64), ("a", "b"), 10).dump()
    before, collected = gc.get_threshold(), lambda phase, info: time.sleep(1e-4)  # another thread's turn
    gc.callbacks.append(collected)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(index.names == ("a", "b") for index in pool.map(tar.Index.load, [good] * count))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)


def test_an_index_of_another_version_is_told(monkeypatch):
    monkeypatch.setattr(tar, "VERSION", 2)
    later = tar.Index(np.zeros((0, 4), np.int64), (), 1024).dump()
    monkeypatch.undo()
    with pytest.raises(tar.Damaged, match="version 2, this kasoku reads 1"):
        tar.Index.load(later)


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "[" * 10_000, '{"version": 1}', '{"version": 7}', '{"version": 1, "shards": 3}']
)
def test_a_damaged_pack_json_says_how_to_check_the_pack(two, body):
    (two / "pack.json").write_text(body)
    told = "version 7, this kasoku reads 1" if "7" in body else ".*"
    with pytest.raises(InputError, match=rf"pack\.json: cannot be read \({told}\); run `kasoku pack --verify /.*set`$"):
        shards(str(two))


def test_a_pack_json_cannot_name_files_elsewhere(two):
    shard = {"file": "../train-00000.tar", "images": 1, "bytes": 1, "sha256": "", "index_sha256": ""}
    told = {"version": 1, "whole": True, "name": "n", "classes": ["a"], "format": "raw", "counts": {}}
    (two / "pack.json").write_text(json.dumps(told | {"images_per_shard": 1, "shards": [shard]}))
    with pytest.raises(InputError, match="a name, count or checksum in it is not valid"):
        shards(str(two))
