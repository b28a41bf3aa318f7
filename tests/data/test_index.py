"""What is kept of a list of files never shows: the result is that of listing everything."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from stat import S_ISDIR
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made import fill
from kasoku.core import InputError
from kasoku.data import folder
from kasoku.data.datasets.folder_index import arranged, indexed, look_in

S = 10**9


def age(monkeypatch, seconds=10):
    """Lets what was changed until now have been changed so long ago, and what changes next have another time."""
    now_ns = time.time_ns() + seconds * S
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    time.sleep(0.02)


def fresh(top):
    with tempfile.TemporaryDirectory() as cache:
        return indexed(top, cache)


def test_only_a_folder_that_changed_is_listed_again(tree, monkeypatch, listings):
    indexed(tree)
    age(monkeypatch)
    indexed(tree)
    listings.clear()
    (tree / "train" / "bee" / "9.jpg").write_bytes(b"")
    found = indexed(tree)
    assert listings == {"bee": 1}
    assert found["train"]["bee"][-1] == "9.jpg"
    listings.clear()
    time.sleep(0.02)
    (tree / "val" / "ant" / "0.png").rename(tree / "val" / "cat" / "7.png")
    shutil.rmtree(tree / "train" / "cat")
    fill(tree / "train" / "dog", 1)
    found = indexed(tree)
    assert listings == {"ant": 1, "cat": 1, "train": 1, "dog": 1}
    assert found == fresh(tree)


def test_an_index_that_still_holds_is_not_written(tree, tmp_path, monkeypatch):
    age(monkeypatch)
    indexed(tree, str(tmp_path / "c"))
    (index,) = (tmp_path / "c").iterdir()
    os.utime(index, ns=(S, S))
    indexed(tree, str(tmp_path / "c"))
    assert index.stat().st_mtime_ns == S


def tell(monkeypatch, **times):
    """Lets the system tell these times of all folders."""
    real = os.stat

    def stat(path, *given, **more):
        state = real(path, *given, **more)
        told = {name: getattr(state, name) for name in dir(state) if name.startswith("st_")}
        return SimpleNamespace(**told | (times if S_ISDIR(state.st_mode) else {}))

    monkeypatch.setattr(os, "stat", stat)


def test_a_change_within_one_tick_of_the_file_system_is_seen(tree, monkeypatch):
    began_ns = time.time_ns()
    tell(monkeypatch, st_mtime_ns=began_ns, st_ctime_ns=began_ns)
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + 1 * S)
    indexed(tree)
    (tree / "train" / "bee" / "9.png").write_bytes(b"")
    assert "9.png" in indexed(tree)["train"]["bee"]
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + 3 * S)
    indexed(tree)
    (tree / "train" / "bee" / "8.png").write_bytes(b"")  # no file system gives this the old time: it is believed
    assert "8.png" not in indexed(tree)["train"]["bee"]


def test_times_put_back_and_folders_put_in_each_others_place_are_seen(tree, monkeypatch):
    bee, cat, spare = (tree / "train" / name for name in ("bee", "cat", "spare"))
    fill(cat, 6)
    times = (bee, cat, tree / "train")
    for path in times:
        os.utime(path, ns=(S, S))
    age(monkeypatch)
    indexed(tree)
    bee.rename(spare)
    cat.rename(bee)
    spare.rename(cat)
    for path in times:
        os.utime(path, ns=(S, S))
    found = indexed(tree)["train"]
    assert (len(found["bee"]), len(found["cat"])) == (6, 4)
    time.sleep(0.02)
    (bee / "0.png").unlink()
    os.utime(bee, ns=(S, S))
    assert len(indexed(tree)["train"]["bee"]) == 5


def test_swapped_folders_are_seen_where_only_contents_have_a_time(tree, monkeypatch):
    bee, cat, spare = (tree / "train" / name for name in ("bee", "cat", "spare"))
    fill(cat, 6)
    tell(monkeypatch, st_mtime_ns=S, st_ctime_ns=S)
    indexed(tree)
    for path, to in ((bee, spare), (cat, bee), (spare, cat)):
        path.rename(to)
    found = indexed(tree)["train"]
    assert (len(found["bee"]), len(found["cat"])) == (6, 4)


def test_a_file_system_that_keeps_no_times_is_listed_each_time(tree, monkeypatch):
    tell(monkeypatch, st_mtime_ns=0, st_ctime_ns=0)
    indexed(tree)
    (tree / "train" / "bee" / "9.png").write_bytes(b"")
    assert "9.png" in indexed(tree)["train"]["bee"]


def test_a_link_is_followed_anew_at_each_start(tree, tmp_path, monkeypatch):
    fill(tmp_path / "disk", 3)
    (tree / "train" / "dog").symlink_to(tmp_path / "disk")
    (tree / "train" / "eel").symlink_to(tmp_path / "later")
    age(monkeypatch)
    assert sorted(indexed(tree)["train"]) == ["ant", "bee", "cat", "dog"]
    (tmp_path / "disk").rename(tmp_path / "later")
    found = indexed(tree)
    assert sorted(found["train"]) == ["ant", "bee", "cat", "eel"]
    assert found == fresh(tree)


def test_a_class_that_becomes_a_part_is_read_as_one(tmp_path, monkeypatch):
    top = tmp_path / "photos"
    for name in ("cat", "val"):
        fill(top / name, 3)
    fill(top / "val" / "cat", 2)
    age(monkeypatch)
    assert sorted(indexed(top)[""]) == ["cat", "val"]
    fill(top / "train" / "cat", 4)
    assert indexed(top) == fresh(top)
    assert list(indexed(top)) == ["train", "val"]


FOLDERS = st.sampled_from(["", "cat", "dog", "train", "val", "test", "train/cat", "train/dog", "val/cat", "test/dog"])
FILES = st.sampled_from(["0.png", "1.jpg", "2.PNG", "notes.txt", ".hidden.png", "cat"])
EDITS = st.one_of(
    st.tuples(st.just("add"), FOLDERS, FILES),
    st.tuples(st.just("remove"), FOLDERS, FILES),
    st.tuples(st.just("rename"), FOLDERS, FOLDERS),
    st.tuples(st.just("swap"), FOLDERS, FOLDERS),
    st.tuples(st.just("drop"), FOLDERS, st.none()),
)


def edit(top, how, where, other):
    """One change of a tree; nothing where it cannot be."""
    try:
        if how == "add":
            (top / where).mkdir(parents=True, exist_ok=True)
            (top / where / other).write_bytes(b"")
        elif how == "remove":
            (top / where / other).unlink()
        elif how == "rename":
            (top / where).rename(top / other)
        elif how == "swap" and where and other:
            (top / where).rename(top / ".aside")
            try:
                (top / other).rename(top / where)
            except OSError:
                (top / ".aside").rename(top / where)
            else:
                (top / ".aside").rename(top / other)
        elif how == "drop" and where:
            shutil.rmtree(top / where)
    except OSError:
        return


def contents(top):
    return {path: (sorted(folders), sorted(files)) for path, folders, files in os.walk(top)}


def outcome(top, cache):
    try:
        d = folder(str(top), cache=str(cache))
    except InputError as error:
        return str(error)
    return d.classes, [(part.paths, part.labels_N.tolist()) for part in (d.train, d.test)]


def check_after_changes(steps):
    now_ns, young = time.time_ns() + 1000 * S, False
    with tempfile.TemporaryDirectory() as home:
        top = Path(home) / "photos"
        for name in ("cat", "dog"):
            fill(top / name, 2)
        for number, (change, soon) in enumerate(steps):
            before = contents(top)
            edit(top, *change)
            # within the tick of the last change only where that was just before the last look
            now_ns += 0 if young and number % 2 else 100 * S
            for path, names in contents(top).items():
                if before.get(path) != names:
                    os.utime(path, ns=(now_ns, now_ns))
            young = soon
            with patch("time.time_ns", lambda: now_ns + (1 if young else 10) * S):  # noqa: B023 - called here
                assert outcome(top, Path(home) / "kept") == outcome(top, Path(home) / f"fresh-{number}")


steps_of = given(st.lists(st.tuples(EDITS, st.booleans()), min_size=2, max_size=12))


@settings(max_examples=12, deadline=None)
@steps_of
def test_after_any_changes_the_result_is_that_of_listing_everything(steps):
    check_after_changes(steps)


@pytest.mark.exhaustive
@settings(max_examples=80, deadline=None)
@steps_of
def test_after_many_changes_the_result_is_that_of_listing_everything(steps):
    check_after_changes(steps)


def test_a_list_of_paths_is_looked_at_as_a_tree_on_a_disk_is(tree):
    fill(tree / "train" / "ant" / "deeper", 1)
    fill(tree / "train" / ".git", 1)
    (tree / "train" / "bee" / "notes.txt").write_text("")
    (tree / "train" / "bee" / ".0.png").write_bytes(b"")
    paths = [str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()]
    assert arranged(look_in(sorted(paths, key=hash)), "far") == fresh(tree)
    with pytest.raises(InputError, match="far/train/dog: a class folder with no image"):
        arranged(look_in([*paths, "train/dog/"]), "far")  # as some stores note an empty folder
