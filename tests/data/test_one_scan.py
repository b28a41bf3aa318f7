"""One rank looks into image folders for all, whatever happens on which of them."""

import io
import os
import queue
import shutil
import threading
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from helpers.made import fill
from helpers.ranks import on_processes
from helpers.web import serving, web
from kasoku.commands import train
from kasoku.config.recipe import load
from kasoku.core import InputError, Threads
from kasoku.data import folder
from kasoku.data.datasets.folder import OneScan, once
from kasoku.distributed.consensus import ReportedElsewhereError
from kasoku.distributed.startup import Start
from kasoku.training.trainer import build

LIMIT_S = 60


class Wire:
    """What rank 0 broadcasts, to one other rank."""

    size = 2

    def __init__(self, rank, sent):
        self.rank, self._sent = rank, sent

    def broadcast_object(self, thing, *, root=0):
        if self.rank == 0:
            self._sent.put(thing)
            return thing
        return self._sent.get(timeout=LIMIT_S)


def pair():
    sent = queue.SimpleQueue()
    return [OneScan(Wire(rank, sent)) for rank in range(2)]


@pytest.fixture
def scans():
    return pair()


def failure(scan, make):
    with pytest.raises(InputError) as caught:
        scan.build(make)
    return str(caught.value)


def test_the_second_rank_lists_nothing(tree, scans, listings):
    first = scans[0].build(lambda: folder(str(tree)))
    assert listings.total() == 9
    scans[0].broadcast()
    scans[1].broadcast()
    second = scans[1].build(lambda: folder(str(tree)))
    assert listings.total() == 9
    assert (second.train.paths, second.test.paths) == (first.train.paths, first.test.paths)
    assert second.index() == first.index()


def test_who_asks_early_waits_and_who_asks_for_no_folder_does_not(tree, scans):
    assert pair()[1].build(lambda: 3) == 3
    found = []
    asking = threading.Thread(target=lambda: found.append(scans[1].build(lambda: folder(str(tree)))), daemon=True)
    asking.start()
    hearing = threading.Thread(target=scans[1].broadcast, daemon=True)
    hearing.start()
    asking.join(0.2)
    assert not found
    telling = threading.Thread(target=scans[0].broadcast, daemon=True)
    telling.start()
    asking.join(0.2)
    assert not found
    scans[0].build(lambda: folder(str(tree)))
    for thread in (telling, hearing, asking):
        thread.join(LIMIT_S)
    assert len(found[0].train) == 12


def test_folders_go_by_their_roots_and_one_unknown_to_rank_0_is_listed(tree, scans, listings):
    roots = [str(tree / part) for part in ("train", "val")]
    first = scans[0].build(lambda: [folder(root) for root in roots])
    for scan in scans:
        scan.broadcast()
    listings.clear()
    second = scans[1].build(lambda: [folder(root) for root in reversed(roots)])
    assert not listings
    assert [d.train.paths for d in reversed(second)] == [d.train.paths for d in first]
    assert len(scans[1].build(lambda: folder(str(tree))).train) == 12


def test_what_fails_on_rank_0_fails_on_all_with_its_line(tree, scans):
    fill(tree / "train" / "void", 0)
    line = failure(scans[0], lambda: folder(str(tree)))
    assert "void: a class folder with no image" in line
    for scan in scans:
        scan.broadcast()
    assert failure(scans[1], lambda: folder(str(tree))) == line


def test_after_a_failure_of_rank_0_nobody_else_looks(tree, scans, listings):
    def full():
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        scans[0].build(full)
    for scan in scans:
        scan.broadcast()
    assert failure(scans[1], lambda: folder(str(tree))) == "no space left"
    assert not listings


def test_a_rank_that_fails_alone_hears_rank_0_all_the_same(tree, scans, tmp_path):
    assert "no such folder" in failure(scans[1], lambda: folder(str(tmp_path / "gone")))
    scans[0].build(lambda: folder(str(tree)))
    for scan in scans:
        scan.broadcast()
    assert len(scans[1].build(lambda: folder(str(tree))).train) == 12


def test_files_that_only_rank_0_has_are_told_at_the_start(tree, monkeypatch, tmp_path):
    copied = shutil.copytree(tree, tmp_path / "copy")
    monkeypatch.setenv("PHOTOS", str(tree))
    starts = [pair(), pair()]
    for scans in starts:
        scans[0].build(lambda: folder("$PHOTOS"))
        for scan in scans:
            scan.broadcast()
    monkeypatch.setenv("PHOTOS", str(copied))
    found = starts[0][1].build(lambda: folder("$PHOTOS"))
    assert all(path.startswith(f"{copied}/") for path in found.train.paths)
    (copied / "val" / "cat" / "1.png").unlink()
    line = failure(starts[1][1], lambda: folder("$PHOTOS"))
    assert line == f"{copied}/val/cat/1.png: not on this host, though rank 0 has it; give all ranks the same data"


def test_who_waits_is_told_where_the_ranks_cannot_be_connected(tree, scans):
    def broken():
        raise RuntimeError("connection reset")

    with pytest.raises(RuntimeError, match="connection reset"):
        scans[1].before_broadcast(broken)
    with pytest.raises(RuntimeError, match="connection reset"):
        scans[1].build(lambda: folder(str(tree)))


@pytest.mark.parametrize("told_first", [True, False])
def test_what_was_found_is_let_go(scans, told_first):
    def look():
        once("root", lambda: ({"": {"a": [f"{i:09}.png" for i in range(20_000)]}}, {}))

    steps = [lambda: scans[0].build(look), scans[0].broadcast]
    if told_first:
        steps += [scans[1].broadcast, lambda: scans[1].build(look)]
    else:
        steps += [lambda: scans[1].build(lambda: None), scans[1].broadcast]
    tracemalloc.start()
    try:
        for step in steps:
            step()
        assert tracemalloc.get_traced_memory()[0] < 200_000  # the names alone take over a million bytes
        assert tracemalloc.get_traced_memory()[1] > 1_000_000
    finally:
        tracemalloc.stop()


# ---- far away


@pytest.fixture
def site():
    """Photos on a web server that counts its requests."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    with serving() as site:
        names = (f"{part}/{name}/{i}.png" for part in ("train", "val") for name in ("ant", "bee") for i in range(5))
        site.files = {f"photos/{name}": out.getvalue() for name in names}
        yield site


@web
@pytest.mark.parametrize("tells", [True, False], ids=["a list that tells sizes", "a list of names"])
def test_the_second_rank_asks_a_far_source_for_nothing_that_rank_0_knows(site, scans, tmp_path, monkeypatch, tells):
    from fsspec.asyn import sync_wrapper
    from fsspec.implementations.http import HTTPFileSystem

    real = HTTPFileSystem._ls

    async def listed(self, url, detail=True, **more):  # as those of object stores tell
        entries = await real(self, url, detail, **more)
        paths = [entry["name"].removeprefix(f"{site.root}/") for entry in entries]
        known = [{"size": len(site.files[path]), **site.tag(path)} if path in site.files else {} for path in paths]
        return [entry | facts for entry, facts in zip(entries, known, strict=True)]

    if tells:
        monkeypatch.setattr(HTTPFileSystem, "ls", sync_wrapper(listed))
    made = [lambda rank=rank: folder(f"{site.root}/photos", cache=str(tmp_path / f"{rank}")) for rank in range(2)]
    first = scans[0].build(made[0])
    for scan in scans:
        scan.broadcast()
    asked = site.requests
    second = scans[1].build(made[1])
    assert site.requests == asked
    assert second.index() == first.index()
    for split in (second.train, second.test):
        assert {split.read(i) for i in range(len(split))} == set(site.files.values())
    assert len(site.reads) == 20
    assert site.requests == asked + (20 if tells else 40)  # beside an image's bytes, one for its size
    path = second.train.paths[0]
    state = len(site.files[f"photos/{path}"]), site.tag(f"photos/{path}")["ETag"]
    assert second.train.store.state(path) == state == first.train.store.state(path)


# ---- in a start

RECIPE = """
epochs = 1
batch = 8
model = { use = "kasoku.models.cifarnet", widths = [8, 16] }
data = { use = "kasoku.data.folder", root = "$PHOTOS", size = 16 }
optimizer = { use = "kasoku.optim.sgd", lr = 0.01, momentum = 0.9 }
device = { precision = "fp32", threads = 1 }
"""


@pytest.fixture
def recipe(tmp_path):
    random = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / "0" / label).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(random.integers(0, 256, (16, 16, 3), np.uint8)).save(tmp_path / "0" / label / f"{i}.png")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def started(comm, recipe, overlap):
    """A rank's start with a root of its own: how often it listed its folders and its first path, or what was told."""
    home = recipe.parent / str(comm.rank)
    os.environ |= {"PHOTOS": str(home), "XDG_CACHE_HOME": str(recipe.parent / f"cache-{comm.rank}")}
    found, real = Counter(), os.scandir
    os.scandir = lambda path: found.update([str(path).startswith(str(home))]) or real(path)
    try:
        training = build(load(recipe), comm, start=Start(overlap=overlap))
    except InputError as error:
        return isinstance(error, ReportedElsewhereError), str(error)
    training.job.close()
    return found[True], training.dataset.train.paths[0].removeprefix(str(recipe.parent))


@pytest.mark.process
@pytest.mark.parametrize("overlap", [pytest.param(True, marks=pytest.mark.smoke), False])
def test_of_two_ranks_with_data_of_their_own_one_lists_it(recipe, overlap):
    assert on_processes(2, started, recipe, overlap) == [(3, "/0/a/0.png"), (0, "/1/a/0.png")]


@pytest.mark.process
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("gone", "line"), [(0, "root=$PHOTOS: no such folder"), (1, "rank 1: root=$PHOTOS: no such")])
def test_a_root_that_one_rank_lacks_is_told_once(recipe, overlap, gone, line):
    shutil.rmtree(recipe.parent / str(gone))
    (told, said), (silent, _) = on_processes(2, started, recipe, overlap)
    assert (told, silent) == (False, True)
    assert said.startswith(line)


def test_ranks_that_take_turns_list_once(recipe, monkeypatch, listings):
    monkeypatch.setenv("PHOTOS", str(recipe.parent / "0"))

    def rank_main(comm):
        training = build(load(recipe), comm)
        training.job.close()
        return training.dataset.index()

    one, other = Threads(2).run(rank_main)
    assert one == other
    assert {name: listings[name] for name in ("0", "a", "b")} == {"0": 1, "a": 1, "b": 1}


def looked_ahead(comm, photos):
    """A rank of `kasoku train --data DIR --dry-run`: how often it listed the folders, or what was told."""
    os.environ["XDG_CACHE_HOME"] = str(photos.parent / f"cache-{comm.rank}")
    found, real = Counter(), os.scandir
    os.scandir = lambda path: found.update([str(path).startswith(str(photos))]) or real(path)
    arguments = train.TrainArguments(data=photos, dry_run=True, quiet=True)
    try:
        assert train._train_on_rank(arguments, comm, Start()) == 0
    except InputError as error:
        return isinstance(error, ReportedElsewhereError), str(error)
    return found[True]


@pytest.mark.process
def test_of_two_ranks_that_train_on_a_folder_without_a_recipe_one_lists_it(recipe):
    first, second = on_processes(2, looked_ahead, recipe.parent / "0")
    assert (first >= 3, second) == (True, 0)


@pytest.mark.process
def test_a_folder_without_images_is_told_once_without_a_recipe_too(tmp_path):
    fill(tmp_path / "photos" / "void", 0)
    (told, said), (silent, _) = on_processes(2, looked_ahead, tmp_path / "photos")
    assert (told, silent) == (False, True)
    assert "void: a class folder with no image" in said
