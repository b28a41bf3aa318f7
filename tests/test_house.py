"""The house's rules, held against the source: layers, sizes, and what must not be there."""

import ast
import re
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kasoku"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = {"optim", "models", "data", "parallel", "memory", "device"}
ABOVE_ROOMS = {"report", "simulate", "tune"}
CORE_IMPORTS = {"torch", "safetensors"} | sys.stdlib_module_names

every_file = pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))


def room_of(file: Path) -> str:
    """The room of a file: a folder of src/kasoku, or the name of a module at its top."""
    first = file.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def layer_of(room: str) -> int:
    """0 core, 1 rooms, 2 what looks over rooms, 3 the trainer and all beside it, 4 the command."""
    if room in ("core", "__init__", "py.typed"):
        return 0
    if room in ROOMS:
        return 1
    if room in ABOVE_ROOMS:
        return 2
    return 4 if room in ("cli", "__main__") else 3


def imports(file: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            if node.module == "kasoku":
                found += [(node.lineno, f"kasoku.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, str(node.module)))
    return found


@every_file
def test_imports_go_down_the_layers(file: Path):
    room = room_of(file)
    for line, name in imports(file):
        where = f"{file.relative_to(SOURCE)}:{line} imports {name}"
        top, _, rest = name.partition(".")
        if top != "kasoku":
            assert room != "core" or top in CORE_IMPORTS, f"{where}: core takes torch, safetensors and the library"
            continue
        other = rest.split(".")[0] if rest else "__init__"
        if other != room and not other.startswith("_"):
            ours, theirs = layer_of(room), layer_of(other)
            assert theirs <= ours, f"{where}: {other} lies above {room}"
            assert ours not in (1, 2) or theirs < ours, f"{where}: rooms of one layer do not import each other"


@every_file
def test_a_file_stays_under_400_lines_and_a_function_under_50(file: Path):
    text = file.read_text()
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            size = (node.end_lineno - body[0].lineno + 1) if body else 0
            assert size < 50, f"{node.name} has {size} lines"


@every_file
def test_what_a_user_gives_is_not_checked_by_assert(file: Path):
    lines = [n.lineno for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Assert)]
    assert not lines, "raise InputError: what we got, what is allowed, what to do"


@every_file
def test_no_path_of_one_machine_is_in_the_source(file: Path):
    found = re.findall(r"/(?:home|work|root|Users|mnt)/[\w./-]*", file.read_text())
    assert not found


@every_file
def test_an_init_only_names(file: Path):
    if file.name != "__init__.py":
        return
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    body = ast.parse(file.read_text()).body
    assert all(isinstance(node, allowed) for node in body)
    assert all(isinstance(node.value, ast.Constant) for node in body if isinstance(node, ast.Expr))


def test_core_stays_readable():
    assert sum(len(f.read_text().splitlines()) for f in (SOURCE / "core").glob("*.py")) < 2000
