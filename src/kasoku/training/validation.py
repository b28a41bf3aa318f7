"""When a training is evaluated, and what follows from its scores: the best weights, the target, the logs."""

import json
from collections.abc import Callable

from torch import Tensor, nn

from kasoku.distributed.consensus import iterate_on_all_ranks
from kasoku.report.predictions import PredictionLog
from kasoku.training.evaluation import Scores, evaluate
from kasoku.training.metrics import Metrics
from kasoku.training.run_state import RunState


class Validation:
    """The evaluations of one training, on its test images."""

    def __init__(self, state: RunState, metrics: Metrics) -> None:
        self.state, self.job, self.metrics, self.settings = state, state.job, metrics, state.recipe.evaluate
        self._predictions: PredictionLog | None = None  # of the last evaluation
        self.last_step = -1  # of the last evaluation
        if state.progress.last_evaluation is None:
            state.progress.last_evaluation = self.job.progress
        self._seen = state.progress.last_evaluation  # so a resumed training repeats an evaluation that failed

    def run_if_due(self) -> None:
        """Evaluates if the last step crossed a multiple of `evaluate.every` epochs, or the training is over.

        Collective; drains if it evaluates.
        """
        every, before, self._seen = self.settings.every, self._seen, self.job.progress
        crossed = int(self._seen / every + 1e-9) > int(before / every + 1e-9)
        if self.state.over or (crossed and self.job.progress >= self.settings.start):
            self.run()
        if crossed:
            self.state.progress.last_evaluation = self.job.progress

    def run(self) -> None:
        """Evaluates the model as it would be used: averaged, with the statistics measured for it. Collective; drains.

        Writes best.safetensors if it is the best so far, and model.safetensors if the training is over.
        """
        state, job, progress, metrics = self.state, self.job, self.state.progress, self.metrics
        metrics.read()
        images_per_s, epoch = metrics.images_per_s(), round(job.progress, 4)
        metrics.log.mlperf("eval_start", event="INTERVAL_START", epoch_num=epoch)
        with state.busy("evaluate"), job.evaluation() as model:
            self._predictions = PredictionLog(state.training.test)
            scores = self._scores(model, self._predictions.add)
            if scores.top1 > progress.best or not progress.scores:
                state.write(lambda run: run.write_weights("best.safetensors", model))
            reached = bool(self.settings.target) and scores.top1 >= self.settings.target
            state.target_reached = state.target_reached or (reached and self.settings.stop)
            if state.over:
                state.write(lambda run: run.write_weights("model.safetensors", model))
        self.last_step = job.steps
        progress.best = max(progress.best, scores.top1)
        progress.scores = {"top1": scores.top1, "top5": scores.top5, "loss": scores.loss}
        metrics.note({f"test_{name}": score for name, score in progress.scores.items()})
        if self.settings.stale:
            with state.busy("evaluate"), job.evaluation(renew_statistics=False) as model:
                stale = self._scores(model).top1
            metrics.note({"test_stale_top1": stale})
            lost = f"{100 * (scores.top1 - stale):.2f} points ({stale:.2%} with them)"
            metrics.bar.say(f"accuracy lost to stale averages: {lost}")
        metrics.log.mlperf("eval_accuracy", scores.top1, epoch_num=epoch)
        metrics.log.mlperf("eval_stop", event="INTERVAL_END", epoch_num=epoch)
        metrics.bar.accuracy(job.progress, scores.top1, loss=metrics.loss, images_per_s=images_per_s)
        if reached and progress.reached_s is None:
            progress.reached_s = metrics.seconds()

    def write_predictions(self) -> None:
        """Writes classes.json of the last evaluation. Collective."""
        if self._predictions:
            with self.state.busy("evaluate"):
                classes = self._predictions.gather(self.state.training.dataset, self.job.comm)
            self.state.write(lambda run: run.write("classes.json", json.dumps(classes) + "\n"))

    def _scores(self, model: nn.Module, also: Callable[[Tensor, Tensor], object] | None = None) -> Scores:
        test = iterate_on_all_ranks(self.job.comm, self.state.training.test)
        return evaluate(model, test, self.settings.views, self.job.comm, also=also)
