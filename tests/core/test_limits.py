"""A setting outside the range or the words that its field declares is refused in one line."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from kasoku.core import Checked, InputError, Range, checked


@dataclass(frozen=True)
class Settings(Checked):
    count: Annotated[int, Range(at_least=1)] = 1
    share: Annotated[float, Range(above=0, at_most=1)] = 0.5
    bound: Annotated[float | None, Range("None for no bound", at_least=0, below=10)] = None
    pair: Annotated[tuple[float, float], Range(above=0, at_most=1000)] = (1, 1)
    word: Literal["one", "two", "three"] = "one"
    kind: ClassVar[str] = "of the class"
    anything: Any = None


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"count": 0}, "count=0: at least 1"),
        ({"share": 0.0}, "share=0.0: above 0 and at most 1"),
        ({"share": 1.5}, "share=1.5: above 0 and at most 1"),
        ({"share": float("nan")}, "share=nan: above 0 and at most 1"),
        ({"bound": -1}, "bound=-1: at least 0 and below 10; None for no bound"),
        ({"bound": 10}, "bound=10: at least 0 and below 10; None for no bound"),
        ({"pair": (0, 2)}, "pair=(0, 2): above 0 and at most 1,000"),
        ({"pair": (0.5, 1001)}, "pair=(0.5, 1001): above 0 and at most 1,000"),
        ({"word": "four"}, 'word="four": "one", "two" or "three"'),
    ],
)
def test_a_value_outside_is_refused_with_what_is_allowed(wrong: dict[str, Any], line: str):
    with pytest.raises(InputError) as refused:
        Settings(**wrong)
    assert str(refused.value) == line


def test_values_at_the_ends_and_none_are_taken():
    assert Settings(1, 1.0, 0, (1, 1000), "three", object()).share == 1.0
    assert Settings(2, 1e-9, 9.9).bound == 9.9
    assert Settings(bound=None).bound is None


def test_a_subclass_is_checked_by_the_fields_of_both():
    @dataclass(frozen=True)
    class More(Settings):
        extra: Annotated[int, Range(at_least=0)] = 0

    with pytest.raises(InputError, match="count=0"):
        More(count=0)
    with pytest.raises(InputError, match="extra=-1"):
        More(extra=-1)


def test_metadata_that_is_no_range_is_left_to_its_reader():
    @dataclass(frozen=True)
    class Documented(Checked):
        side: Annotated[int, "pixels", Range(at_least=1)] = 1
        known: Annotated[int, {1: "few"}] = 2

    assert Documented().known == 2
    with pytest.raises(InputError, match="side=0: at least 1"):
        Documented(0)


def test_a_type_that_cannot_be_found_switches_no_other_check_off():
    @dataclass(frozen=True)
    class Later(Settings):
        other: "OnlyForTypeCheckers | None" = None  # noqa: F821
        extra: "Annotated[int, Range(at_least=0)]" = 0

    assert Later().other is None
    with pytest.raises(InputError, match="count=0"):
        Later(count=0)
    with pytest.raises(InputError, match="extra=-1"):
        Later(extra=-1)


def test_a_range_that_cannot_be_found_is_an_error_of_its_author():
    @dataclass(frozen=True)
    class Local(Checked):
        extra: "Annotated[int, Bounds(at_least=0)]" = 0  # noqa: F821

    with pytest.raises(NameError, match="Bounds"):
        Local()


def test_a_function_refuses_arguments_as_a_class_refuses_settings():
    @checked
    def made(count: Annotated[int, Range("of them", at_least=1)], *, kind: Literal["a", "b"] = "a") -> str:
        return f"{count}{kind}"

    assert (made(1), made(count=2, kind="b"), made.__name__) == ("1a", "2b", "made")
    for call in (lambda: made(0), lambda: made(count=0)):
        with pytest.raises(InputError, match="count=0: at least 1; of them"):
            call()
    with pytest.raises(InputError, match='kind="c": "a" or "b"'):
        made(1, kind="c")
