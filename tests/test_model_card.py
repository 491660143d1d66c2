import json
from pathlib import Path

import pytest
import transformers
from doc_blocks import python_blocks
from huggingface_hub import EvalResult, ModelCard
from transformers import BertConfig, BertForMaskedLM, TrainingArguments

import yoso_hf
from yoso_hf import YosoConfig, YosoForMaskedLM, YosoForSequenceClassification
from yoso_hf.model_card import SPEED, SPEED_COMMIT, SPEED_LENGTHS, CardTrainer, model_card
from yoso_hf.modeling_yoso import AUTO_MAP

ROOT = Path(__file__).parent.parent
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
RESULT = {"task_type": "text-classification", "dataset_type": "nyu-mll/glue", "dataset_name": "GLUE"}


def make_card(model_class=YosoForMaskedLM, arguments=None, **changes):
    config = YosoConfig(**{**SIZES, "max_position_embeddings": 48, **changes})
    return model_card(model_class(config), "your-name/your-yoso", **(arguments or {}))


def settings(card):
    """The first table of a card."""
    rows = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in rows if len(row) == 2}


@pytest.mark.parametrize("auto_class", [name for name in AUTO_MAP if name != "AutoConfig"])
def test_card_of_every_class_loads_with_its_own_auto_class(auto_class, tmp_path):
    card = make_card(getattr(yoso_hf, AUTO_MAP[auto_class].rpartition(".")[2]))
    card.save(tmp_path / "README.md")
    # transformers has a pipeline for most of the tags
    pipelines = {"multiple-choice": auto_class, "question-answering": auto_class}
    for tag, pipeline in transformers.pipelines.SUPPORTED_TASKS.items():
        pipelines[tag] = [head.__name__ for head in pipeline["pt"]]
    assert auto_class in pipelines[card.data.pipeline_tag]
    local, remote = python_blocks(tmp_path / "README.md")
    assert f'model = {auto_class}.from_pretrained("your-name/your-yoso")' in local
    assert f'model = {auto_class}.from_pretrained("your-name/your-yoso", trust_remote_code=True)' in remote
    assert "yoso_hf" in local and "yoso_hf" not in remote


def test_card_of_a_subclass_loads_with_the_auto_class_of_its_base():
    class Mine(YosoForSequenceClassification):
        pass

    assert make_card(Mine).data.pipeline_tag == "text-classification"


def test_settings_are_those_of_the_configuration():
    sampled = settings(make_card(use_expectation=False, hash_code_len=7, num_hash=24, conv_window=5, local_window=3))
    assert "linear" in sampled["attention (`use_expectation`)"]
    assert sampled["bits of a hash code, tau (`hash_code_len`)"] == "7"
    assert sampled["hash functions, m (`num_hash`)"] == "24"
    assert sampled["convolution (`conv_window`)"] == "5"
    assert sampled["exact pairs of near tokens among samples (`local_window`)"] == "3"
    assert sampled["seed of the hash functions in eval mode (`hash_seed`)"] == "0"
    by_head = settings(make_card(hash_code_len=[[3, 4, 5, 6], [5, 5, 2, 7]]))
    assert by_head["bits of a hash code, tau (`hash_code_len`)"] == "2 to 7, by layer and head"
    assert by_head["similarity of query and key (`similarity`)"] == "cosine"
    softmax = settings(make_card(similarity="softmax", normalization="sum"))
    assert softmax["similarity of query and key (`similarity`)"] == "softmax"
    unseeded = settings(make_card(use_expectation=False, hash_seed=None))
    assert "drawn afresh" in unseeded["seed of the hash functions in eval mode (`hash_seed`)"]
    # nothing is hashed
    exact = settings(make_card(use_expectation=True))
    assert "quadratic" in exact["attention (`use_expectation`)"]
    assert not [name for name in exact if "num_hash" in name or "hash_seed" in name]
    auto = settings(make_card(use_expectation="auto"))
    assert "(`auto`)" in auto["attention (`use_expectation`)"] and "hash functions, m (`num_hash`)" in auto


def test_card_in_place_of_softmax_claims_nothing_of_the_paper_s_weights():
    cosine = make_card()
    assert "## Speed" in cosine.text and "collisions" in cosine.text
    softmax = make_card(similarity="softmax", normalization="sum", use_expectation="auto")
    assert "## Speed" not in softmax.text and "collisions" not in softmax.text
    exact_only, samples = "exact softmax where `auto` would sample it", "samples of some lengths where `auto` is exact"
    assert exact_only in softmax.text and samples not in softmax.text
    for expectation in (False, True, "auto"):
        text = make_card(use_expectation=expectation).text
        assert exact_only not in text and (samples in text) == (expectation == "auto")
    length = "bits of a hash code, tau (`hash_code_len`)"
    assert length in settings(softmax)
    assert length not in settings(make_card(similarity="softmax", normalization="sum", use_expectation=True))
    assert length in settings(make_card(use_expectation=True))


def test_number_of_parameters():
    model = YosoForMaskedLM(YosoConfig(**SIZES))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert settings(model_card(model, "your-name/your-yoso"))["parameters"] == f"{count:,}"


def test_metadata_survive_the_file(tmp_path):
    result = EvalResult(**RESULT, dataset_split="validation", metric_type="accuracy", metric_value=0.79412)
    given = {"license": "apache-2.0", "language": "en", "base_model": "a/b", "tags": ["mine"]}
    card = make_card(arguments={**given, "eval_results": [result], "training": "On | two texts."})
    card.save(tmp_path / "README.md")
    read = ModelCard.load(tmp_path / "README.md")
    assert make_card(arguments=given | {"tags": "mine"}).data.tags == card.data.tags
    assert read.data.tags == ["yoso", "mine"] and read.data.base_model == "a/b" and read.data.license == "apache-2.0"
    assert read.data.eval_results == [result] and read.data.model_name == "your-yoso"
    assert "| GLUE | validation | accuracy | 0.7941 |" in read.text
    assert "## Training\n\nOn | two texts.\n" in read.text


def test_a_bar_does_not_end_a_cell():
    result = EvalResult(**{**RESULT, "dataset_name": "a|b"}, metric_type="accuracy", metric_value=0.5)
    assert "| a\\|b |  | accuracy | 0.5 |" in make_card(arguments={"eval_results": [result]}).text


def test_model_of_another_kind_is_refused():
    model = BertForMaskedLM(BertConfig(**SIZES, intermediate_size=8))
    with pytest.raises(ValueError, match="model must be a YOSO model of yoso_hf, got BertForMaskedLM"):
        model_card(model, "your-name/your-bert")


def test_speed_is_that_of_the_benchmark():
    benchmark = json.loads((ROOT / "benchmarks" / "results" / "attention-cpu.json").read_text())
    assert benchmark["machine"]["commit"] == SPEED_COMMIT
    rows = [row for row in benchmark["rows"] if row["group"] == "lengths"]
    times = {(row["case"], row["task"], row["length"]): row["ms"] for row in rows}
    cases = {"sampled": "yoso", "exact": "yoso expectation"}
    measured = {
        (attention, task): tuple(
            round(times["softmax (sdpa)", task, length] / times[cases[attention], task, length], 1)
            for length in SPEED_LENGTHS
        )
        for attention, task in SPEED
    }
    assert measured == SPEED


def run(model, folder, steps=1, **arguments):
    rows = [{"input_ids": [0, 5, 6, 2], "labels": label % 2} for label in range(4)]
    training_args = TrainingArguments(
        folder, max_steps=steps, use_cpu=True, report_to="none", save_strategy="no", learning_rate=2e-3
    )
    trainer = CardTrainer(model, training_args, train_dataset=rows, eval_dataset=rows, **arguments)
    if steps:
        trainer.train()
    metrics = trainer.evaluate()
    trainer.create_model_card()
    return ModelCard.load(folder / "README.md"), metrics


def test_trainer_names_what_it_evaluated_on(tmp_path):
    model = YosoForSequenceClassification(YosoConfig(**SIZES))
    card, metrics = run(model, tmp_path / "run", datasets=["nyu-mll/glue"], evaluated_on=RESULT)
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("loss", metrics["eval_loss"])
    assert result.dataset_type == "nyu-mll/glue" and card.data.datasets == ["nyu-mll/glue"]
    assert "| learning_rate | 0.002 |" in card.text


def test_results_on_data_of_ones_own_stand_in_the_text_alone(tmp_path):
    model = YosoForSequenceClassification(YosoConfig(**SIZES))
    card, metrics = run(model, tmp_path / "run")
    assert card.data.eval_results is None and card.data.datasets is None
    assert f"| loss | {metrics['eval_loss']:.4g} |" in card.text


def test_model_that_was_only_evaluated_is_not_said_to_be_trained(tmp_path):
    model = YosoForSequenceClassification(YosoConfig(**SIZES))
    card, metrics = run(model, tmp_path / "run", steps=0, datasets=["nyu-mll/glue"], evaluated_on=RESULT)
    assert "Evaluated, not trained, on [nyu-mll/glue]" in card.text and "learning_rate" not in card.text
    assert card.data.datasets is None and card.data.eval_results[0].metric_value == metrics["eval_loss"]


def test_other_models_have_the_card_of_trainer(tmp_path):
    model = transformers.BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=8))
    card, _ = run(model, tmp_path / "run")
    assert "yoso" not in card.data.tags and "generated_from_trainer" in card.data.tags


def test_rows_by_length_have_an_order_for_every_epoch_and_data_seed(tmp_path):
    """Whatever was drawn before, and however far rounding leaves the epoch from a whole number."""
    rows = [{"input_ids": [5] * (1 + length % 30), "labels": 0} for length in range(300)]
    model = YosoForSequenceClassification(YosoConfig(**SIZES))

    def order(epoch, **seeds):
        arguments = TrainingArguments(tmp_path, train_sampling_strategy="group_by_length", use_cpu=True, **seeds)
        trainer = CardTrainer(model, arguments, train_dataset=rows)
        trainer.state.epoch = epoch
        sampler = trainer._get_train_sampler()
        drawn = list(sampler)
        assert sorted(drawn) == list(range(300)) and list(sampler) == drawn
        return drawn

    first = order(None, seed=3)
    assert first == order(0.0, seed=3) == order(0.5, seed=3) == order(0.0, seed=4, data_seed=3)
    assert first != order(0.0, seed=4) and first != order(0.0, seed=3, data_seed=4)
    second = order(1.0, seed=3)
    assert second != first
    assert second == order(1 - 1e-9, seed=3) == order(1.99, seed=3)


def test_the_card_has_the_last_results_and_the_repository_s_name(tmp_path):
    model = YosoForSequenceClassification(YosoConfig(**SIZES))
    trainer = CardTrainer(model, TrainingArguments(tmp_path, use_cpu=True), evaluated_on=RESULT)
    # as it is once there is a repository to push to
    trainer.hub_model_id = "your-name/your-run"
    for metrics in ({"eval_loss": 2.0, "eval_accuracy": 0.25}, {"eval_loss": 1.0}):
        trainer.log(metrics)
    trainer.create_model_card()
    card = ModelCard.load(tmp_path / "README.md")
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert found == {"loss": 1.0, "accuracy": 0.25}
    assert 'from_pretrained("your-name/your-run")' in card.text


@pytest.mark.parametrize("named", ["nyu-mll/glue", ["nyu-mll/glue", "your-name/reviews"]])
def test_data_sets_that_are_named_for_the_card_go_before_those_of_the_trainer(named, tmp_path):
    model = YosoForSequenceClassification(YosoConfig(**SIZES))
    trainer = CardTrainer(model, TrainingArguments(tmp_path, use_cpu=True), datasets=["your-name/other"])
    trainer.state.global_step = 3
    # in the order of Trainer's arguments
    trainer.create_model_card("en", "mit", "short", "your-run", dataset_tags=named)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == ([named] if isinstance(named, str) else named)
    assert "3 steps of Trainer on [nyu-mll/glue](https://huggingface.co/datasets/nyu-mll/glue)" in card.text
    assert "other" not in card.text
    assert (card.data.language, card.data.license, card.data.model_name) == ("en", "mit", "your-run")
    assert card.data.tags[:2] == ["yoso", "short"]
