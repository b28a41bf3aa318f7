"""Shards on S3 and HDFS, through the clients that fsspec uses: the right images or one clear error, never others."""

import threading

import pytest

from helpers.photos import coloured_photos
from helpers.stores import object_store
from kasoku.core import InputError
from kasoku.data import GoneError
from kasoku.data.packs.reader import shards
from kasoku.data.packs.writer import pack
from kasoku.data.remote import store
from kasoku.data.remote.store import Store, send

pytestmark = pytest.mark.extras


@pytest.fixture(params=["s3", "webhdfs"])
def site(request, monkeypatch):
    monkeypatch.setattr(store, "_FIRST_WAIT_S", 0.02)
    with object_store(request.param, monkeypatch) as site:
        Store(site.root).list_files()  # the client reads its descriptions of services once, for a second
        yield site


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The folder of a small pack, and the bytes and label of each of its images."""
    home = tmp_path_factory.mktemp("packed")
    coloured_photos(home / "photos", images=6)
    pack(str(home / "photos"), str(home / "pack"), side=32, quiet=True)
    return home / "pack", images_of(shards(str(home / "pack")))


@pytest.fixture
def full(site, packed):
    """The server, with the pack on it."""
    site.files = {file.name: file.read_bytes() for file in packed[0].iterdir() if file.name[0] != "."}
    return site


def images_of(dataset):
    return [
        (split.read(i), int(split.labels_N[i])) for split in (dataset.train, dataset.test) for i in range(len(split))
    ]


def test_far_files_are_listed_and_read_as_they_are(site):
    far = Store(site.root, cache_bytes=0)
    assert far.list_files() == ["a.tar", "b/c/empty", "b/two words.tar", "b/ü 100%41.bin"]
    for path in far.list_files():
        data = site.files[path]
        assert far.size(path) == Store(site.root).size(path) == len(data)
        for start, stop in [(0, None), (0, 10), (7, 7), (100, 900), (990, 10**6), (10**6, 10**6 + 1), (5, None)]:
            assert far.read(path, start, stop) == data[start:stop], (path, start, stop)


def test_no_more_is_sent_than_was_asked_for(site):
    site.files["a.tar"] *= 30  # 9 MB
    far = Store(site.root, cache_bytes=0)
    for start in range(0, 9_000_000, 1_000_000):
        assert far.read("a.tar", start, start + 1000) == site.files["a.tar"][start : start + 1000]
    assert 9000 <= site.sent_bytes < 20_000


def test_a_changed_file_has_another_version(site):
    before = Store(site.root).state("a.tar")[1]
    site.files["a.tar"] = site.files["b/two words.tar"]
    assert Store(site.root).state("a.tar")[1] != before


def test_what_is_not_there_and_what_is_refused_is_told_at_once(site):
    far = Store(site.root)
    with pytest.raises(InputError, match=r"none\.tar: no such file or folder") as told:
        far.read("none.tar")
    assert not isinstance(told.value, GoneError)
    far.size("a.tar")
    site.status = 403
    with pytest.raises(GoneError, match=r"a\.tar: access refused"):
        far.read("a.tar", 0, 5)


FAULTS = {
    "stalls": {"stalls": True},
    "cuts off": {"cuts": 2},
    "sends less": {"cuts": 2, "honest": True},
    "fails": {"fails": 2},
    "sends other bytes": {"garbage": {0, 1, 4}},
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_goes_wrong_for_a_while_gives_the_right_images(full, packed, fault, opened, monkeypatch):
    monkeypatch.setattr(store, "_REQUEST_S", 1.0)
    far = shards(full.root, cache_bytes=0) if opened else None
    full.reads.clear()
    vars(full).update(FAULTS[fault])
    if full.stalls:
        threading.Timer(0.5, lambda: setattr(full, "stalls", False)).start()
    assert images_of(far or shards(full.root, cache_bytes=0)) == packed[1]
    assert (full.stalls, full.cuts, full.fails) == (False, 0, 0)  # all faults were met


ALWAYS = FAULTS | {
    "cuts off": {"cuts": 10**6},
    "sends less": {"cuts": 10**6, "honest": True},
    "fails": {"fails": 10**6},
    "sends other bytes": {"garbage": range(10**6)},
    "says too many bytes": {"off_bytes": 1000},
    "says too few bytes": {"off_bytes": -1000},
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("fault", ALWAYS)
def test_a_server_that_stays_wrong_is_one_line_and_no_other_image(full, packed, fault, opened, monkeypatch):
    far = shards(full.root, cache_bytes=0) if opened else None
    vars(full).update(ALWAYS[fault])
    with monkeypatch.context() as hurried:
        hurried.setattr(store, "_PATIENCE_S", 1.5)
        try:
            images, line = images_of(far or shards(full.root, cache_bytes=0)), ""
        except InputError as error:
            images, line = None, str(error)
    assert (images == packed[1]) != bool(line)
    assert "\n" not in line
    if not (opened and full.off_bytes):  # once it is open, the sizes are known
        assert line
    vars(full).update({"stalls": False, "cuts": 0, "fails": 0, "garbage": set(), "off_bytes": 0})
    assert images_of(shards(full.root)) == packed[1]


def test_what_is_sent_arrives_and_is_sent_again_if_it_did_not(site, tmp_path):
    files = {f"run/{name}": tmp_path / name for name in ("empty", "small", "two words")}
    for i, file in enumerate(files.values()):
        file.write_bytes(b"x" * 100_000 * i)
    site.loses = 1
    for _ in range(2):  # and what is there is written over
        assert send(f"{site.root}/to", files) == f"{site.root}/to"
        assert {name: site.files[f"to/{name}"] for name in files} == {n: f.read_bytes() for n, f in files.items()}
        files["run/small"].write_bytes(b"changed")


def test_a_server_that_takes_nothing_is_one_error(site, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE_S", 1.2)
    (tmp_path / "a").write_bytes(b"abc")
    for fault, pattern in ({"loses": 10**6}, "no answer.* 1 bytes arrived, not 3"), ({"status": 403}, "access refused"):
        vars(site).update(fault)
        with pytest.raises(GoneError, match=rf"to/a: .*{pattern}"):
            send(f"{site.root}/to", {"a": tmp_path / "a"})
        site.loses = site.status = 0
    site.stalls = True
    with pytest.raises(GoneError, match="to/a: no answer"):
        send(f"{site.root}/to", {"a": tmp_path / "a"})
