"""Hyperparameter search: each trial trains in a process of its own; Optuna proposes, prunes and records.

Note: resuming. The folder of a search holds Optuna's journal (a line of JSON for each event), a run folder and the
output of each trial, and the table. The same command resumes the search: a trial that was stopped, or whose search was
killed, continues from its checkpoint, because its settings are proposed again.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kasoku.core import InputError
from kasoku.core.files import write_atomically
from kasoku.tune.search_space import Space

DIVERGED, STOPPED = 3, 75  # exit codes of `kasoku train`
_POLL_S = 0.25
_GRACE_S = 120.0  # from SIGTERM to SIGKILL: a checkpoint is written in between
_HOPELESS = 3  # so many trials that cannot run, and none that can: the mistake is not in their settings
_MEND = "mend that, and give another --out"
_SHOWN = ("top1", "best_top1", "epochs", "seconds", "time_to_target_s")  # of a trial's result.json


def _as_here(job: int) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class SearchSettings:
    """A search.

    Args:
        command: trains, and takes `--set path=value`, `--out DIR` and `--continue` as `kasoku train` does.
        space: what is varied, by path.
        folder: where all of it is kept.
        trials: how many in all, those of earlier parts of the search included.
        jobs: how many train at once.
        about: what must be the same where a search goes on: the text of the recipe and of the space.
        environment: what a trial's process gets beside ours, by the number of the job (0 to jobs - 1) that runs it.

    Raises:
        InputError: for less than one trial or job.
    """

    command: tuple[str, ...]
    space: Space
    folder: Path
    trials: int
    jobs: int = 1
    about: str = ""
    environment: Callable[[int], dict[str, str]] = _as_here

    def __post_init__(self) -> None:
        if self.trials < 1 or self.jobs < 1:
            raise InputError(f"--trials {self.trials}, --jobs {self.jobs}: at least 1 of each is wanted")


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial.

    Args:
        trial: its number, from 1 on.
        how: "done", "pruned", "diverged", or "failed: " and why.
        settings: path -> value as TOML.
        result: some of result.json: accuracies from 0 to 1, seconds, epochs.
        folder: its run folder.
    """

    trial: int
    how: str
    settings: dict[str, str]
    result: dict[str, float | None]
    folder: str

    @property
    def top1(self) -> float:
        """The accuracy on the test images at the end, 0 to 1; 0 where there is none."""
        return self.result.get("top1") or 0.0

    def __str__(self) -> str:
        return f"trial {self.trial}: {self.how}{f', {self.top1:.2%}' if self.top1 else ''} ({_shown(self.settings)})"


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in settings.items())


@dataclass
class _Running:
    """A trial under way."""

    trial: Any
    process: subprocess.Popen[bytes]
    folder: Path
    output: Path
    read_bytes: int = 0  # of the log of metrics
    reported: int = 0  # evaluations
    pruned_s: float = 0.0  # when it was told to end


def search(
    plan: SearchSettings, *, caught: Sequence[str] = (), say: Callable[[str], None] = print
) -> list[TrialResult]:
    """Runs the trials that are left, and gives those that ended, the best first; trials.csv in the folder has them too.

    Args:
        plan: what to try.
        caught: filled from outside when a signal came: the trials under way are ended and can be gone on with.
        say: told a line when a trial begins and when it ends.

    Raises:
        InputError: without Optuna, for a folder in use or of another search, and where no trial can run.

    Ref: Akiba et al. 2019 (arXiv 1907.10902); its sampler: Bergstra et al. 2011 (TPE). Pruned is a trial whose best
    accuracy so far is below the median of the finished ones at the same evaluation.
    """
    optuna = _optuna()
    with _held(plan.folder):
        trials = _Trials(optuna, plan, _study(optuna, plan), say)
        try:
            while not caught and trials.go_on():
                time.sleep(_POLL_S)
                for outcome in trials.look():
                    say(str(outcome))
        finally:
            trials.end()
        if not caught:
            trials.refuse_failures()
        return trials.outcomes()


class _Trials:
    """The trials of one study: those under way, and what came of the others."""

    def __init__(self, optuna: Any, plan: SearchSettings, study: Any, say: Callable[[str], None]) -> None:
        self.states, self.plan, self.study, self.say = optuna.trial.TrialState, plan, study, say
        self.running: dict[int, _Running] = {}  # by job
        self.told: list[str] = []  # how those of this part ended
        for stale in study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            self._again(stale)

    def go_on(self) -> bool:
        """Starts what is free to start; False when nothing is left to wait for."""
        failed = [how for how in self.told if how.startswith("failed")]
        if len(failed) == len(self.told) >= _HOPELESS:
            raise InputError(f"all of the first {len(failed)} trials {failed[0]}: {_MEND}")
        ended = len(self.outcomes())
        for job in range(self.plan.jobs):
            if job not in self.running and ended + len(self.running) < self.plan.trials:
                self.running[job] = self._started(job)
        return bool(self.running)

    def refuse_failures(self) -> None:
        """Raises InputError where every trial that ended has failed."""
        outcomes = self.outcomes()
        if outcomes and all(one.how.startswith("failed") for one in outcomes):
            raise InputError(f"all {len(outcomes)} trials {outcomes[0].how}: {_MEND}")

    def look(self) -> Iterator[TrialResult]:
        """Reads what the trials write, ends those that are not worth it; gives those that have ended."""
        for job, one in list(self.running.items()):
            if one.process.poll() is None:
                self._follow(one)
            else:
                del self.running[job]
                self._tell(one)
                self._write()
                yield from (outcome for outcome in self.outcomes() if outcome.trial == one.trial.number + 1)

    def end(self) -> None:
        """Ends those under way by SIGTERM, which has them write a checkpoint; what was done is kept."""
        under_way = list(self.running.values())
        for one in under_way:
            one.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _GRACE_S
        try:
            for one in under_way:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, until - time.monotonic()))
        finally:
            for one in under_way:
                one.process.kill()
                one.process.wait()
        for one in under_way:
            if one.pruned_s or one.process.returncode == 0:
                self._tell(one)
            else:
                self._again(self.study.trials[one.trial.number])
        self.running.clear()
        self._write()

    def outcomes(self) -> list[TrialResult]:
        """Of the trials that ended by themselves or were pruned, the best first."""
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            if "how" in trial.user_attrs:
                kept = {name: trial.user_attrs[name] for name in ("how", "settings", "result", "folder")}
                found.append(TrialResult(trial.number + 1, **kept))
        return sorted(found, key=lambda one: (one.how != "done", -one.top1, one.trial))

    def _started(self, job: int) -> _Running:
        trial = self.study.ask()
        begun = trial.user_attrs.get("folder")
        folder = Path(begun) if begun else self.plan.folder / f"trial-{trial.number + 1}"
        trial.set_user_attr("folder", str(folder))
        settings = {path: one.proposed(trial, path) for path, one in self.plan.space.items()}
        trial.set_user_attr("settings", settings)
        given = [part for path, value in settings.items() for part in ("--set", f"{path}={value}")]
        command = [*self.plan.command, *given, "--out", str(folder), *(["--continue"] if begun else [])]
        environment = {**os.environ, **self.plan.environment(job)}
        output = folder.with_name(f"{folder.name}.log")
        with output.open("ab") as stream:  # a process group of its own: a terminal's Ctrl-C comes once, through us
            process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=subprocess.STDOUT, process_group=0
            )
        self.say(f"trial {trial.number + 1}: {'goes on' if begun else 'begins'} ({_shown(settings)})")
        return _Running(trial, process, folder, output)

    def _follow(self, one: _Running) -> None:
        """Reports what was evaluated since; ends a trial that is not worth going on with."""
        if one.pruned_s:
            if time.monotonic() - one.pruned_s > _GRACE_S:
                one.process.kill()
        elif self._report(one) and one.trial.should_prune():
            one.pruned_s = time.monotonic()
            one.process.send_signal(signal.SIGTERM)

    def _report(self, one: _Running) -> bool:
        """Reports the evaluations not reported yet; whether there were any."""
        log, before = one.folder / "metrics.jsonl", one.reported
        with suppress(OSError):
            size = log.stat().st_size
            if size != one.read_bytes:
                one.read_bytes, top1 = size, accuracies(log.read_text())
                for number in range(before, len(top1)):
                    one.trial.report(top1[number], number)
                one.reported = max(before, len(top1))
        return one.reported > before

    def _tell(self, one: _Running) -> None:
        """Tells the study what came of a trial that has ended."""
        code, result = one.process.returncode, _result(one.folder)
        self._report(one)
        top1 = result.get("top1")
        if code == 0 and top1 is not None:
            how, told = "done", {"values": top1}
        elif one.pruned_s:
            how, told = "pruned", {"state": self.states.PRUNED}
        elif code == DIVERGED:
            one.trial.report(0.0, one.reported)  # what the sampler learns from
            how, told = "diverged", {"state": self.states.PRUNED}
        else:
            how, told = f"failed: {_why(code, one.output)}", {"state": self.states.FAIL}
        one.trial.set_user_attr("result", result)
        one.trial.set_user_attr("how", how)
        self.told.append(how)
        self.study.tell(one.trial, **told)

    def _again(self, stopped: Any) -> None:
        """Has a trial that was stopped proposed again, to be gone on with in its folder."""
        folder = stopped.user_attrs.get("folder")
        self.study.tell(stopped.number, state=self.states.FAIL)
        self.study.enqueue_trial(stopped.params, user_attrs={"folder": folder} if folder else None)

    def _write(self) -> None:
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["trial", "how", *_SHOWN, *self.plan.space, "folder"])
        for one in self.outcomes():
            facts = [one.result.get(name) for name in _SHOWN]
            values = [one.settings.get(path, "") for path in self.plan.space]
            rows.writerow([one.trial, one.how, *facts, *values, one.folder])
        write_atomically(self.plan.folder / "trials.csv", lambda part: part.write_text(text.getvalue()))


def accuracies(metrics: str) -> list[float]:
    """The test accuracies (0 to 1) in the text of a metrics.jsonl, in order; a line half written is passed over."""
    found = []
    for line in metrics.splitlines():
        if '"test_top1"' in line:
            with suppress(ValueError):
                found.append(float(json.loads(line)["test_top1"]))
    return found


def _result(folder: Path) -> dict[str, float | None]:
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return {name: result.get(name) for name in _SHOWN}


def _why(code: int, output: Path) -> str:
    """What ended a trial that did not end well: the last line it said, where it said one."""
    if code == STOPPED:
        return "stopped by a signal from outside"
    with suppress(OSError):
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        if code > 0 and lines:
            return lines[-1].removeprefix("kasoku: ")
    return f"exit code {code}"


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise InputError('kasoku search needs Optuna: pip install "optuna>=4.0"') from error
    return optuna


def _study(optuna: Any, plan: SearchSettings) -> Any:
    """The study in the folder, or a new one. Raises InputError for one of another recipe or space."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = plan.folder / "search.journal"
    _mend(journal)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1)
    given = {"study_name": "kasoku", "direction": "maximize", "load_if_exists": True}
    study = optuna.create_study(storage=storage, pruner=pruner, **given)
    if study.user_attrs.get("about", plan.about) != plan.about:
        raise InputError(
            f"{plan.folder}: holds a search of another recipe or space: give another --out, or go on with the same"
        )
    study.set_user_attr("about", plan.about)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is called experimental
        # another seed for each part of a search: with the same one it would propose the same again
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=plan.jobs > 1)
    return study


def _mend(journal: Path) -> None:
    """Takes off what a search that was killed left: half a line, and Optuna's lock; the folder is ours alone."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists():
        text = journal.read_bytes()
        if text and not text.endswith(b"\n"):
            os.truncate(journal, text.rfind(b"\n") + 1)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder for this search alone. Raises InputError where another one has it, and where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise InputError(f"{folder}: cannot write there ({error.strerror}): choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: in use by a running search: wait for it, or give another --out") from error
        yield
