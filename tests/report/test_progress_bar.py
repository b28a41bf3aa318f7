"""The lines of a training that has no terminal."""

import io

import pytest

from kasoku.report import Bar


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s


@pytest.fixture
def lines(monkeypatch):
    """Trains 600 steps of a second each, and returns what was printed."""

    def run(quiet: bool, evaluation: int = 0) -> list[str]:
        out, clock = io.StringIO(), Seconds()
        monkeypatch.setattr("sys.stdout", out)
        bar = Bar(600, 6, quiet=quiet, clock=clock)
        for step in range(1, 101):
            clock.time_s += 1
            bar.step(step, step / 100, loss=1 / step, images_per_s=640)
            if step == evaluation:
                bar.accuracy(step / 100, 0.875, loss=1 / step, images_per_s=640)
        bar.close()
        return out.getvalue().splitlines()

    return run


def test_without_a_terminal_a_line_comes_every_30_s(lines):
    assert lines(quiet=False) == [
        "epoch 0.3/6  640 images/s  loss 0.033  0:09:30 left",
        "epoch 0.6/6  640 images/s  loss 0.017  0:09:00 left",
        "epoch 0.9/6  640 images/s  loss 0.011  0:08:30 left",
    ]


def test_an_evaluation_has_a_line_and_the_next_one_comes_30_s_later(lines):
    assert [line.split("  ")[0] for line in lines(quiet=False, evaluation=50)] == [
        "epoch 0.3/6",
        "epoch 0.5/6",
        "epoch 0.8/6",
    ]


def test_quiet_prints_no_line(lines):
    assert lines(quiet=True, evaluation=50) == []


def test_a_terminal_has_the_bar_and_no_lines(monkeypatch):
    out, clock = io.StringIO(), Seconds()
    out.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", out)
    bar = Bar(600, 6, clock=clock)
    clock.time_s += 60
    bar.step(60, 0.6, loss=0.5, images_per_s=640)
    bar.close()
    assert "left" not in out.getvalue()
    assert "640 images/s" in out.getvalue()
