import collections
import copy
import math
import pickle
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.yoso import modeling_yoso as transformers_yoso

from yoso_hf import (
    HashFunctions,
    YosoConfig,
    YosoForMaskedLM,
    YosoForMultipleChoice,
    YosoForQuestionAnswering,
    YosoForSequenceClassification,
    YosoForTokenClassification,
    YosoModel,
    attention,
    hashing,
    modeling_yoso,
)
from yoso_hf.attention import EXACT_TOKENS_PER_HASH

AUTO_CLASSES = {
    YosoModel: transformers.AutoModel,
    YosoForMaskedLM: transformers.AutoModelForMaskedLM,
    YosoForMultipleChoice: transformers.AutoModelForMultipleChoice,
    YosoForQuestionAnswering: transformers.AutoModelForQuestionAnswering,
    YosoForSequenceClassification: transformers.AutoModelForSequenceClassification,
    YosoForTokenClassification: transformers.AutoModelForTokenClassification,
}
# outputs of the others are one row a sequence
TOKEN_LEVEL = (YosoModel, YosoForMaskedLM, YosoForQuestionAnswering, YosoForTokenClassification)
VOCAB_SIZE = 99
ATTENTION = {
    "expectation": {"use_expectation": True},
    "hadamard": {"use_expectation": False, "use_fast_hash": True},
    "gaussian": {"use_expectation": False, "use_fast_hash": False},
    "conv": {"use_expectation": False, "conv_window": 3},
}

all_models = pytest.mark.parametrize("model_class", AUTO_CLASSES, ids=lambda model_class: model_class.__name__)
all_attention = pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[False, True], ids=["as it is", "padded"])
def padded(request, monkeypatch):
    """Whether the product with the vocabulary is padded, to 128 columns of VOCAB_SIZE."""
    monkeypatch.setattr(modeling_yoso, "PADDED_DEVICES", ("cpu", "cuda") if request.param else ())
    return request.param


def make_config(**changes):
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 37,
        "max_position_embeddings": 48,
        "hash_code_len": 5,
        "num_hash": 8,
        "num_labels": 3,
        # large weights, so that a wrong attention shows in the outputs
        "initializer_range": 0.3,
    }
    return YosoConfig(**{**sizes, **changes})


def make_model(model_class, **changes):
    return model_class(make_config(**changes)).eval()


def make_ids(*shape):
    return torch.randint(3, VOCAB_SIZE, shape)


def make_mask(lengths, width, side="right"):
    positions = torch.arange(width)
    lengths = torch.tensor(lengths)[:, None]
    return positions < lengths if side == "right" else positions >= width - lengths


def run(model, ids, mask=None):
    """The outputs as one tensor; multiple choice gets each sequence as a question with one choice."""
    if isinstance(model, YosoForMultipleChoice):
        ids, mask = ids[:, None], None if mask is None else mask[:, None]
    outputs = model(input_ids=ids, attention_mask=mask)
    if isinstance(model, YosoModel):
        return outputs.last_hidden_state
    if isinstance(model, YosoForQuestionAnswering):
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits


def assert_near(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def assert_all_keys_matched(info):
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], kind


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@all_models
def test_initial_weights(model_class):
    """Matrices and embeddings are normal with standard deviation initializer_range, padding's 0, as BERT's are."""
    model = make_model(model_class, conv_window=3)
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)]
    draws = []
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.removesuffix(".weight") in norms:
            assert (parameter == 1).all(), name
        else:
            if name.endswith("word_embeddings.weight"):
                padding = model.config.pad_token_id
                assert not parameter[padding].any()
                parameter = torch.cat([parameter[:padding], parameter[padding + 1 :]])
            draws.append(parameter.detach().flatten() / 0.3)
            # four standard errors of the mean, and of the standard deviation, of so many normal numbers
            assert abs(draws[-1].mean()) < 4 / math.sqrt(len(draws[-1])), name
            assert abs(draws[-1].std() - 1) < 4 / math.sqrt(2 * len(draws[-1])), name
    # no two matrices are the same draw, and none is of another distribution with these two moments
    draws = torch.cat(draws)
    assert len(draws.unique()) > 0.9 * len(draws)
    assert abs((draws**4).mean() - 3) < 4 * math.sqrt(96 / len(draws))


@pytest.mark.parametrize("conv_window", [None, 3])
@all_models
def test_loads_checkpoint_of_transformers(model_class, conv_window, tmp_path):
    theirs_class = getattr(transformers_yoso, model_class.__name__)
    theirs = theirs_class(transformers.YosoConfig(**make_config(conv_window=conv_window).to_dict())).eval()
    theirs.save_pretrained(tmp_path)
    ours, info = AUTO_CLASSES[model_class].from_pretrained(tmp_path, output_loading_info=True)
    assert type(ours) is model_class
    assert_all_keys_matched(info)
    ids = make_ids(3, 20)
    assert_near(run(ours, ids), run_transformers(theirs, ids))


@pytest.mark.parametrize("conv_window", [None, 3])
@all_models
def test_transformers_loads_our_checkpoint(model_class, conv_window, tmp_path):
    ours = make_model(model_class, conv_window=conv_window)
    ours.save_pretrained(tmp_path)
    theirs_class = getattr(transformers_yoso, model_class.__name__)
    theirs, info = theirs_class.from_pretrained(tmp_path, output_loading_info=True)
    assert_all_keys_matched(info)
    ids = make_ids(3, 20)
    assert_near(run(ours, ids), run_transformers(theirs, ids))


def run_transformers(model, ids):
    if isinstance(model, transformers_yoso.YosoForMultipleChoice):
        ids = ids[:, None]
    outputs = model(ids)
    if isinstance(model, transformers_yoso.YosoForQuestionAnswering):
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs[0]


@torch.no_grad()
def test_other_inputs_match_transformers():
    ours = make_model(YosoForMaskedLM, type_vocab_size=2)
    theirs = transformers_yoso.YosoForMaskedLM(transformers.YosoConfig(**ours.config.to_dict())).eval()
    theirs.load_state_dict(ours.state_dict())
    ids = make_ids(2, 20)
    inputs = {"token_type_ids": ids % 2, "position_ids": torch.randperm(48)[:20] + 2}
    expected = theirs(ids, **inputs).logits
    assert_near(ours(ids, **inputs).logits, expected)
    embedded = ours.get_input_embeddings()(ids)
    assert_near(ours(inputs_embeds=embedded, **inputs).logits, expected)
    assert not torch.allclose(ours(ids).logits, expected, atol=1e-2)


def test_position_ids_of_old_checkpoints_are_ignored(tmp_path):
    model = make_model(YosoForMaskedLM)
    state = {**model.state_dict(), "yoso.embeddings.position_ids": torch.arange(48)[None] + 2}
    model.save_pretrained(tmp_path, state_dict=state)
    _, info = YosoForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert_all_keys_matched(info)


@torch.no_grad()
@pytest.mark.parametrize("side", ["right", "left"])
@all_attention
@all_models
def test_padding_changes_nothing(model_class, attention, side):
    model = make_model(model_class, **attention)
    lengths, width = [1, 9, 24, 30], 30
    # random tokens in the padding too: what stands there must not matter
    ids, mask = make_ids(len(lengths), width), make_mask(lengths, width, side)
    outputs = run(model, ids, mask)
    assert outputs.isfinite().all()
    for row, row_ids, real in zip(outputs, ids, mask, strict=True):
        alone = run(model, row_ids[real][None])[0]
        assert_near(row[real] if model_class in TOKEN_LEVEL else row, alone)


@torch.no_grad()
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing_of_samples_of_softmax(side, monkeypatch):
    """Which go by what a text's queries have in common; where all keys are heavy, there are none."""
    monkeypatch.setattr(attention, "NUM_HEAVY_KEYS", 3)
    settings = {"similarity": "softmax", "normalization": "sum", "use_expectation": False, "hash_code_len": 4}
    model = make_model(YosoModel, **settings)
    ids, mask = make_ids(3, 30), make_mask([9, 24, 30], 30, side)
    for row, row_ids, real in zip(run(model, ids, mask), ids, mask, strict=True):
        assert_near(row[real], run(model, row_ids[real][None])[0])


@torch.no_grad()
@all_attention
@all_models
def test_neighbours_change_nothing(model_class, attention):
    model = make_model(model_class, **attention)
    ids, mask = make_ids(3, 20), make_mask([12, 20, 0], 20)
    other_ids, other_mask = make_ids(3, 20), make_mask([12, 3, 17], 20)
    other_ids[0] = ids[0]
    row, other_row = run(model, ids, mask)[0], run(model, other_ids, other_mask)[0]
    real = slice(0, 12) if model_class in TOKEN_LEVEL else slice(None)
    assert_near(row[real], other_row[real])


@torch.no_grad()
def test_other_dtypes_of_the_mask_mean_the_same():
    model = make_model(YosoModel)
    ids, mask = make_ids(2, 10), make_mask([4, 10], 10)
    expected = model(ids, attention_mask=mask).last_hidden_state
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
        assert torch.equal(model(ids, attention_mask=mask.to(dtype)).last_hidden_state, expected)


@torch.no_grad()
def test_each_choice_is_scored_alone():
    model = make_model(YosoForMultipleChoice, use_expectation=False)
    ids, mask = make_ids(2, 3, 15), make_mask([15, 4, 9, 1, 8, 12], 15).view(2, 3, 15)
    labels = torch.tensor([2, 0])
    outputs = model(ids, attention_mask=mask, labels=labels)
    for question in range(2):
        for choice in range(3):
            alone = ids[question, choice][mask[question, choice]]
            assert_near(outputs.logits[question, choice], model(alone[None, None]).logits[0, 0])
    assert_near(outputs.loss, F.cross_entropy(outputs.logits, labels))
    embedded = model.get_input_embeddings()(ids)
    assert_near(model(inputs_embeds=embedded, attention_mask=mask).logits, outputs.logits)


@all_attention
@all_models
def test_sequence_of_padding_only(model_class, attention):
    model = make_model(model_class, **attention).train()
    ids, mask = make_ids(2, 10), make_mask([0, 7], 10)
    outputs = run(model, ids, mask)
    assert outputs.isfinite().all()
    real = outputs[1, :7] if model_class in TOKEN_LEVEL else outputs[1]
    (real.square().sum() + outputs[0].clamp(min=-10).sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("case", ["query equals key", "zero query and key", "one token", "repeated token"])
@all_attention
def test_degenerate_inputs_are_finite(attention, case):
    model = make_model(YosoForMaskedLM, **attention).train()
    for layer in model.yoso.encoder.layer:
        projections = layer.attention.self
        if case == "query equals key":
            projections.key.load_state_dict(projections.query.state_dict())
        elif case == "zero query and key":
            for parameter in (*projections.query.parameters(), *projections.key.parameters()):
                nn.init.zeros_(parameter)
    ids = make_ids(2, 1 if case == "one token" else 12)
    if case == "repeated token":
        ids[:] = 7
        nn.init.zeros_(model.yoso.embeddings.position_embeddings.weight)
    loss = model(ids, labels=ids).loss
    assert loss.isfinite()
    for name, gradient in gradients(model, input_ids=ids, labels=ids).items():
        assert gradient.isfinite().all(), name


# the name that transformers 5.17 has, too
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@all_attention
def test_gradient_checkpointing_changes_no_gradient(attention, use_reentrant, monkeypatch):
    model = make_model(YosoForMaskedLM, **attention).train()
    ids, mask = make_ids(2, 20), make_mask([20, 11], 20)
    labels = ids.masked_fill(~mask, -100)
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return attention_function(*args, **kwargs)

    attention_function = modeling_yoso.yoso_attention
    monkeypatch.setattr(modeling_yoso, "yoso_attention", counted)
    torch.manual_seed(1)
    expected = gradients(model, input_ids=ids, attention_mask=mask, labels=labels)
    assert len(calls) == 2
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(1)
    actual = gradients(model, input_ids=ids, attention_mask=mask, labels=labels)
    assert len(calls) == 2 + 4
    for name, gradient in expected.items():
        assert gradient.any(), name
        assert_near(actual[name], gradient, atol=1e-6)


# with use_expectation="auto", sequences of up to CROSSING tokens get the exact kernel
CROSSING = 2 * EXACT_TOKENS_PER_HASH["cosine"]
AUTO = {"use_expectation": "auto", "num_hash": 2, "max_position_embeddings": 2 * CROSSING}


@torch.no_grad()
def test_auto_is_exact_up_to_the_crossing_and_sampled_beyond_it():
    auto = make_model(YosoModel, **AUTO)
    others = {}
    for use_expectation in (True, False):
        others[use_expectation] = make_model(YosoModel, **{**AUTO, "use_expectation": use_expectation})
        others[use_expectation].load_state_dict(auto.state_dict())
    # the row's real tokens are the same: it is the padded length that counts
    mask = make_mask([CROSSING - 5, 2 * CROSSING], 2 * CROSSING)
    ids = make_ids(2, 2 * CROSSING)
    for length in (CROSSING - 2, CROSSING, CROSSING + 1, 2 * CROSSING):
        inputs = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length]}
        expected, different = (others[exact](**inputs)[0] for exact in (length <= CROSSING, length > CROSSING))
        actual = auto(**inputs).last_hidden_state
        assert_near(actual, expected)
        assert (actual - different)[0, : CROSSING - 5].abs().max() > 1e-2


def test_auto_draws_hash_functions_in_training_only_to_sample(generator):
    model = make_model(YosoModel, hidden_dropout_prob=0.0, **AUTO).train()
    ids = make_ids(1, CROSSING + 1)
    for length in (CROSSING, CROSSING + 1):
        state = generator.get_state()
        model(ids[:, :length])
        assert torch.equal(generator.get_state(), state) == (length == CROSSING)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_auto_compiled_for_every_length_equals_eager(training):
    model = make_model(YosoModel, num_hidden_layers=1, **AUTO).train(training)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (CROSSING, CROSSING + 1, CROSSING - 3, 2 * CROSSING):
        ids = make_ids(2, length)
        outputs = []
        for function in (model, compiled):
            torch.manual_seed(1)
            outputs.append(function(ids).last_hidden_state)
        assert_near(*outputs)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("length", [CROSSING // 2, CROSSING, CROSSING + 1, 2 * CROSSING])
def test_auto_chooses_alike_with_gradients_and_without(length, use_reentrant):
    model = make_model(YosoForMaskedLM, **AUTO).train()
    ids = make_ids(2, length)
    torch.manual_seed(1)
    expected = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(1)
    for name, gradient in gradients(model, input_ids=ids, labels=ids).items():
        assert gradient.any(), name
        assert_near(gradient, expected[name], atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@all_attention
def test_compiled_model_equals_eager(attention, training):
    model = make_model(YosoForMaskedLM, num_hidden_layers=1, **attention).train(training)
    ids, mask = make_ids(2, 16), make_mask([16, 9], 16)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}
    torch.manual_seed(1)
    expected_logits = model(**inputs).logits
    torch.manual_seed(1)
    expected = gradients(model, **inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(1)
    outputs = compiled(**inputs)
    assert_near(outputs.logits, expected_logits)
    model.zero_grad()
    outputs.loss.backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, expected[name])


@torch.no_grad()
@pytest.mark.parametrize("use_fast_hash", [True, False])
def test_eval_is_deterministic(use_fast_hash, tmp_path):
    model = make_model(YosoModel, use_expectation=False, use_fast_hash=use_fast_hash)
    ids = make_ids(2, 20)
    expected = model(ids).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(model(ids).last_hidden_state, expected)

    built_again = YosoModel(model.config).eval()
    built_again.load_state_dict(model.state_dict())
    assert_near(built_again(ids).last_hidden_state, expected)
    model.save_pretrained(tmp_path)
    assert_near(YosoModel.from_pretrained(tmp_path)(ids).last_hidden_state, expected)
    layers = [layer.attention.self for layer in model.encoder.layer]
    assert layers[0].hash_functions(torch.empty(1, 1, 20, 1)).kind == ("hadamard" if use_fast_hash else "gaussian")
    half = YosoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for layer, half_layer in zip(layers, half.encoder.layer, strict=True):
        assert torch.equal(half_layer.attention.self.hash_parameters, layer.hash_parameters)

    assert not torch.equal(layers[0].hash_parameters, layers[1].hash_parameters)
    other_seed = YosoModel.from_pretrained(tmp_path, hash_seed=1)
    assert (other_seed(ids).last_hidden_state - expected).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {"use_expectation": True},
        {"num_hash": 40},
        {"hash_code_len": 3},
        {"hash_code_len": [[4, 7, 5, 3], [5, 3, 1, 2]]},
        {"hash_seed": 3},
        {"use_fast_hash": False},
        {"normalization": "sum"},
        {"normalization": "sum", "similarity": "softmax"},
        {"local_window": 3},
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_settings_are_read_at_each_call(settings, compiled):
    model = make_model(YosoModel, use_expectation=False, num_hash=8)
    other = make_model(YosoModel, **{"use_expectation": False, "num_hash": 8, **settings})
    other.load_state_dict(model.state_dict())
    ids, before, after = make_ids(2, 20), copy.deepcopy(model.config), other.config
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    expected = model(ids).last_hidden_state, other(ids).last_hidden_state
    assert (expected[0] - expected[1]).abs().max() > 1e-4
    # as in a process that has seen neither
    hashing._kept_parameters.cache_clear()
    torch.compiler.reset()
    # there and back, and there again after a cast, which draws the hash functions again
    for config, states in ((before, expected[0]), (after, expected[1]), (before, expected[0])):
        for name in settings:
            setattr(model.config, name, getattr(config, name))
        assert torch.equal(run(ids).last_hidden_state, states)
    for name in settings:
        setattr(model.config, name, getattr(after, name))
    assert torch.equal(model.double().float()(ids).last_hidden_state, expected[1])


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("way", ["export", "strict export", "functional_call", "vmap", "inference_mode", "meta"])
@pytest.mark.parametrize("settings", [{}, {"hash_seed": 3}, {"num_hash": 9}, {"use_expectation": False}])
def test_changed_settings_are_fixed_in_whatever_runs_the_model(settings, way):
    """What runs the model first after the change must neither draw other functions nor leave others behind."""
    sizes = {"use_expectation": "use_expectation" in settings, "num_hash": 8}
    model, other = make_model(YosoModel, **sizes), make_model(YosoModel, **{**sizes, **settings})
    other.load_state_dict(model.state_dict())
    ids = make_ids(2, 20)
    expected = other(ids).last_hidden_state
    hashing._kept_parameters.cache_clear()
    for name, value in settings.items():
        setattr(model.config, name, value)
    if "export" in way:
        run = torch.export.export(model, (ids,), strict=way == "strict export").module()
    elif way == "functional_call":
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        run = partial(torch.func.functional_call, model, state)
    elif way == "vmap":
        run = torch.vmap(lambda ids: model(ids[None]).last_hidden_state[0], randomness="different")
    elif way == "inference_mode":
        run = torch.inference_mode()(model)
    else:
        state = model.state_dict()
        model.to("meta").load_state_dict(state, assign=True)
        run = model
    for _ in range(2):
        states = run(ids)
        assert_near(states if way == "vmap" else states.last_hidden_state, expected)
    assert_near(model(ids).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hash": 0}, "num_hash must be at least 1, got 0"),
        ({"hash_code_len": 17}, r"hash_code_len must be in 1\.\.16, got 17"),
        ({"hash_code_len": [[4, 4, 4, 4]]}, "one number or 2 lists, one for each layer, got"),
        ({"hash_code_len": [[4, 4], [4, 4]]}, "hash_code_len must"),
        ({"similarity": "softmax"}, 'similarity="softmax" needs normalization="sum"'),
        ({"local_window": -1}, "local_window must be at least 0, got -1"),
        ({"hash_seed": -1}, r"hash_seed must be in 0\.\.4294967295, got -1"),
    ],
)
def test_changed_settings_are_checked(settings, message):
    model = make_model(YosoModel, use_expectation=False)
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=message):
        model(make_ids(2, 20))


@torch.no_grad()
def test_changed_settings_sample_what_was_exact():
    model = make_model(YosoModel, use_expectation=True)
    ids = make_ids(2, 20)
    exact = model(ids).last_hidden_state
    model.config.use_expectation = False
    sampled = model(ids).last_hidden_state
    assert torch.equal(model(ids).last_hidden_state, sampled)
    errors = []
    for num_hash in (16, 4096):
        model.config.num_hash = num_hash
        errors.append((model(ids).last_hidden_state - exact).norm())
    assert errors[1] < errors[0] / 4


@torch.no_grad()
def test_eval_without_hash_seed_draws_afresh():
    model = make_model(YosoModel, use_expectation=False, hash_seed=None)
    ids = make_ids(2, 20)
    torch.manual_seed(1)
    first, second = model(ids).last_hidden_state, model(ids).last_hidden_state
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(1)
    assert torch.equal(model(ids).last_hidden_state, first)


@torch.no_grad()
def test_training_draws_afresh_from_the_global_generator():
    model = make_model(YosoModel, use_expectation=False, hidden_dropout_prob=0.0).train()
    ids = make_ids(2, 20)
    transformers.set_seed(1)
    first, second = model(ids).last_hidden_state, model(ids).last_hidden_state
    assert (first - second).abs().max() > 1e-3
    transformers.set_seed(1)
    assert torch.equal(model(ids).last_hidden_state, first)
    assert torch.equal(model(ids).last_hidden_state, second)


@torch.no_grad()
def test_sampled_output_nears_expectation_with_more_hashes():
    ids = make_ids(2, 20)
    exact = make_model(YosoModel, num_hidden_layers=1)
    expected = exact(ids).last_hidden_state
    errors = []
    for num_hash in (4, 64, 1024):
        sampled = make_model(YosoModel, num_hidden_layers=1, use_expectation=False, num_hash=num_hash)
        sampled.load_state_dict(exact.state_dict())
        errors.append((sampled(ids).last_hidden_state - expected).square().mean().sqrt())
    # the error falls as the square root of the hashes' number, here by 4 from step to step
    assert errors[1] < errors[0] / 2
    assert errors[2] < errors[1] / 2


@pytest.mark.parametrize("lsh_backward", [True, False])
def test_lsh_backward_chooses_the_gradient(lsh_backward):
    ids = make_ids(2, 20)
    model = make_model(YosoForMaskedLM, use_expectation=False, lsh_backward=lsh_backward, num_hash=2)
    sampled = gradients(model, input_ids=ids, labels=ids)
    name = "yoso.encoder.layer.1.attention.self.query.weight"
    model.config.lsh_backward = False
    changed = gradients(model, input_ids=ids, labels=ids)[name] - sampled[name]
    assert (changed.abs().max() > 1e-5) == lsh_backward


@all_models
def test_save_and_load(model_class, tmp_path):
    model = make_model(model_class, use_expectation=False, conv_window=5)
    model.save_pretrained(tmp_path)
    loaded, info = AUTO_CLASSES[model_class].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert_all_keys_matched(info)
    ids = make_ids(2, 20)
    expected = run(model, ids)
    # the last bit of a product depends on where the weights lie in memory
    assert_near(run(loaded, ids), expected)
    assert_near(run(copy.deepcopy(model), ids), expected)
    assert_near(run(pickle.loads(pickle.dumps(model)), ids), expected)


@torch.no_grad()
@pytest.mark.parametrize("conv_window", [None, 3])
@pytest.mark.parametrize("size", [(2, 0), (0, 5), (0, 0)])
def test_no_texts_and_texts_without_tokens(size, conv_window):
    model = make_model(YosoForMaskedLM, use_expectation=False, conv_window=conv_window)
    ids = torch.zeros(size, dtype=torch.long)
    for mask in (None, torch.ones_like(ids)):
        assert model(ids, attention_mask=mask).logits.shape == (*size, model.config.vocab_size)


@torch.no_grad()
def test_hidden_states_are_recorded():
    model = make_model(YosoForMaskedLM, use_expectation=False)
    ids = make_ids(2, 20)
    outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[-1], model.yoso(ids).last_hidden_state)
    assert torch.equal(model.yoso.encoder.layer[0](outputs.hidden_states[0]), outputs.hidden_states[1])
    assert torch.equal(model.yoso.encoder.layer[1](outputs.hidden_states[1]), outputs.hidden_states[2])
    as_tuple = model(ids, output_hidden_states=True, return_dict=False)
    model.config.return_dict = False
    for logits, hidden_states in (as_tuple, model(ids, output_hidden_states=True)):
        assert torch.equal(logits, outputs.logits)
        assert torch.equal(hidden_states[0], outputs.hidden_states[0])


@torch.no_grad()
def test_feed_forward_in_chunks():
    whole, chunked = make_model(YosoModel), make_model(YosoModel, chunk_size_feed_forward=5)
    chunked.load_state_dict(whole.state_dict())
    sizes = []
    chunked.encoder.layer[0].intermediate.register_forward_hook(lambda *hook: sizes.append(hook[-1].shape[1]))
    ids = make_ids(2, 20)
    assert_near(chunked(ids).last_hidden_state, whole(ids).last_hidden_state)
    assert sizes == [5] * 4


def test_activations_of_many_tokens_are_computed_again(monkeypatch):
    model = make_model(YosoForMaskedLM, hidden_dropout_prob=0.1).train()
    ids = make_ids(2, 20)
    wide = ids.numel() * model.config.intermediate_size

    def step(recomputed_tokens):
        monkeypatch.setattr(modeling_yoso, "RECOMPUTED_TOKENS", recomputed_tokens)
        torch.manual_seed(0)
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.setdefault(x.data_ptr(), x) if x.numel() == wide else x, lambda x: x
        ):
            loss = model(ids, labels=ids).loss
        model.zero_grad()
        with Calls() as calls:
            loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        return grads, len(kept), calls.count["aten::mm"], calls.count["aten::gelu"]

    kept, recomputed = step(ids.numel() + 1), step(ids.numel())
    layers = model.config.num_hidden_layers
    assert kept[1:] == (2 * layers, kept[2], 0)
    # one tensor a layer less to keep, and nothing but the activation is computed again
    assert recomputed[1:] == (layers, kept[2], layers)
    for grad, expected in zip(recomputed[0], kept[0], strict=True):
        assert torch.equal(grad, expected)
    model.eval()
    with Calls() as calls:
        model(ids, labels=ids).loss.backward()
    # one of them is the head's
    assert calls.count["aten::gelu"] == layers + 1


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_attentions_are_the_weights_in_use():
    model = make_model(YosoModel)
    ids, mask = make_ids(2, 20), make_mask([20, 12], 20)
    values, contexts = [], []
    for layer in model.encoder.layer:
        layer.attention.self.value.register_forward_hook(lambda *hook: values.append(hook[-1]))
        layer.attention.self.register_forward_hook(lambda *hook: contexts.append(hook[-1][0]))
    outputs = model(ids, attention_mask=mask, output_attentions=True)
    assert len(outputs.attentions) == 2
    for weights, value, context in zip(outputs.attentions, values, contexts, strict=True):
        assert weights.shape == (2, 4, 20, 20)
        assert not weights[1, :, :, 12:].any()
        heads = weights @ value.view(2, 20, 4, 8).transpose(1, 2)
        assert_near(F.normalize(heads, dim=-1).transpose(1, 2).flatten(2), context)
    assert model(ids).attentions is None
    with torch.enable_grad():
        assert not any(weights.requires_grad for weights in model(ids, output_attentions=True).attentions)


@torch.no_grad()
@pytest.mark.parametrize("use_expectation", [True, False])
def test_bfloat16_is_near_float32(use_expectation):
    model = make_model(YosoForMaskedLM, use_expectation=use_expectation, initializer_range=0.1, num_hash=64)
    ids, mask = make_ids(4, 40), make_mask([40, 31, 5, 1], 40)
    expected = model(ids, attention_mask=mask).logits[mask]
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        autocast = model(ids, attention_mask=mask).logits[mask]
    half = copy.deepcopy(model).to(torch.bfloat16)(ids, attention_mask=mask).logits[mask]
    assert half.dtype == torch.bfloat16
    for outputs in (autocast, half):
        error = (outputs.float() - expected).norm() / expected.norm()
        # bfloat16 has 8 bits; sampled, a few codes differ as well
        assert error < (0.02 if use_expectation else 0.1)


@pytest.mark.usefixtures("padded")
def test_compiled_training_under_autocast_is_near_float32():
    model = make_model(YosoForMaskedLM, initializer_range=0.1, hidden_dropout_prob=0.0).train()
    ids, mask = make_ids(4, 40), make_mask([40, 31, 5, 1], 40)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}
    expected = torch.cat([gradient.flatten() for gradient in gradients(model, **inputs).values()])
    torch.compiler.reset()
    for step in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = step(**inputs).loss
        loss.backward()
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        # bfloat16 has 8 bits
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_autocast_keeps_less_for_the_backward_than_roberta():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    config = transformers.RobertaConfig(**sizes, type_vocab_size=1, attention_probs_dropout_prob=0.0)
    roberta = transformers.RobertaModel._from_config(config, attn_implementation="sdpa")
    yoso = YosoModel(YosoConfig(**sizes, use_expectation=False, num_hash=32, hash_code_len=9))

    def kept_bytes(model, length):
        ids, kept = make_ids(1, length), {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
        )
        with hooks, torch.autocast(ids.device.type, torch.bfloat16):
            model.train()(ids)
        return sum(x.untyped_storage().nbytes() for x in kept.values())

    # of tokens alone, without the weights
    ours, theirs = (kept_bytes(model, 400) - kept_bytes(model, 200) for model in (yoso, roberta))
    assert ours < theirs


def test_half_precision_gradients_are_finite():
    model = make_model(YosoForMaskedLM, use_expectation=False).to(torch.bfloat16).train()
    ids, mask = make_ids(2, 20), make_mask([20, 0], 20)
    for name, gradient in gradients(model, input_ids=ids, attention_mask=mask, labels=ids).items():
        assert gradient.isfinite().all(), name


def test_compiled_sparse_prediction_equals_eager():
    model = make_model(YosoForMaskedLM, sparse_prediction=True)
    ids = make_ids(2, 20)
    inputs = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(2, 20) > 0.3, -100)}
    expected = model(**inputs)
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        outputs = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    assert_near(outputs.logits, expected.logits)
    assert_near(outputs.loss, expected.loss)


class Logits(TorchDispatchMode):
    """Records what operators return that is as wide as the vocabulary, by their names."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.seen = collections.defaultdict(list)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.shape[-1:] == (self.width,):
            self.seen[function._schema.name].append((output.numel() // self.width, output.dtype))
        return output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunks", [[7] * 5 + [5], [40]], ids=["several", "one"])
def test_token_losses_are_those_of_float64(chunks, dtype, monkeypatch):
    wide = torch.promote_types(dtype, torch.float32)
    monkeypatch.setattr(modeling_yoso, "LOSS_CHUNK_BYTES", chunks[0] * VOCAB_SIZE * wide.itemsize)
    logits, labels = (3 * torch.randn(40, VOCAB_SIZE)).to(dtype), torch.randint(VOCAB_SIZE, (40,))
    # softmax is nearly 1 and nearly 0
    logits[0, labels[0]], logits[1, labels[1]] = 15, -15
    labels[2::3] = -100
    weights = torch.randn(40, dtype=wide)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected * weights).sum().backward()
    logits.requires_grad_()
    with Logits(VOCAB_SIZE) as calls:
        losses = modeling_yoso.TokenLosses.apply(logits, labels)
    assert calls.seen["aten::_log_softmax"] == [(rows, wide) for rows in chunks]
    assert losses.dtype == wide
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    (losses * weights).sum().backward()
    assert logits.grad.dtype == dtype
    # rounded twice; the loss of a likely label, of which its gradient comes, is a small difference of float32 numbers
    rtol, atol = max(1.5 * torch.finfo(dtype).eps, 1e-5), 1e-12 if dtype == torch.float64 else 1e-7
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rtol, atol=atol)
    assert not logits.grad[labels == -100].any()


def test_loss_needs_no_memory_but_for_logits_and_their_gradient(padded, monkeypatch):
    width = 128 if padded else VOCAB_SIZE
    monkeypatch.setattr(modeling_yoso, "LOSS_CHUNK_BYTES", 7 * width * 4)
    model = make_model(YosoForMaskedLM).train()
    ids, kept = make_ids(2, 20), {}

    def keep(x):
        if x.numel() == 40 * width:
            kept[x.untyped_storage().data_ptr()] = x.dtype
        return x

    # a backward under autocast as well, which would widen what it computes
    with torch.autocast(ids.device.type, torch.bfloat16), Logits(width) as calls:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = model(ids, labels=ids)
        outputs.loss.backward()
    assert kept == {outputs.logits.untyped_storage().data_ptr(): torch.bfloat16}
    made = [(name, *x) for name, seen in calls.seen.items() for x in seen if x[0] == 40]
    new = [x for x in made if not x[0].endswith("_") and x[0] not in ("aten::view", "aten::detach")]
    assert sorted(new) == [("aten::_softmax", 40, torch.bfloat16), ("aten::addmm", 40, torch.bfloat16)]


@pytest.mark.parametrize("num_items_in_batch", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("sparse_prediction", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 104, 128 + 1])
def test_masked_lm_loss_and_gradients(vocab_size, tied, sparse_prediction, num_items_in_batch, padded, monkeypatch):
    monkeypatch.setattr(modeling_yoso, "LOSS_CHUNK_BYTES", 7 * vocab_size * 4)
    model = make_model(
        YosoForMaskedLM, vocab_size=vocab_size, tie_word_embeddings=tied, sparse_prediction=sparse_prediction
    )
    nn.init.normal_(model.cls.predictions.decoder.bias)
    ids = make_ids(2, 20)
    labelled = torch.rand(2, 20) < 0.6
    inputs = {
        "input_ids": ids,
        "labels": ids.masked_fill(~labelled, -100),
        "num_items_in_batch": num_items_in_batch,
    }
    logits = model.cls(model.yoso(ids).last_hidden_state)
    loss = F.cross_entropy(logits[labelled].double(), ids[labelled], reduction="sum")
    loss = loss / (num_items_in_batch or labelled.sum())
    loss.backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters() if x.requires_grad}
    with Logits(-vocab_size % 64 + vocab_size) as calls:
        outputs = model(**inputs)
    # 104 is a multiple of 8 already
    assert bool(calls.seen["aten::addmm"]) is (padded and vocab_size != 104)
    assert_near(outputs.logits, logits[labelled] if sparse_prediction else logits)
    assert_near(outputs.loss, loss.float())
    model.zero_grad()
    outputs.loss.backward()
    for name, gradient in expected.items():
        assert_near(model.get_parameter(name).grad, gradient)
    with torch.no_grad():
        assert torch.equal(model(**inputs).loss, outputs.loss)


@torch.no_grad()
@pytest.mark.usefixtures("padded")
@pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="there it ends the process")
@pytest.mark.parametrize("beyond", [0, 1, 28, 29])
def test_label_beyond_the_vocabulary_is_out_of_range(beyond):
    ids = make_ids(2, 20)
    labels = ids.clone()
    labels[1, 3] = VOCAB_SIZE + beyond
    with pytest.raises(IndexError, match="out of bounds"):
        make_model(YosoForMaskedLM)(ids, labels=labels)


@pytest.mark.usefixtures("padded")
def test_own_loss_function_gets_logits_over_the_vocabulary():
    model = make_model(YosoForMaskedLM)
    ids, calls = make_ids(2, 20), []

    def loss_function(logits, labels, vocab_size, num_items_in_batch):
        calls.append((logits.shape, vocab_size, int(num_items_in_batch)))
        # of padded logits it would be infinite
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1)

    model.loss_function = loss_function
    outputs = model(ids, labels=ids)
    assert calls == [((2, 20, VOCAB_SIZE), VOCAB_SIZE, 40)]
    expected = F.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten(), label_smoothing=0.1)
    assert_near(outputs.loss, expected)
    outputs.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class OtherLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class OtherTensor(torch.Tensor):
    """As weights in 8 bits are, which need not know how to be padded."""


def with_class(decoder):
    decoder.__class__ = OtherLinear


def with_weight(decoder):
    decoder.weight = nn.Parameter(decoder.weight.detach().as_subclass(OtherTensor))


def with_forward(decoder):
    forward = decoder.forward
    decoder.forward = lambda x: forward(x) + 1


def with_hook(decoder):
    decoder.register_forward_hook(lambda _module, _inputs, logits: logits + 1)


def with_hook_before(decoder):
    decoder.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))


def without_bias(decoder):
    decoder.bias = None


@torch.no_grad()
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("change", [with_class, with_weight, with_forward, with_hook, with_hook_before, without_bias])
def test_changed_output_layer_is_called_as_it_is(change):
    model = make_model(YosoForMaskedLM, tie_word_embeddings=False)
    change(model.cls.predictions.decoder)
    ids = make_ids(2, 20)
    with Logits(128) as calls:
        outputs = model(ids, labels=ids)
    assert not calls.seen
    assert_near(outputs.logits, model.cls(model.yoso(ids).last_hidden_state))
    assert_near(outputs.loss, F.cross_entropy(outputs.logits.flatten(0, 1), ids.flatten()))


@torch.no_grad()
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("name", ["cls", "cls.predictions", "cls.predictions.decoder"])
def test_head_may_be_replaced(name):
    model = make_model(YosoForMaskedLM)
    model.set_submodule(name, nn.Identity())
    ids = make_ids(2, 20)
    assert_near(model(ids).logits, model.cls(model.yoso(ids).last_hidden_state))


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("num_items_in_batch", [None, 1, torch.tensor(11)])
def test_sparse_prediction_equals_dense(num_items_in_batch):
    dense = make_model(YosoForMaskedLM)
    sparse = make_model(YosoForMaskedLM, sparse_prediction=True)
    sparse.load_state_dict(dense.state_dict())
    ids = make_ids(2, 20)
    labels = ids.masked_fill(torch.rand(2, 20) > 0.3, -100)
    labelled = labels != -100
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": num_items_in_batch}
    dense_outputs, sparse_outputs = dense(**inputs), sparse(**inputs)
    assert_near(sparse_outputs.logits, dense_outputs.logits[labelled])
    losses = F.cross_entropy(dense_outputs.logits[labelled], labels[labelled], reduction="none")
    expected = losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch
    assert_near(dense_outputs.loss, expected)
    assert_near(sparse_outputs.loss, dense_outputs.loss)
    expected = gradients(dense, **inputs)
    for name, gradient in gradients(sparse, **inputs).items():
        assert_near(gradient, expected[name])
    assert_near(sparse(ids).logits, dense(ids).logits)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("num_items_in_batch", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("sparse_prediction", [True, False])
def test_batch_without_labels_has_loss_zero(sparse_prediction, num_items_in_batch):
    model = make_model(YosoForMaskedLM, sparse_prediction=sparse_prediction)
    ids = make_ids(2, 20)
    inputs = {
        "input_ids": ids,
        "labels": torch.full_like(ids, -100),
        "num_items_in_batch": num_items_in_batch,
    }
    assert model(**inputs).loss == 0
    for name, gradient in gradients(model, **inputs).items():
        assert not gradient.any(), name


@pytest.mark.parametrize("normalization", ["l2", "sum"])
def test_a_window_over_all_tokens_is_the_expectation(normalization):
    ids, mask = make_ids(2, 30), make_mask([30, 17], 30)
    sampled = {"use_expectation": False, "num_hash": 64, "normalization": normalization}
    outputs = {}
    for name, changes in (("none", sampled), ("all", {**sampled, "local_window": 29}), ("exact", {**sampled})):
        torch.manual_seed(0)
        changes["use_expectation"] = name == "exact"
        outputs[name] = make_model(YosoModel, **changes)(ids, mask).last_hidden_state[mask]
    error = (outputs["none"] - outputs["exact"]).norm()
    assert (outputs["all"] - outputs["exact"]).norm() < 1e-3 * error


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("model_class", "labels"),
    [
        (YosoForMultipleChoice, torch.tensor([0, 1, 1, 0, 1, 0])),
        (YosoForMultipleChoice, torch.tensor([-100, 1, 1, -100, -100, 0])),
        (YosoForSequenceClassification, torch.tensor([0, 2, 1, 1, 0, 2])),
        (YosoForSequenceClassification, torch.tensor([[1.0, 0, 1], [0, 0, 1]] * 3)),
        (YosoForSequenceClassification, torch.arange(6.0)),
    ],
    ids=["choice", "choice with ignored labels", "single label", "multi label", "regression"],
)
def test_losses_of_parts_of_a_batch_add_up_to_its_loss(model_class, labels, counted):
    """As Trainer adds them up over gradient_accumulation_steps: it counts the labels of all, and divides no more."""
    model = make_model(model_class, **({"num_labels": 1} if labels.dim() == 1 and labels.is_floating_point() else {}))
    ids = make_ids(6, 2, 9) if model_class is YosoForMultipleChoice else make_ids(6, 9)
    expected = model(ids, labels=labels).loss
    count = (labels != -100).sum()
    count = count if counted else count.item()
    parts = [
        model(ids[part], labels=labels[part], num_items_in_batch=count).loss
        for part in (slice(0, 1), slice(1, 3), slice(3, 6))
    ]
    torch.testing.assert_close(sum(parts), expected)


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss_function"),
    [
        (1, torch.tensor([0.5, -1.0, 2.0]), lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        (3, torch.tensor([2, 0, 1]), F.cross_entropy),
        (2, torch.tensor([[1.0, 0], [1, 1], [0, 0]]), F.binary_cross_entropy_with_logits),
    ],
    ids=["regression", "single label", "multi label"],
)
def test_sequence_classification_loss(num_labels, labels, loss_function):
    model = make_model(YosoForSequenceClassification, num_labels=num_labels)
    outputs = model(make_ids(3, 20), labels=labels)
    assert outputs.logits.shape == (3, num_labels)
    assert_near(outputs.loss, loss_function(outputs.logits, labels))


def test_token_classification_ignores_labels_of_padding():
    model = make_model(YosoForTokenClassification)
    ids, mask = make_ids(2, 20), make_mask([20, 8], 20, "left")
    labels = ids % 3
    labels[0, 3:7] = -100
    outputs = model(ids, attention_mask=mask, labels=labels)
    counted = mask & (labels != -100)
    assert_near(outputs.loss, F.cross_entropy(outputs.logits[counted], labels[counted]))
    assert model(ids, attention_mask=torch.zeros_like(mask), labels=labels).loss == 0


def test_question_answering_loss_leaves_padding_out():
    model = make_model(YosoForQuestionAnswering)
    lengths = [20, 8, 13]
    ids, mask = make_ids(3, 20), make_mask(lengths, 20)
    # an index past the end, 20, stands for no answer
    starts, ends = torch.tensor([4, 0, 20]), torch.tensor([9, 7, 12])
    losses = {"start": [], "end": []}
    for row_ids, length, start, end in zip(ids, lengths, starts, ends, strict=True):
        alone = model(row_ids[None, :length])
        if start < 20:
            losses["start"].append(F.cross_entropy(alone.start_logits[0], start))
        losses["end"].append(F.cross_entropy(alone.end_logits[0], end))
    expected = (torch.stack(losses["start"]).mean() + torch.stack(losses["end"]).mean()) / 2
    outputs = model(ids, attention_mask=mask, start_positions=starts, end_positions=ends)
    assert_near(outputs.loss, expected)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("resized", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_what_asks_for_a_gradient_gets_one(tied, resized):
    """DistributedDataParallel waits for the gradient of a parameter that nothing uses."""
    model = make_model(YosoForMaskedLM, tie_word_embeddings=tied)
    if resized:
        model.resize_token_embeddings(VOCAB_SIZE + 12)
    ids = make_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    assert [name for name, x in model.named_parameters() if x.requires_grad and x.grad is None] == []
    assert model.cls.predictions.decoder.bias.grad.any()


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_may_have_no_bias(tied):
    model = make_model(YosoForMaskedLM, tie_word_embeddings=tied)
    decoder = nn.Linear(model.config.hidden_size, VOCAB_SIZE, bias=False)
    ids, features = make_ids(2, 20), []
    model.cls.predictions.decoder.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    model(ids)
    model.set_output_embeddings(decoder)
    assert_near(model(ids).logits, decoder(features[0]))


@pytest.mark.parametrize("use_fast_hash", [True, False])
def test_nothing_is_drawn_where_auto_takes_the_exact_kernel(use_fast_hash):
    model = make_model(YosoModel, use_expectation="auto", use_fast_hash=use_fast_hash).train()
    layer = model.encoder.layer[0].attention.self
    changed = []
    longest = EXACT_TOKENS_PER_HASH["cosine"] * model.config.num_hash
    for length in (longest, longest + 1):
        rows = torch.randn(1, length, model.config.hidden_size)
        torch.manual_seed(0)
        expected = torch.rand(8)
        torch.manual_seed(0)
        layer(rows)
        changed.append(not torch.equal(torch.rand(8), expected))
    assert changed == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("use_fast_hash", [True, False])
def test_training_draws_functions_of_the_kind_that_is_set(use_fast_hash, monkeypatch):
    model = make_model(YosoModel, use_expectation=False, use_fast_hash=use_fast_hash).train()
    layer, rows = model.encoder.layer[0].attention.self, torch.randn(1, 20, 32)
    torch.manual_seed(0)
    got, _ = layer(rows)
    torch.manual_seed(0)
    functions = HashFunctions.sample(*layer.hash_sizes(), kind="hadamard" if use_fast_hash else "gaussian")
    monkeypatch.setattr(layer, "hash_functions", lambda _: functions)
    assert torch.equal(got, layer(rows)[0])


@torch.no_grad()
@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings(tied, tmp_path):
    model = make_model(YosoForMaskedLM, tie_word_embeddings=tied)
    ids = make_ids(2, 20)
    expected = model(ids).logits
    model.resize_token_embeddings(VOCAB_SIZE + 12)
    head = model.cls.predictions
    assert (head.decoder.weight is model.get_input_embeddings().weight) is tied
    assert (head.decoder.bias is head.bias) is tied
    nn.init.normal_(head.decoder.bias[VOCAB_SIZE:])
    outputs = model(torch.cat([ids, ids + 12], dim=1), labels=torch.cat([ids, ids + 12], dim=1))
    assert outputs.logits.shape == (2, 40, VOCAB_SIZE + 12)
    assert outputs.loss.isfinite()
    assert_near(model(ids).logits[..., :VOCAB_SIZE], expected)
    model.save_pretrained(tmp_path)
    loaded, info = YosoForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert_all_keys_matched(info)
    assert_near(loaded(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("length", [100, 20])
@all_models
def test_resized_positions(model_class, length, tmp_path):
    make_model(model_class).save_pretrained(tmp_path / "old")
    model = model_class.from_pretrained(tmp_path / "old").eval()
    old, ids = model.get_position_embeddings().weight.clone(), make_ids(2, 20)
    expected = run(model, ids)
    model.resize_position_embeddings(length)
    new = model.get_position_embeddings().weight
    assert torch.equal(new[:2], old[:2])
    assert torch.equal(new[2:], torch.cat([old[2:]] * 3)[:length])
    assert torch.equal(run(model, ids), expected)

    model.save_pretrained(tmp_path / "new")
    loaded, info = AUTO_CLASSES[model_class].from_pretrained(tmp_path / "new", output_loading_info=True)
    assert_all_keys_matched(info)
    assert model.config.max_position_embeddings == loaded.config.max_position_embeddings == length
    if model_class is YosoForMaskedLM:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    ids = make_ids(1, length)
    assert_near(run(loaded, ids), run(model, ids))
    with pytest.raises(ValueError, match=f"max_position_embeddings={length} tokens, got {length + 1}"):
        run(model, make_ids(1, length + 1))


def test_resized_positions_are_trained_as_the_old_ones_were():
    model = make_model(YosoForMaskedLM).to(torch.bfloat16)
    table = model.get_position_embeddings()
    model.resize_position_embeddings(60)
    assert (table.num_embeddings, table.weight.dtype) == (62, torch.bfloat16)
    ids = make_ids(1, 60)
    model(ids, labels=ids).loss.backward()
    assert table.weight.grad[2:].any(dim=1).all() and not table.weight.grad[:2].any()
    table.requires_grad_(False)
    model.resize_position_embeddings(70)
    assert not table.weight.requires_grad


@pytest.mark.parametrize(
    ("number", "message"), [(0, "at least 1, got 0"), (2.5, "an integer, got 2.5"), (True, "got True")]
)
def test_resized_positions_out_of_range(number, message):
    model = make_model(YosoForMaskedLM)
    with pytest.raises(ValueError, match=f"new_num_position_embeddings must be .*{message}"):
        model.resize_position_embeddings(number)
    assert model.get_position_embeddings().weight.shape == (50, 32)
    assert model.config.max_position_embeddings == 48


@pytest.fixture
def on_cpu():
    with torch.device("cpu"):
        yield


# data loaders shuffle and batch on the CPU
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_two_steps_of_trainer(tmp_path):
    model = make_model(YosoForMaskedLM, use_expectation=False, sparse_prediction=True)
    before = copy.deepcopy(model.state_dict())
    examples = []
    for ids in make_ids(8, 20):
        labels = torch.where(torch.rand(20) < 0.2, ids, -100)
        examples.append({"input_ids": ids, "attention_mask": torch.ones(20, dtype=torch.int64), "labels": labels})
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=examples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    for name, value in trainer.model.state_dict().items():
        assert value.isfinite().all() and not torch.equal(value, before[name]), name
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    ids = make_ids(2, 20)
    assert_near(loaded(ids).logits, trainer.model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (torch.ones(2, 11, dtype=torch.int64), r"torch.int64 of shape \[2, 11\]"),
        (torch.ones(10, dtype=torch.int64), r"torch.int64 of shape \[10\]"),
        (torch.ones(1, 10, dtype=torch.bool), r"torch.bool of shape \[1, 10\]"),
        (torch.ones(2, 1, 10, 10, dtype=torch.bool), r"torch.bool of shape \[2, 1, 10, 10\]"),
        (torch.ones(2, 1, 1, 10), r"torch.float32 of shape \[2, 1, 1, 10\]"),
        # to be added to weights
        (torch.tensor([0.0, -math.inf]).expand(2, 5, 2).flatten(1), r"torch.float32 of shape \[2, 10\]"),
        (torch.full((2, 10), 0.5), r"torch.float32 of shape \[2, 10\]"),
        (torch.ones(2, 10, dtype=torch.complex64), r"torch.complex64 of shape \[2, 10\]"),
        (torch.ones(2, 10, dtype=torch.bool, device="meta"), r"torch.bool of shape \[2, 10\] on meta"),
        ([[1] * 10] * 2, "list"),
    ],
)
def test_wrong_mask(mask, given):
    allowed = rf"bool or integer tensor of shape \[2, 10\] on {torch.get_default_device()}"
    with pytest.raises(ValueError, match=f"attention_mask must be a {allowed}.*got {given}"):
        make_model(YosoForMaskedLM)(make_ids(2, 10), attention_mask=mask)


def test_sequence_too_long():
    model = make_model(YosoForMaskedLM)
    assert model(make_ids(1, 48)).logits.isfinite().all()
    with pytest.raises(ValueError, match="max_position_embeddings=48 tokens, got 49"):
        model(make_ids(1, 49))
    with pytest.raises(ValueError, match="max_position_embeddings=48 tokens, got 49"):
        model(inputs_embeds=torch.zeros(1, 49, 32))


@pytest.mark.parametrize("model_class", [YosoModel, YosoForMultipleChoice])
def test_both_or_neither_input(model_class):
    model = make_model(model_class)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds must be given, got neither"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds must be given, got both"):
        model(make_ids(1, 1, 4), inputs_embeds=torch.zeros(1, 1, 4, 32))


@pytest.mark.parametrize(
    ("model_class", "sizes"), [(YosoModel, "batch, length"), (YosoForMultipleChoice, "batch, choices, length")]
)
def test_inputs_of_too_many_or_too_few_sizes(model_class, sizes):
    model = make_model(model_class)
    shape = [1, 1, 4][: len(sizes.split(", "))]
    for wrong in (shape[1:], [1, *shape]):
        message = f"input_ids must be a tensor of shape [{sizes}], got shape {wrong}"
        with pytest.raises(ValueError, match=re.escape(message)):
            model(make_ids(*wrong))
        wrong = [*wrong, 32]
        message = f"inputs_embeds must be a tensor of shape [{sizes}, hidden_size], got shape {wrong}"
        with pytest.raises(ValueError, match=re.escape(message)):
            model(inputs_embeds=torch.zeros(wrong))


@pytest.mark.parametrize("use_expectation", [False, "auto"])
def test_attentions_of_sampled_attention_are_refused(use_expectation):
    model = make_model(YosoForMaskedLM, use_expectation=use_expectation)
    message = f"output_attentions=True needs use_expectation=True, got use_expectation={use_expectation!r}"
    with pytest.raises(ValueError, match=message):
        model(make_ids(1, 4), output_attentions=True)


def test_configuration_of_another_class_is_refused():
    others = transformers.YosoConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    for model_class in (YosoModel, YosoForMaskedLM):
        with pytest.raises(ValueError, match=r"config must be a yoso_hf.YosoConfig, got transformers\..*\.YosoConfig"):
            model_class(others)
        model_class(YosoConfig(**others.to_dict()))


def test_override_out_of_range(tmp_path):
    make_model(YosoModel).save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="conv_window must be None or an odd positive number, got 4"):
        YosoModel.from_pretrained(tmp_path, conv_window=4)
