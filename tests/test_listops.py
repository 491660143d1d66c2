import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import listops  # noqa: E402

LISTS = 30


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("listops")
    listops.main(listops.ListOpsArguments(output_dir=path, train=LISTS, held_out=3))
    return path


@pytest.fixture(scope="module")
def rows(written):
    return {part: [json.loads(line) for line in (written / f"{part}.jsonl").open()] for part in listops.PARTS}


def evaluate(text):
    """The value of a list, its depth, and the number of arguments of every list in it: by Python's own parser."""
    code = text.replace(" ]", ")").replace(" ", ", ")
    for operator in ("MIN", "MAX", "MED", "SM"):
        code = code.replace(f"[{operator},", f"{operator}(")
    counts = []

    def operation(function):
        def apply(*arguments):
            values, depths = zip(*((x, 1) if isinstance(x, int) else x for x in arguments), strict=True)
            counts.append(len(arguments))
            return int(function(values)), 1 + max(depths)

        return apply

    names = {"MIN": np.min, "MAX": np.max, "MED": np.median, "SM": lambda values: sum(values) % 10}
    return *eval(code, {name: operation(function) for name, function in names.items()}), counts


def test_the_evaluation_of_these_tests():
    assert evaluate("[MAX 2 [MED 1 4 6 7 ] [SM 9 8 ] ]") == (7, 3, [4, 2, 3])


def test_lists_follow_the_grammar_and_their_labels_are_their_values(rows):
    assert [len(rows[part]) for part in ("train", "validation", "test")] == [LISTS, 3, 3]
    texts = [row["text"] for part in rows.values() for row in part]
    assert len(set(texts)) == len(texts)
    words, arguments, depths = Counter(), Counter(), set()
    for row in (row for part in rows.values() for row in part):
        value, depth, counts = evaluate(row["text"])
        assert value == row["label"]
        assert 500 < len(row["text"].split()) < 2000
        words.update(row["text"].split())
        arguments.update(counts)
        depths.add(depth)
    assert max(depths) == 10
    assert set(arguments) == set(range(2, 11))
    assert set(words) == {*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"}
    # the names of operators and the digits are drawn evenly, whatever is kept: five standard deviations
    for group in ("0123456789", ("[MIN", "[MAX", "[MED", "[SM")):
        total, share = sum(words[word] for word in group), 1 / len(group)
        assert all(abs(words[word] / total - share) < 5 * (share * (1 - share) / total) ** 0.5 for word in group)


def test_a_seed_gives_the_same_lists_and_another_others(rows):
    for seed, same in ((0, True), (1, False)):
        again = listops.lists(seed)
        assert ([next(again) for _ in range(LISTS)] == rows["train"]) == same


def test_models_have_one_tokenizer_the_same_weights_and_other_attention(written, rows):
    models = {name: AutoModelForSequenceClassification.from_pretrained(written / name) for name in listops.ATTENTION}
    for (name, weight), other in zip(models["yoso"].named_parameters(), models["softmax"].parameters(), strict=True):
        assert torch.equal(weight, other), name
    tokenizer = AutoTokenizer.from_pretrained(written / "softmax")
    row = max((row for part in rows.values() for row in part), key=lambda row: len(row["text"]))
    inputs = tokenizer(row["text"], truncation=True, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]) == f"<s> {row['text']} </s>"
    assert tokenizer.model_max_length <= models["yoso"].config.max_position_embeddings
    # also a list of 1999 tokens fits, with both ends
    assert len(inputs["input_ids"][0]) == len(row["text"].split()) + 2 <= 2001 == tokenizer.model_max_length
    with torch.no_grad():
        logits = {name: model.eval()(**inputs).logits for name, model in models.items()}
    assert logits["yoso"].shape == (1, 10)
    assert (logits["yoso"] - logits["softmax"]).abs().max() > 1e-4
