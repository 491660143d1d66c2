"""The metrics of the nine GLUE tasks as an `evaluate` module that needs no network.

`GlueMetric("mrpc")` and `evaluate.load("path/to/glue_metric.py", "mrpc")` give the same metric.
"""

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn import metrics

_CITATION = """\
@inproceedings{wang2019glue,
  title={{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author={Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and
          Bowman, Samuel R.},
  booktitle={International Conference on Learning Representations},
  year={2019}
}"""

_INPUTS = """\
Args:
    predictions: label ids, or floats for stsb.
    references: the true ones, of the same length and type.
Returns:
    cola: matthews_correlation; sst2, mnli, qnli, rte, wnli: accuracy; mrpc, qqp: accuracy, f1 of class 1 and
    combined_score, their mean; stsb: pearson, spearmanr and combined_score, their mean.
"""


def _matthews(predictions, references):
    return {"matthews_correlation": metrics.matthews_corrcoef(references, predictions)}


def _accuracy(predictions, references):
    return {"accuracy": metrics.accuracy_score(references, predictions)}


def _accuracy_and_f1(predictions, references):
    accuracy = metrics.accuracy_score(references, predictions)
    f1 = metrics.f1_score(references, predictions, zero_division=0.0)
    return {"accuracy": accuracy, "f1": f1, "combined_score": (accuracy + f1) / 2}


def _correlations(predictions, references):
    predictions, references = np.asarray(predictions), np.asarray(references)
    # a constant correlates with nothing: 0 as for Matthews' coefficient, not a NaN, which JSON cannot hold
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        pearson = spearman = 0.0
    else:
        pearson = stats.pearsonr(predictions, references).statistic
        spearman = stats.spearmanr(predictions, references).statistic
    return {"pearson": pearson, "spearmanr": spearman, "combined_score": (pearson + spearman) / 2}


_METRICS = {
    "cola": _matthews,
    "mnli": _accuracy,
    "mrpc": _accuracy_and_f1,
    "qnli": _accuracy,
    "qqp": _accuracy_and_f1,
    "rte": _accuracy,
    "sst2": _accuracy,
    "stsb": _correlations,
    "wnli": _accuracy,
}


class GlueMetric(evaluate.Metric):
    """The metric of one GLUE task.

    Args:
        config_name: the task: cola, mnli, mrpc, qnli, qqp, rte, sst2, stsb or wnli.
        kwargs: further arguments of `evaluate.Metric`.

    Raises:
        ValueError: the task is another.
    """

    def _info(self):
        if self.config_name not in _METRICS:
            raise ValueError(f"the GLUE task must be one of {', '.join(_METRICS)}, got {self.config_name!r}")
        kind = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=f"GLUE, {self.config_name}",
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": kind, "references": kind}),
            homepage="https://gluebenchmark.com",
        )

    def _compute(self, predictions, references):
        scores = _METRICS[self.config_name](predictions, references)
        return {name: float(score) for name, score in scores.items()}
