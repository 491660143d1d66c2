import copy

import pytest
import torch
import transformers
from test_attention_interface import VOCAB_SIZE, padded, tokens
from test_attention_interface import build as build_any

from yoso_hf import attention_interface, fitting, yoso_attention
from yoso_hf.attention_interface import SETTINGS
from yoso_hf.fitting import fit_hash_code_len


def build(kind, attention, **changes):
    """A model of cosine similarity, unless the changes name another."""
    return build_any(kind, attention, **{"yoso_similarity": "cosine", **changes})


def batches():
    return [
        dict(zip(("input_ids", "attention_mask"), padded(tokens(seed=seed), lengths, "bert"), strict=True))
        for seed, lengths in enumerate([(21, 9, 4), (15, 21, 2)])
    ]


@pytest.mark.parametrize(("expectation", "highest"), [(True, 32), (False, 16)])
def test_every_head_gets_the_number_with_the_smallest_error(expectation, highest):
    """Against softmax and YOSO computed here, from the layers' own projections."""
    model = build("bert", "sdpa", yoso_use_expectation=expectation, yoso_num_hash=2000)
    squares, errors = torch.zeros(2, 4), torch.zeros(2, highest, 4)
    for batch in batches():
        states = model(**batch, output_hidden_states=True).hidden_states
        mask = batch["attention_mask"].bool()
        for index, layer in enumerate(model.encoder.layer):
            rows = layer.attention.self
            query, key, value = (
                part(states[index]).view(3, 21, 4, 8).transpose(1, 2) for part in (rows.query, rows.key, rows.value)
            )
            scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(~mask[:, None, None], -torch.inf)
            softmax = scores.softmax(-1) @ value
            real = mask[:, None, :, None]
            squares[index] += (softmax * real).square().sum((0, 2, 3))
            for number in range(1, highest + 1):
                out = yoso_attention(
                    query, key, value, mask, hash_code_len=[number] * 4, num_hash=2000, expectation=expectation,
                    normalization="sum",
                )  # fmt: skip
                errors[index, number - 1] += ((out - softmax) * real).square().sum((0, 2, 3))
    fit = fit_hash_code_len(model, batches())
    if expectation:
        assert fit.hash_code_len == (1 + errors.argmin(1)).tolist()
        torch.testing.assert_close(torch.tensor(fit.error), errors.amin(1) / squares, rtol=1e-3, atol=1e-6)
    else:
        # other hash functions: the error of what was chosen is near the smallest
        chosen = torch.tensor(fit.hash_code_len)[:, None] - 1
        assert (errors.gather(1, chosen)[:, 0] < 1.3 * errors.amin(1) + 1e-3 * squares).all()
    # a fit that always gives the same number would be none
    assert len({number for layer in fit.hash_code_len for number in layer}) > 1


def test_a_fitted_model_is_closer_to_softmax():
    softmax = build("bert", "sdpa")
    expected = softmax(**batches()[0]).last_hidden_state
    real = batches()[0]["attention_mask"].bool()
    # enough samples that the choice is by the kernel
    settings = {"yoso_use_expectation": False, "yoso_num_hash": 2000}
    softmax.config.update(settings)
    fit = fit_hash_code_len(softmax, batches())
    distance = {}
    for name, numbers in {"fitted": fit.hash_code_len, "twelve": 12}.items():
        model = build("bert", "yoso", yoso_hash_code_len=numbers, **settings)
        distance[name] = (model(**batches()[0]).last_hidden_state - expected)[real].norm()
    assert distance["fitted"] < 0.7 * distance["twelve"]


def test_noise_counts_for_a_quarter(monkeypatch):
    """It is that of four times the samples."""
    fit = fit_hash_code_len(build("bert", "sdpa", yoso_num_hash=2), batches())
    monkeypatch.setattr(fitting, "SAMPLES_FACTOR", 1)
    two, eight = (fit_hash_code_len(build("bert", "sdpa", yoso_num_hash=number), batches()) for number in (2, 8))
    assert fit == eight
    assert min(torch.tensor(two.error).flatten() - torch.tensor(eight.error).flatten()) > 0


def test_the_model_is_left_as_it_was(caplog):
    model = build("bert", "eager").train()
    caplog.clear()
    attention_interface.logger.warning_once.cache_clear()
    model.encoder.layer[0].eval()
    before = copy.deepcopy(model.config.to_dict())
    modes = [module.training for module in model.modules()]

    def interrupted():
        yield batches()[0]
        raise KeyboardInterrupt

    fit_hash_code_len(model, batches())
    # of settings that another attention does not use
    assert "holds settings of YOSO" not in caplog.text
    for _ in range(2):
        assert model.config.to_dict() == before
        assert model.config._attn_implementation == "eager"
        assert [module.training for module in model.modules()] == modes
        with pytest.raises(KeyboardInterrupt):
            fit_hash_code_len(model, interrupted())


def test_each_part_of_a_model_is_left_as_it_was():
    """The decoder of an EncoderDecoderModel is causal, and refused after its encoder was fitted."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    halves = (
        transformers.BertConfig(**sizes, yoso_similarity="cosine"),
        transformers.BertConfig(**sizes, is_decoder=True),
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    model = transformers.EncoderDecoderModel(config).eval()
    model.set_attn_implementation({"encoder": "yoso_expectation"})
    ids = tokens()
    expected = model.encoder(ids).last_hidden_state
    assert len(fit_hash_code_len(model.encoder, [{"input_ids": ids}]).hash_code_len) == 2
    with pytest.raises(ValueError, match="BertSelfAttention is causal"):
        fit_hash_code_len(model, [{"input_ids": ids, "decoder_input_ids": ids}])
    names = [part.config._attn_implementation for part in (model, model.encoder, model.decoder)]
    assert names == ["sdpa", "yoso_expectation", "sdpa"]
    torch.testing.assert_close(model.encoder(ids).last_hidden_state, expected)


def test_layers_are_numbered_by_the_encoder():
    """A BART's decoder, whose attention is left to softmax, may have more."""
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    config = transformers.BartConfig(**sizes, encoder_ffn_dim=48, decoder_ffn_dim=48, yoso_similarity="cosine")
    model = transformers.AutoModel.from_config(config, attn_implementation="sdpa").eval()
    fit = fit_hash_code_len(model, [{"input_ids": tokens(), "decoder_input_ids": tokens(3, 7)}])
    assert [len(layer) for layer in fit.hash_code_len] == [len(layer) for layer in fit.error] == [4, 4]


def test_a_decoder_of_its_own_configuration_has_no_numbers():
    text = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "head_dim": 8, "yoso_similarity": "cosine"}
    encoder, decoder = (text | {"num_hidden_layers": layers} for layers in (2, 3))
    encoder["layer_types"] = ["full_attention", "sliding_attention"]
    config = transformers.T5Gemma2Config(encoder={"text_config": encoder}, decoder=decoder)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso").eval()
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens(3, 7)}
    fit = fit_hash_code_len(model, [batch])
    assert fit.hash_code_len[1] == [SETTINGS["yoso_hash_code_len"]] * 4
    # once more, from what was found
    model.config.encoder.text_config.yoso_hash_code_len = fit.hash_code_len
    assert fit_hash_code_len(model, [batch]) == fit


def test_a_model_in_training_is_fitted_without_its_dropout():
    model = build("bert", "sdpa", hidden_dropout_prob=0.5)
    assert fit_hash_code_len(model.train(), batches()) == fit_hash_code_len(model.eval(), batches())


def test_a_part_that_is_always_exact_is_fitted_as_such():
    text = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "yoso_similarity": "cosine"}
    text |= {"layer_types": ["full_attention"] * 2}
    config = transformers.T5Gemma2Config(encoder={"text_config": text}, decoder=text)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens(3, 7)}
    fits = []
    for implementation in ("yoso", "yoso_expectation"):
        model.encoder.set_attn_implementation(implementation)
        fits.append(fit_hash_code_len(model, [batch]))
    model.set_attn_implementation("yoso_expectation")
    assert fits[1] == fit_hash_code_len(model, [batch])
    assert fits[1] != fits[0]


def test_a_head_without_output_leaves_no_error():
    model = build("bert", "sdpa")
    value = model.encoder.layer[1].attention.self.value
    with torch.no_grad():
        value.weight[:8], value.bias[:8] = 0, 0
    error = torch.tensor(fit_hash_code_len(model, batches()).error)
    assert error[1, 0] == 0
    assert (error.flatten() > 0).sum() == 7


def test_layers_with_a_window_keep_their_softmax():
    model = build("modernbert", "sdpa")
    fit = fit_hash_code_len(model, batches())
    assert [len(layer) for layer in fit.hash_code_len] == [4, 4]
    assert fit.hash_code_len[1] == [SETTINGS["yoso_hash_code_len"]] * 4
    assert fit.error[1] == [0.0] * 4
    assert min(fit.error[0]) > 0
    # once more, from what was found
    model.config.yoso_hash_code_len = fit.hash_code_len
    assert fit_hash_code_len(model, batches()).hash_code_len == fit.hash_code_len


def test_a_model_that_is_always_exact_is_fitted_as_such():
    """By its attention's name as by the key, with numbers that hash codes have no room for."""
    model = build("bert", "yoso_expectation")
    fit = fit_hash_code_len(model, batches())
    assert model.config._attn_implementation == "yoso_expectation"
    exact = build("bert", "sdpa", yoso_use_expectation=True)
    assert fit == fit_hash_code_len(exact, batches())
    assert fit.error != fit_hash_code_len(build("bert", "sdpa"), batches()).error


def test_what_auto_samples_is_what_is_fitted():
    """Though it computes texts as short as these exactly."""
    fits = [fit_hash_code_len(build("bert", "sdpa", yoso_use_expectation=use), batches()) for use in ("auto", False)]
    assert fits[0] == fits[1]


@pytest.mark.parametrize("attention", ["sdpa", "yoso", "yoso_expectation"])
@pytest.mark.parametrize("expectation", [True, False, "auto"])
def test_with_softmax_there_is_nothing_to_fit(attention, expectation):
    """The default, and the similarity where it is named: exact or sampled, the model stays as it was."""
    models = (
        build("bert", attention, yoso_similarity="softmax", yoso_use_expectation=expectation),
        build_any("bert", attention, yoso_use_expectation=expectation),
    )
    for model in models:
        before = copy.deepcopy(model.config.to_dict())
        message = '^nothing to fit: with yoso_similarity "softmax", .* set yoso_similarity="cosine" to fit$'
        with pytest.raises(ValueError, match=message):
            fit_hash_code_len(model, batches())
        assert model.config.to_dict() == before
        assert model.config._attn_implementation == attention


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="batches must hold inputs"):
        fit_hash_code_len(build("bert", "sdpa"), [])
    # one batch in place of a list of them, and ids alone
    for given, kind in ((batches()[0], "str"), ([tokens()], "Tensor")):
        with pytest.raises(ValueError, match=f"batches must be a list of a model's inputs.*holds a {kind}"):
            fit_hash_code_len(build("bert", "sdpa"), given)
    with pytest.raises(ValueError, match="DistilBertSelfAttention has no layer_idx"):
        fit_hash_code_len(build("distilbert", "sdpa"), batches())
    config = transformers.NystromformerConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_attention_heads=4)
    with pytest.raises(ValueError, match="model must take another attn_implementation, got a NystromformerModel"):
        fit_hash_code_len(transformers.AutoModel.from_config(config), batches())
