import copy
import math
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoConfig, AutoModelForMaskedLM, TrainingArguments

from yoso_hf.data import train_tokenizer
from yoso_hf.mlm import MaskedLMTrainer, Masking

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
}
# yoso and modernbert have a sparse prediction of their own, roberta ignores num_items_in_batch
MODELS = {
    "yoso": {"use_expectation": False, "num_hash": 4, "hash_code_len": 4},
    "roberta": {},
    "electra": {"embedding_size": 16},
    "modernbert": {"cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2},
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat " * 20], 300)


@pytest.fixture(scope="module")
def masking(tokenizer):
    return Masking(tokenizer, 0.15)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def new_model(name: str, **overrides) -> torch.nn.Module:
    torch.manual_seed(0)
    # without dropout, so that two passes can be compared
    config = AutoConfig.for_model(name, **(SIZES | MODELS[name] | overrides))
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    return AutoModelForMaskedLM.from_config(config, dtype=torch.float32)


def blocks(count: int, seed: int = 0, length: int = 64) -> Dataset:
    generator = np.random.default_rng(seed)
    rows = [generator.integers(5, 300, length).astype(np.int32) for _ in range(count)]
    return Dataset.from_dict({"input_ids": rows})


def new_trainer(model, masking, folder, sparse=True, train=None, evaluation=None, model_init=None, **arguments):
    settings = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    return MaskedLMTrainer(
        model=model,
        model_init=model_init,
        args=TrainingArguments(folder, **(settings | arguments)),
        masking=masking,
        sparse_prediction=sparse,
        train_dataset=train and train.with_format("torch"),
        eval_dataset=evaluation and evaluation.with_transform(masking.mask_rows),
    )


def test_masks_follow_bert(tokenizer, masking):
    """Shares within 5 standard errors; special tokens never chosen; labels the original tokens."""
    generator = torch.Generator().manual_seed(0)
    original = torch.randint(0, len(tokenizer), (100, 2000), generator=generator)
    batch = masking(original, [1, 2])
    masked, labels = batch["input_ids"], batch["labels"]
    chosen, special = labels != -100, original < 5
    assert not chosen[special].any()
    assert torch.equal(labels[chosen], original[chosen])
    assert torch.equal(masked[~chosen], original[~chosen])

    def check(share: float, hits: int, trials: int):
        assert abs(hits / trials - share) < 5 * math.sqrt(share * (1 - share) / trials)

    count = int(chosen.sum())
    check(0.15, count, int((~special).sum()))
    replaced = chosen & (masked == tokenizer.mask_token_id)
    kept = chosen & (masked == original)
    # another token may happen to be the mask token or the original one
    chance = 0.1 / len(tokenizer)
    check(0.8 + chance, int(replaced.sum()), count)
    check(0.1 + chance, int(kept.sum()), count)
    # a row is as likely to be chosen from as any other
    assert (chosen.sum(1) > 0).all() and chosen.float().mean(1).std() < 0.02


def test_masks_depend_on_the_seed_alone(masking):
    ids = torch.randint(5, 300, (4, 64))
    torch.manual_seed(1)
    first = masking(ids, [7, 0])
    before = torch.random.get_rng_state()
    second = masking(ids, [7, 0])
    assert all(torch.equal(first[name], second[name]) for name in first)
    # the global generator is the model's: dropout and hashes
    assert torch.equal(before, torch.random.get_rng_state())
    for other in ([7, 1], [8, 0]):
        assert not torch.equal(first["labels"], masking(ids, other)["labels"])


def test_spawned_workers_mask_as_the_process_that_has_masked_before(masking):
    """As workers are where there is no fork; they are sent the masking as it is then."""
    data = Dataset.from_dict({"input_ids": torch.randint(5, 300, (4, 64)).tolist()}).with_transform(masking.mask_rows)
    expected = data[:4]["labels"]
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    (batch,) = loader
    assert torch.equal(batch["labels"], torch.stack(expected))


def test_training_masks_change_with_every_step_and_epoch(masking, tmp_path, monkeypatch):
    seen = []

    def spy(ids, seed, _masking=masking):
        seen.append((ids.clone(), _masking(ids, seed)["labels"]))
        return _masking(ids, seed)

    trainer = new_trainer(
        new_model("roberta"),
        masking,
        tmp_path,
        train=blocks(4),
        num_train_epochs=3,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )
    monkeypatch.setattr(trainer, "masking", spy)
    trainer.train()
    assert len(seen) == 12
    assert len({labels.numpy().tobytes() for _, labels in seen}) == 12
    assert len({(labels != -100).numpy().tobytes() for _, labels in seen}) == 12
    # each epoch shows each block once
    for epoch in range(3):
        assert len({ids.numpy().tobytes() for ids, _ in seen[4 * epoch : 4 * epoch + 4]}) == 4


def test_every_process_masks_other_tokens(masking, tmp_path, monkeypatch):
    trainer, found = new_trainer(new_model("roberta"), masking, tmp_path), []
    for process in (0, 1):
        monkeypatch.setattr(TrainingArguments, "process_index", property(lambda _, process=process: process))
        batches, _ = trainer.get_batch_samples(iter([{"input_ids": torch.full((2, 64), 7)}]), 1, torch.device("cpu"))
        found.append(batches[0]["labels"])
    assert not torch.equal(*found)


def test_every_run_s_seed_masks_other_tokens(masking, tmp_path):
    found = []
    for seed in (1, 2):
        trainer = new_trainer(new_model("roberta"), masking, tmp_path, seed=seed)
        batches, _ = trainer.get_batch_samples(iter([{"input_ids": torch.full((2, 64), 7)}]), 1, torch.device("cpu"))
        found.append(batches[0]["labels"])
    assert not torch.equal(*found)


def test_an_evaluation_of_bfloat16_logits_is_computed_in_float32(masking, tmp_path):
    model, evaluation = new_model("roberta").bfloat16(), blocks(5)
    # losses that differ from token to token
    model.lm_head.bias.data.copy_(torch.linspace(-4, 4, 300))
    metrics = new_trainer(model, masking, tmp_path, sparse=False, evaluation=evaluation).evaluate()
    rows = list(evaluation.with_transform(masking.mask_rows))
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_bfloat16_logits_is_computed_in_float32(masking, tmp_path):
    trainer = new_trainer(new_model("roberta"), masking, tmp_path)
    logits, labels = torch.randn(3, 50, 300).bfloat16(), torch.randint(300, (3, 50))
    loss = trainer.masked_lm_loss(SimpleNamespace(logits=logits), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.float().mT, labels))


def test_evaluation_masks_never_change(masking, tmp_path):
    evaluation = blocks(7)
    first = [evaluation.with_transform(masking.mask_rows)[index] for index in range(7)]
    batch = evaluation.with_transform(masking.mask_rows)[2:5]
    for index, row in enumerate(first[2:5]):
        assert torch.equal(row["labels"], batch["labels"][index])
        assert torch.equal(row["input_ids"], batch["input_ids"][index])
    assert len({(row["labels"] != -100).numpy().tobytes() for row in first}) == 7

    model = new_model("yoso")
    losses = []
    for seed in (1, 2):
        trainer = new_trainer(model, masking, tmp_path, evaluation=evaluation, seed=seed)
        torch.manual_seed(seed)
        losses += [trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"]]
    assert len(set(losses)) == 1


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_loss_and_perplexity(sparse, batch_size, masking, tmp_path):
    """Against the model's own dense loss on all masked tokens of the same blocks, whatever the batches."""
    model, evaluation = new_model("roberta"), blocks(5, length=60)
    # losses that differ from token to token
    model.lm_head.bias.data.copy_(torch.linspace(-4, 4, 300))
    metrics = new_trainer(
        model, masking, tmp_path, sparse, evaluation=evaluation, per_device_eval_batch_size=batch_size
    ).evaluate()
    rows = list(evaluation.with_transform(masking.mask_rows))
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten()).item()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_evaluation_of_a_model_that_diverged(masking, tmp_path):
    """A perplexity beyond any float is infinite, and ends nothing."""
    model = new_model("roberta")
    model.lm_head.bias.data[:150] = 1e4
    metrics = new_trainer(model, masking, tmp_path, evaluation=blocks(2)).evaluate()
    assert 709 < metrics["eval_loss"] < 1e4
    assert metrics["eval_perplexity"] == math.inf


def test_an_evaluation_without_masks_has_no_loss(masking, tmp_path):
    """None at all would look like a perfect one."""
    metrics = new_trainer(
        new_model("roberta"), Masking(masking.collator.tokenizer, 1e-9), tmp_path, evaluation=blocks(2)
    ).evaluate()
    assert math.isnan(metrics["eval_loss"]) and math.isnan(metrics["eval_perplexity"])


@pytest.mark.parametrize("name", MODELS)
def test_sparse_loss_and_gradients_equal_dense_ones(name, masking, tmp_path):
    model = new_model(name)
    inputs = masking(torch.randint(5, 300, (3, 64), generator=torch.Generator().manual_seed(0)), [0])
    found = {}
    for sparse in (True, False):
        trainer = new_trainer(model, masking, tmp_path, sparse)
        shapes = []
        head = model.get_output_embeddings().register_forward_hook(
            lambda _module, _inputs, output, shapes=shapes: shapes.append(tuple(output.shape))
        )
        model.zero_grad()
        torch.manual_seed(3)
        loss = trainer.compute_loss(model, dict(inputs))
        loss.backward()
        found[sparse] = loss, [parameter.grad.clone() for parameter in model.parameters()]
        masked = int((inputs["labels"] != -100).sum())
        assert shapes == [(1, masked, 300) if sparse else (3, 64, 300)]
        head.remove()
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-7)
    # outside of the trainer the model is as it was
    assert model(input_ids=inputs["input_ids"]).logits.shape == (3, 64, 300)


@pytest.mark.parametrize("kind", ["of model_init", "of PEFT"])
def test_sparse_prediction_is_of_the_model_that_is_trained(kind, masking, tmp_path):
    """Be it another than the trainer was made with, or inside of one."""
    peft = pytest.importorskip("peft")
    trained = []
    for sparse in (True, False):
        model = new_model("roberta")
        if kind == "of PEFT":
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
        before = copy.deepcopy(model)
        trainer = new_trainer(
            None if kind == "of model_init" else model,
            masking,
            tmp_path,
            sparse,
            train=blocks(4),
            model_init=(lambda: new_model("roberta")) if kind == "of model_init" else None,
            max_steps=2,
            per_device_train_batch_size=2,
        )
        trainer.train()
        assert (trainer.model is model) == (kind == "of PEFT")
        trained.append(dict(trainer.model.named_parameters()))
        assert any(not torch.equal(weight, trained[-1][name]) for name, weight in before.named_parameters())
    torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["yoso", "roberta"])
@pytest.mark.parametrize("sparse", [True, False])
def test_accumulated_batches_weigh_every_masked_token_alike(name, sparse, masking, tmp_path, monkeypatch):
    """One step over two batches with different numbers of masks: the gradient of the mean over all of them."""
    overrides = {"use_expectation": True} if name == "yoso" else {}
    model = new_model(name, **overrides)
    before = copy.deepcopy(model)
    batches = []

    def uneven(ids, seed, _masking=masking):
        batch = _masking(ids, seed)
        if seed[-1] == 1:
            batch["labels"][:, 20:] = -100
        batches.append(batch)
        return batch

    trainer = new_trainer(
        model,
        masking,
        tmp_path,
        sparse,
        train=blocks(4),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
    )
    monkeypatch.setattr(trainer, "masking", uneven)
    _, reported, metrics = trainer.train()
    # tokens are not counted unless they are asked for
    assert "train_tokens_per_second" not in metrics

    ids, labels = (torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels"))
    loss = F.cross_entropy(before(input_ids=ids).logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    assert reported == pytest.approx(loss.item(), rel=1e-5)
    # a learning rate of 1: the parameters moved by the gradient
    moved = {key: value - model.state_dict()[key] for key, value in before.state_dict().items()}
    for key, parameter in before.named_parameters():
        torch.testing.assert_close(moved[key], parameter.grad, rtol=1e-3, atol=1e-6)


def test_label_smoothing_is_for_training_only(masking, tmp_path):
    model = new_model("roberta")
    inputs = masking(torch.randint(5, 300, (2, 64)), [0])
    with torch.no_grad():
        logits, labels = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1), inputs["labels"].flatten()
        trainer = new_trainer(model, masking, tmp_path, label_smoothing_factor=0.1)
        for training, smoothing in ((True, 0.1), (False, 0.0)):
            model.train(training)
            expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            torch.testing.assert_close(trainer.compute_loss(model, dict(inputs)), expected)


@pytest.mark.parametrize("sparse", [True, False])
def test_batch_without_masks_teaches_nothing(sparse, masking, tmp_path):
    model = new_model("roberta")
    inputs = {"input_ids": torch.randint(5, 300, (2, 8)), "labels": torch.full((2, 8), -100)}
    for count in (None, torch.tensor(0)):
        trainer = new_trainer(model, masking, tmp_path, sparse)
        loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)
        loss.backward()
        assert loss == 0
        assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


def test_several_gpus_in_one_process_are_refused(masking, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
    with pytest.raises(ValueError, match="sparse_prediction takes one GPU per process, got 2"):
        new_trainer(new_model("roberta"), masking, tmp_path)
