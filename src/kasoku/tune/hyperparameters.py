"""Hyperparameter search: each trial trains in its own process; Optuna proposes, prunes and records.

Note: resuming. The folder of a search has Optuna's journal (a line of JSON for each event), a run folder and the
output of each trial. The same command resumes the search: a trial that was stopped, or whose search was killed,
continues from its checkpoint, because its settings are proposed again; to Optuna it is a new trial.
"""

import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

from kasoku.core import Checked, InputError, Range
from kasoku.core.files import json_text, locked_folder, write_text
from kasoku.tune.fork_server import Process, Start, fork_server, new_process
from kasoku.tune.search_space import Space

DIVERGED, STOPPED = 3, 75  # exit codes of `kasoku train`
_POLL_S = 0.02
_GRACE_S = 120.0  # from SIGTERM to SIGKILL, to write a checkpoint
_MAX_FAILURES = 3  # if the first three trials fail, the mistake is not in their settings
_REMEDY = "mend that, and give another --out"
_FIGURES = ("top1", "seconds")  # of a trial's result.json
_REDUCTION = 4  # of successive halving: one trial in 4 goes on, to 4 times the evaluations
_RUNGS = tuple(_REDUCTION**k - 1 for k in range(10))  # the evaluations at which it judges, from 0 on


@dataclass(frozen=True)
class SearchSettings(Checked):
    """The settings of a search. Raises InputError for less than one trial or job."""

    command: tuple[str, ...]  # of a training, with the options --set, --out and --continue of `kasoku train`
    space: Space
    folder: Path
    trials: Annotated[int, Range(at_least=1)]  # those of earlier parts of the search included
    jobs: Annotated[int, Range(at_least=1)] = 1  # simultaneous trials
    about: str = ""  # the recipe and the space, which must not change when the search is continued
    environment: Callable[[int], dict[str, str]] = field(default=lambda job: {})  # of a trial, by its job
    pruner: Literal["halving", "median", "none"] = "halving"
    prepare: Callable[[], object] | None = None  # called once by a `fork_server` of the trials; None: new processes


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial that has ended."""

    trial: int  # its number, from 1 on
    how: str  # "done", "pruned", "diverged", or "failed: " with the reason
    settings: dict[str, str]  # path -> value as TOML
    result: dict[str, float | None]  # figures of result.json: the accuracy from 0 to 1, seconds
    folder: str

    @classmethod
    def of(cls, trial: Any, home: Path) -> "TrialResult":
        """That of Optuna's trial, in the folder of the search, which may have moved."""
        kept = {name: trial.user_attrs[name] for name in ("how", "settings", "result")}
        return cls(_number(trial), **kept, folder=str(home / Path(trial.user_attrs["folder"]).name))

    @property
    def top1(self) -> float:
        """The accuracy on the test images at the end, 0 to 1; 0 if unknown."""
        return self.result.get("top1") or 0.0

    def __str__(self) -> str:
        settings = ", ".join(map("=".join, self.settings.items()))
        return f"trial {self.trial}: {self.how}{f', {self.top1:.2%}' if self.top1 else ''} ({settings})"


def _number(trial: Any) -> int:
    """The number of a trial, by its folder: to Optuna it has another one when it continues."""
    return int(trial.user_attrs["folder"].rpartition("-")[2])


@dataclass
class _TrialProcess:
    """A running trial."""

    trial: Any
    process: Process
    folder: Path
    reported: int = 0  # evaluations
    judged: int = 0  # evaluations at which it was judged, those before it was continued included
    ended_s: float = 0.0  # when it was signalled to end
    pruned: bool = False


def search(plan: SearchSettings, *, caught: Sequence[str] = (), say: Callable[[str], Any] = print) -> list[TrialResult]:
    """Runs the remaining trials. Returns all that ended, the best first, and writes search.json in the folder.

    Once `caught` has a signal, running trials end with a checkpoint and can be continued. `say` gets a line when one
    begins and when it ends. Raises InputError without Optuna, for a folder in use or of another search, and if none can
    run.

    Ref: Akiba et al. 2019 (arXiv 1907.10902); Bergstra et al. 2011 (TPE). "halving" (Jamieson and Talwalkar 2016, arXiv
    1502.07943) pauses trials after 1, 4, 16, ... evaluations; once all have begun, the best quarter at each go on.
    "median" prunes a trial whose best accuracy is below the median of finished trials at the same evaluation.
    """
    if not find_spec("optuna"):
        raise InputError('kasoku search needs Optuna: pip install "optuna>=4.0"')
    server = fork_server(plan.prepare) if plan.prepare else nullcontext(new_process)
    with server as start, locked_folder(plan.folder, "search"):
        import optuna  # while the server prepares

        trials, polled_s = _Trials(optuna, plan, say, start), 0.0
        try:
            while not caught and trials.start_free_jobs():
                time.sleep(max(_POLL_S, 10 * polled_s))  # long metrics take time to read, from the trials
                began = time.perf_counter()
                trials.poll()
                polled_s = time.perf_counter() - began
        finally:
            trials.end()
        outcomes = trials.outcomes()
        _write(plan.folder, outcomes)
        if outcomes and not caught and all(run.how.startswith("failed") for run in outcomes):
            raise InputError(f"all {len(outcomes)} trials {outcomes[0].how}: {_REMEDY}")
        return outcomes


def _write(folder: Path, outcomes: Sequence[TrialResult]) -> None:
    """Writes search.json, of trials with the best first."""
    done = [run for run in outcomes if run.how == "done"]
    seconds = [run.result["seconds"] for run in done if run.result["seconds"]]  # from the start of its process
    best_so_far = accumulate((run.top1 for run in sorted(outcomes, key=lambda run: run.trial)), max)
    document = {
        "trials": len(outcomes),
        "first": asdict(min(done, key=lambda run: run.trial)) if done else None,
        "best": asdict(done[0]) if done else None,
        "seconds_a_trial": mean(seconds) if seconds else None,
        "best_by_trial": [[i, top1] for i, top1 in enumerate(best_so_far, start=1)],
    }
    write_text(folder / "search.json", json_text(document))


class _Trials:
    """The trials of one study: running processes, and the results of ended trials."""

    def __init__(self, optuna: Any, plan: SearchSettings, say: Callable[[str], None], start: Start) -> None:
        self.start = start
        self.states, self.study, self.plan, self.say = optuna.trial.TrialState, _study(optuna, plan), plan, say
        self.running: dict[int, _TrialProcess] = {}  # by job
        self.ended: list[str] = []  # how trials of this part ended
        for stale in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
            self._enqueue_again(stale, judged=0)

    def start_free_jobs(self) -> bool:
        """Starts a trial on each free job; returns False when no trial runs."""
        failed = [how for how in self.ended if how.startswith("failed")]
        if len(failed) == len(self.ended) >= _MAX_FAILURES:
            raise InputError(f"all of the first {len(failed)} trials {failed[0]}: {_REMEDY}")
        for job in range(self.plan.jobs):
            if job in self.running or not self._enqueue_next():
                continue
            number, trial = 1 + max(self._begun(), default=0), self.study.ask()
            earlier = trial.user_attrs.get("folder")
            folder = self.plan.folder / (Path(earlier).name if earlier else f"trial-{number}")  # it may have moved
            trial.set_user_attr("folder", str(folder))
            settings = {path: choice.proposed(trial, path) for path, choice in self.plan.space.items()}
            trial.set_user_attr("settings", settings)
            options = [part for path, value in settings.items() for part in ("--set", f"{path}={value}")]
            command = [*self.plan.command, *options, "--out", str(folder), *(["--continue"] if earlier else [])]
            judged = trial.user_attrs.get("judged", len(_evaluations(folder)))
            process = self.start(command, os.environ | self.plan.environment(job), Path(f"{folder}.log"))
            self.running[job] = _TrialProcess(trial, process, folder, judged=judged)
            self._report(self.running[job])  # at once, as others are compared with it
            begins = f"{'continues' if earlier else 'begins'} ({', '.join(map('='.join, settings.items()))})"
            self.say(f"trial {_number(trial)}: {begins}")
        return bool(self.running)

    def _begun(self) -> dict[int, Any]:
        """Optuna's last trial of each number."""
        return {_number(t): t for t in self.study.get_trials(deepcopy=False) if "folder" in t.user_attrs}

    def _paused(self, begun: dict[int, Any]) -> Any:
        """The pruned trial that continues next: of the lowest rung, the best; None while new ones are left."""
        best = ((trial, _REDUCTION * (rung + 1) - 1) for rung in _RUNGS for trial in _best(begun, rung))
        here = (trial for trial, next_rung in best if max(trial.intermediate_values) < next_rung)
        pruned = (trial for trial in here if trial.user_attrs.get("how") == "pruned")
        return next(pruned, None) if self.plan.pruner == "halving" and len(begun) >= self.plan.trials else None

    def _enqueue_next(self) -> bool:
        """Whether there is a trial to start: one that was stopped, a new one, or a pruned one, which it enqueues."""
        begun, waiting = self._begun(), self.study.get_trials(deepcopy=False, states=(self.states.WAITING,))
        if paused := None if waiting else self._paused(begun):
            self._enqueue_again(paused)
        return bool(waiting or paused) or len(begun) < self.plan.trials

    def poll(self, *, ending: bool = False) -> None:
        """Reads the metrics of running trials, prunes those that are too low, and says which have ended.

        `ending`: ends all by SIGTERM, at which they write a checkpoint, and enqueues them again.
        """
        new = {job: self._report(run) for job, run in self.running.items()}  # before any is judged
        for job, run in list(self.running.items()):
            if (code := run.process.poll()) is not None:
                del self.running[job]
                number, attributes = run.trial.number, run.trial.user_attrs
                killed_by = -code if code < 0 else max(0, code - 128)  # with several ranks a launcher says so
                if ending and not run.pruned and code:
                    self._enqueue_again(self.study.trials[number], judged=run.judged)
                elif killed_by and not run.ended_s and not attributes.get("killed"):
                    self._enqueue_again(self.study.trials[number], judged=run.judged, killed=True)
                    self.say(f"trial {_number(run.trial)}: killed by signal {killed_by}; it is continued")
                else:
                    self._finish(run)
                    self.say(str(TrialResult.of(run.trial, self.plan.folder)))
            elif run.ended_s:
                if time.monotonic() - run.ended_s > _GRACE_S:
                    run.process.send_signal(signal.SIGKILL)
            elif ending or (new[job] and self._is_behind(run)):
                run.ended_s, run.pruned = time.monotonic(), not ending
                run.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Ends running trials; at once if it is interrupted."""
        try:
            while self.running:
                self.poll(ending=True)
                time.sleep(_POLL_S)
        finally:
            for run in self.running.values():
                run.process.send_signal(signal.SIGKILL)
            while any(run.process.poll() is None for run in self.running.values()):
                time.sleep(_POLL_S)

    def outcomes(self) -> list[TrialResult]:
        """The results of trials that ended by themselves or were pruned, the best first."""
        ended = [TrialResult.of(t, self.plan.folder) for t in self._begun().values() if "how" in t.user_attrs]
        return sorted(ended, key=lambda run: (run.how != "done", -run.top1, run.trial))

    def _report(self, run: _TrialProcess) -> bool:
        """Reports new evaluations to the study; returns whether there were any."""
        before = run.reported
        for top1 in _evaluations(run.folder)[before:]:
            run.trial.report(top1, run.reported)
            run.reported += 1
        return run.reported > before

    def _is_behind(self, run: _TrialProcess) -> bool:
        """Whether the pruner ends this trial, by its evaluations since the last call."""
        if self.plan.pruner == "median":
            return bool(run.trial.should_prune())
        new, run.judged = range(run.judged, run.reported), max(run.judged, run.reported)
        due = [rung for rung in _RUNGS if rung in new and self.plan.pruner == "halving"]
        begun = self._begun() if due else {}
        others = len(begun) < self.plan.trials or self._paused(begun) is not None
        return any(others or begun[_number(run.trial)] not in _best(begun, rung) for rung in due)

    def _finish(self, run: _TrialProcess) -> None:
        """Reports the end of a trial to the study."""
        code, result, stopped = run.process.poll() or 0, dict[str, float | None](), None
        with suppress(OSError, ValueError):
            document = json.loads((run.folder / "result.json").read_text() if code in (0, STOPPED) else "{}")
            result = {name: document.get(name) for name in _FIGURES}
            stopped = document.get("stopped")  # pruned after its last evaluation, a trial may still end by itself
        self._report(run)
        if (code == 0 or (run.pruned and not stopped)) and result.get("top1") is not None:
            how, report = "done", {"values": result["top1"]}
        elif run.pruned:
            how, report = "pruned", {"state": self.states.PRUNED}
        elif code == DIVERGED:
            run.trial.report(0.0, run.reported)  # from which the sampler learns
            how, report = "diverged", {"state": self.states.PRUNED}
        else:
            why, report = f"exit code {code}", {"state": self.states.FAIL}
            with suppress(OSError):
                lines = [x for x in Path(f"{run.folder}.log").read_text(errors="replace").splitlines() if x.strip()]
                if code > 0 and lines:  # the last line it printed
                    why = lines[-1].removeprefix("kasoku: ")
            how = f"failed: {'stopped by a signal from outside' if code == STOPPED else why}"
        run.trial.set_user_attr("result", result)
        run.trial.set_user_attr("how", how)
        self.ended.append(how)
        self.study.tell(run.trial, **report)

    def _enqueue_again(self, stopped: Any, **attributes: Any) -> None:
        """Enqueues a stopped trial with the same settings and these attributes, to be continued in its folder."""
        kept = {name: stopped.user_attrs[name] for name in ("folder", "killed") if name in stopped.user_attrs}
        if not stopped.state.is_finished():
            self.study.tell(stopped.number, state=self.states.FAIL)
        self.study.enqueue_trial(stopped.params, user_attrs=kept | attributes)


def _best(trials: dict[int, Any], rung: int) -> list[Any]:
    """The best quarter of the trials that came as far as a rung, at least one, without those that failed since."""
    alive = (trial for trial in trials.values() if trial.user_attrs.get("how", "done") in ("done", "pruned"))
    reached = [trial for trial in alive if rung in trial.intermediate_values]
    return sorted(reached, key=lambda trial: -trial.intermediate_values[rung])[: max(1, len(reached) // _REDUCTION)]


def _evaluations(folder: Path) -> list[float]:
    """The test accuracies (0 to 1) of a run folder so far, in order; an incomplete line is skipped."""
    values = list[float]()
    with suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            if '"test_top1"' in line:
                with suppress(ValueError):
                    values.append(float(json.loads(line)["test_top1"]))
    return values


def _study(optuna: Any, plan: SearchSettings) -> Any:
    """The study in the folder, or a new one. Raises InputError if it is of another recipe or space."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = plan.folder / "search.journal"
    # a killed search leaves Optuna's lock, and an incomplete line; the folder is locked by us
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    journal.touch()
    os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1)  # read where plan.pruner is "median"
    study = optuna.create_study(
        storage=storage, pruner=pruner, study_name="kasoku", direction="maximize", load_if_exists=True
    )
    if study.user_attrs.get("about", plan.about) != plan.about:
        raise InputError(f"{plan.folder}: is a search of another recipe or space: continue that, or give another --out")
    study.set_user_attr("about", plan.about)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is called experimental
        # a new seed for each part of a search, which would propose the same settings again otherwise
        study.sampler = optuna.samplers.TPESampler(seed=len(study.trials), constant_liar=plan.jobs > 1)
    return study
