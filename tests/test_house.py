"""The house's rules, held against the source: layers, sizes, and what must not be there. Each lists all offenders."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "kasoku"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = {"optim", "models", "data", "parallel", "memory", "device"}
ABOVE_ROOMS = {"report", "simulate", "tune"}
CORE_IMPORTS = {"torch", "safetensors"} | sys.stdlib_module_names
FILE_LINES, FUNCTION_LINES, CORE_LINES = 430, 50, 2000  # each stays below


@cache
def text_of(file: Path) -> str:
    return file.read_text()


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(text_of(file))))


def assert_none(offenders: Iterator[str], rule: str) -> None:
    found = list(offenders)
    assert not found, "\n".join([rule, *found])


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


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a file imports, wherever in it."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + str(node.module or "")
            elif node.module == "kasoku":
                yield from ((node.lineno, f"kasoku.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, str(node.module)


def wrong_with_import(room: str, name: str) -> str:
    """Why a file of this room may not import this; empty: it may."""
    if name.startswith("."):
        return "imports are absolute"
    top, _, rest = name.partition(".")
    if top != "kasoku":
        return "" if room != "core" or top in CORE_IMPORTS else "core takes torch, safetensors and the library"
    other = rest.split(".")[0] if rest else "__init__"
    if other == room or other.startswith("_"):
        return ""
    ours, theirs = layer_of(room), layer_of(other)
    if theirs > ours:
        return f"{other} lies above {room}"
    return "rooms of one layer do not import each other" if ours in (1, 2) and theirs == ours else ""


def test_imports_go_down_the_layers():
    assert_none(
        (
            f"{file.relative_to(SOURCE)}:{line} imports {name}: {wrong}"
            for file in FILES
            for line, name in imports(file)
            if (wrong := wrong_with_import(room_of(file), name))
        ),
        "imports that go up or sideways:",
    )


def too_long() -> Iterator[str]:
    core = 0
    for file in FILES:
        name, lines = file.relative_to(SOURCE), len(text_of(file).splitlines())
        core += lines if room_of(file) == "core" else 0
        if lines >= FILE_LINES:
            yield f"{name}: {lines} lines"
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                size = (node.end_lineno - body[0].lineno + 1) if body else 0
                if size >= FUNCTION_LINES:
                    yield f"{name}:{node.lineno} {node.name}: {size} lines"
    if core >= CORE_LINES:
        yield f"core: {core} lines"


def test_files_functions_and_core_stay_small():
    assert_none(too_long(), f"a file has under {FILE_LINES} lines, a function {FUNCTION_LINES}, core {CORE_LINES}:")


def test_what_a_user_gives_is_not_checked_by_assert():
    assert_none(
        (
            f"{file.relative_to(SOURCE)}:{node.lineno}"
            for file in FILES
            for node in nodes_of(file)
            if isinstance(node, ast.Assert)
        ),
        "raise InputError (what we got, what is allowed, what to do) in the place of assert:",
    )


def test_no_path_of_one_machine_is_in_the_source():
    assert_none(
        (
            f"{file.relative_to(SOURCE)}: {path}"
            for file in FILES
            for path in re.findall(r"/(?:home|work|root|Users|mnt)/[\w./-]*", text_of(file))
        ),
        "paths of one machine:",
    )


def test_an_init_only_names():
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr)
    assert_none(
        (
            f"{file.relative_to(SOURCE)}:{node.lineno}"
            for file in FILES
            if file.name == "__init__.py"
            for node in ast.parse(text_of(file)).body
            if not isinstance(node, allowed)
            or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
        ),
        "an __init__ imports, assigns names and says what the room is, nothing else:",
    )
