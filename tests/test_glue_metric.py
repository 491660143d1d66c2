import json
import math

import evaluate
import numpy as np
import pytest

from yoso_hf import glue_metric
from yoso_hf.glue_metric import GlueMetric

TASKS = ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")


@pytest.mark.parametrize("task", ["mnli", "qnli", "rte", "sst2", "wnli"])
def test_accuracy_is_the_share_of_hits(task):
    scores = GlueMetric(task).compute(predictions=[0, 1, 1, 0, 1, 1, 0, 1], references=[0, 1, 0, 0, 0, 1, 1, 1])
    assert scores == {"accuracy": 5 / 8}


def test_mnli_takes_three_labels():
    assert GlueMetric("mnli").compute(predictions=[0, 1, 2, 2], references=[0, 2, 2, 2]) == {"accuracy": 0.75}


def test_matthews_correlation_from_the_confusion_matrix():
    # 6 true and 1 false positives, 3 true and 2 false negatives
    references = [1] * 6 + [0] + [0] * 3 + [1] * 2
    predictions = [1] * 6 + [1] + [0] * 3 + [0] * 2
    scores = GlueMetric("cola").compute(predictions=predictions, references=references)
    expected = (6 * 3 - 1 * 2) / math.sqrt((6 + 1) * (6 + 2) * (3 + 1) * (3 + 2))
    assert scores == {"matthews_correlation": pytest.approx(expected, abs=1e-12)}


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_f1_is_that_of_class_1(task):
    # 3 true and 1 false positives, 1 true and 2 false negatives
    references = [1, 1, 1, 0, 0, 1, 1]
    predictions = [1, 1, 1, 1, 0, 0, 0]
    scores = GlueMetric(task).compute(predictions=predictions, references=references)
    precision, recall = 3 / 4, 3 / 5
    f1 = 2 * precision * recall / (precision + recall)
    assert scores == pytest.approx({"accuracy": 4 / 7, "f1": f1, "combined_score": (4 / 7 + f1) / 2}, abs=1e-12)


def test_correlations_by_their_definition():
    predictions = np.array([1.0, 2.0, 2.0, 4.5, 3.0])
    references = np.array([0.5, 3.0, 2.0, 4.0, 5.0])
    # tied values share the mean of their ranks
    ranks = np.array([1, 2.5, 2.5, 5, 4]), np.array([1, 3, 2, 4, 5])

    def correlation(x, y):
        x, y = x - x.mean(), y - y.mean()
        return (x @ y) / math.sqrt((x @ x) * (y @ y))

    pearson, spearman = correlation(predictions, references), correlation(*ranks)
    scores = GlueMetric("stsb").compute(predictions=predictions, references=references)
    expected = {"pearson": pearson, "spearmanr": spearman, "combined_score": (pearson + spearman) / 2}
    assert scores == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("cola", [1, 1, 1], [0, 1, 1], {"matthews_correlation": 0.0}),
        ("mrpc", [0, 0, 0, 0], [0, 1, 1, 0], {"accuracy": 0.5, "f1": 0.0, "combined_score": 0.25}),
        ("mrpc", [0, 0], [0, 0], {"accuracy": 1.0, "f1": 0.0, "combined_score": 0.5}),
        ("stsb", [2.5] * 3, [1.0, 2.0, 3.0], {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}),
        ("stsb", [1.0, 2.0, 3.0], [4.0] * 3, {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}),
        ("stsb", [1.0], [4.0], {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}),
    ],
)
@pytest.mark.filterwarnings("error")
def test_constants_score_finite_numbers(task, predictions, references, expected):
    assert GlueMetric(task).compute(predictions=predictions, references=references) == expected


def test_nan_predictions_are_not_hidden():
    scores = GlueMetric("stsb").compute(predictions=[1.0, math.nan, 3.0], references=[1.0, 2.0, 3.0])
    assert all(map(math.isnan, scores.values()))


@pytest.mark.parametrize("task", TASKS)
def test_evaluate_loads_the_module_from_its_file(task):
    generator = np.random.default_rng(0)
    if task == "stsb":
        predictions, references = generator.uniform(0, 5, (2, 20))
    else:
        predictions, references = generator.integers(0, 2, (2, 20))
    whole = GlueMetric(task).compute(predictions=predictions, references=references)

    loaded = evaluate.load(glue_metric.__file__, task, keep_in_memory=True)
    for start in range(0, 20, 8):
        batch = slice(start, start + 8)
        loaded.add_batch(predictions=predictions[batch], references=references[batch])
    assert loaded.compute() == whole
    # plain floats, as results are saved as JSON
    assert json.loads(json.dumps(whole)) == whole


@pytest.mark.parametrize("name", ["sst-2", None])
def test_an_unknown_task_is_refused_with_the_nine(name):
    with pytest.raises(ValueError, match=", ".join(TASKS)):
        GlueMetric(name)
