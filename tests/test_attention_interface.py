import copy
import math

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from yoso_hf import HashFunctions, YosoConfig, YosoModel, attention_interface, hashing, yoso_attention
from yoso_hf import attention as attention_module
from yoso_hf.attention import EXACT_TOKENS_PER_HASH
from yoso_hf.attention_interface import (
    SETTINGS,
    takes_attention,
    yoso_attention_forward,
    yoso_expectation_attention_forward,
)
from yoso_hf.fitting import fit_hash_code_len

VOCAB_SIZE = 99
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64}
CONFIGS = {
    "bert": transformers.BertConfig(**LONG),
    "roberta": transformers.RobertaConfig(**LONG, pad_token_id=1),
    "xlm-roberta": transformers.XLMRobertaConfig(**LONG, pad_token_id=1),
    "camembert": transformers.CamembertConfig(**LONG, pad_token_id=1),
    "electra": transformers.ElectraConfig(**LONG, embedding_size=16),
    "esm": transformers.EsmConfig(**LONG, pad_token_id=1, mask_token_id=4),
    "albert": transformers.AlbertConfig(**LONG, embedding_size=16),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64
    ),
    # a layer of full attention and one with a sliding window
    "modernbert": transformers.ModernBertConfig(
        **LONG, pad_token_id=0, local_attention=8, global_attn_every_n_layers=2
    ),
    # fewer keys than queries
    "eurobert": transformers.EuroBertConfig(**LONG, num_key_value_heads=2, pad_token_id=0),
}
ENCODERS = pytest.mark.parametrize("name", CONFIGS)


def dense_yoso(module, query, key, value, attention_mask, sliding_window=None, scaling=None, **kwargs):
    """The expectation of cosine similarity with tau = 13 from its definition, with transformers' own mask of pairs."""
    if sliding_window is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    cosine = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (query, key))
    weights = (1 - (next(cosine) @ next(cosine).mT).clamp(-1, 1).acos() / math.pi) ** 13
    if attention_mask is not None:
        weights = weights * attention_mask
    out = (weights @ value.double() / weights.sum(-1, keepdim=True)).to(value.dtype)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("dense_yoso", dense_yoso)
AttentionMaskInterface.register("dense_yoso", sdpa_mask)


def build(name, attention, **settings):
    config = copy.deepcopy(CONFIGS[name])
    config.update(settings)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval()
    # initial weights are so small that all attention is nearly uniform
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


def tokens(rows=3, length=21, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB_SIZE, (rows, length), generator=generator)


def padded(ids, lengths, name):
    """The first tokens of every row, and padding on the right."""
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return ids.where(mask, CONFIGS[name].pad_token_id), mask.long()


# by similarity: what computes the expectation from its definition
DEFINITIONS = pytest.mark.parametrize(("similarity", "definition"), [("softmax", "sdpa"), ("cosine", "dense_yoso")])


@ENCODERS
@DEFINITIONS
@pytest.mark.parametrize("attention", ["yoso", "yoso_expectation"])
def test_an_encoder_computes_what_the_definition_says(name, attention, similarity, definition):
    ids, mask = padded(tokens(), (21, 8, 1), name)
    settings = {"yoso_similarity": similarity, "yoso_hash_code_len": 13}
    expected, other = (
        build(name, attention)(ids, attention_mask=mask).last_hidden_state
        for attention in (definition, "dense_yoso" if definition == "sdpa" else "sdpa")
    )
    # 21 tokens: "yoso" is exact there
    result = build(name, attention, **settings)(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(result[real], expected[real], rtol=1e-4, atol=1e-4)
    # which it would not be if the attention were the other one
    assert (result - expected)[real].abs().max() < 0.1 * (expected - other)[real].abs().max()


@ENCODERS
@pytest.mark.parametrize("expectation", [True, False])
def test_padding_and_neighbours_do_not_change_a_text(name, expectation, monkeypatch):
    # so that texts as short as these have samples
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 3)
    model = build(name, "yoso", yoso_use_expectation=expectation, yoso_hash_code_len=4)
    lengths = (21, 13, 1)
    ids, mask = padded(tokens(), lengths, name)
    together = model(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-3, atol=1e-4)


@ENCODERS
def test_sampling_is_random_in_training_and_fixed_in_evaluation(name, monkeypatch):
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 4)
    model = build(name, "yoso", yoso_use_expectation=False, yoso_hash_code_len=4)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = tokens()
    first, second = (model(ids).last_hidden_state for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    model.train()
    first, second = (model(ids).last_hidden_state for _ in range(2))
    assert (first - second).abs().max() > 1e-3


@ENCODERS
@pytest.mark.parametrize("similarity", ["cosine", "softmax"])
@pytest.mark.parametrize("expectation", [True, False])
def test_nothing_is_ever_nan(name, expectation, similarity):
    model = build(name, "yoso", yoso_use_expectation=expectation, yoso_similarity=similarity).train()
    cases = {
        "one token": (tokens(2, 1), None),
        "equal tokens": (torch.full((2, 17), 7), None),
        "a row of padding": padded(tokens(2, 9), (9, 0), name),
    }
    for case, (ids, mask) in cases.items():
        model.zero_grad()
        out = model(ids, attention_mask=mask).last_hidden_state
        assert out.isfinite().all(), case
        out.square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None), case


def test_exact_softmax_is_by_the_kernel(monkeypatch):
    """And not by what the model would have had anyway."""
    found, compute = [], attention_module.softmax_attention
    monkeypatch.setattr(attention_module, "HAS_CPU_KERNELS", True)
    monkeypatch.setattr(attention_module, "softmax_attention", lambda *args: found.append(args[4]) or compute(*args))
    model = build("bert", "yoso")
    model(tokens())
    assert found == [8**-0.5] * model.config.num_hidden_layers


@ENCODERS
@DEFINITIONS
def test_the_exact_gradient_is_that_of_the_definition(name, similarity, definition):
    ids, mask = padded(tokens(), (21, 8, 3), name)
    found = {}
    for implementation in (definition, "yoso_expectation"):
        settings = {"yoso_similarity": similarity, "yoso_hash_code_len": 13, "yoso_backward": "exact"}
        model = build(name, implementation, **settings)
        out = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        out.mul(torch.arange(out.numel()).view_as(out).cos()).sum().backward()
        found[implementation] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in found[definition].values())
    for parameter, expected in found[definition].items():
        # biases of keys have none in softmax, but rounding
        scale = max(expected.abs().max().item(), 1e-3 * largest)
        torch.testing.assert_close(found["yoso_expectation"][parameter], expected, rtol=1e-2, atol=1e-3 * scale)


def test_sampled_gradients_average_to_those_of_the_expectation():
    """Of one attention layer, over fresh hash functions, within 4 standard errors."""
    settings = {"yoso_similarity": "cosine", "yoso_hash_code_len": 3, "yoso_num_hash": 16}
    model = build("bert", "yoso", yoso_normalization=None, **settings).train()
    layer = model.encoder.layer[0].attention.self
    torch.manual_seed(1)
    draws = 400
    query, key, value, grad, *directions = (torch.randn(1, 4, 11, 8) for _ in range(7))

    def gradients(use_expectation):
        layer.config.yoso_use_expectation = use_expectation
        given = [x.clone().requires_grad_() for x in (query, key, value)]
        out, _ = yoso_attention_forward(layer, *given, None)
        out.transpose(1, 2).mul(grad).sum().backward()
        return torch.stack([(x.grad * d).sum() for x, d in zip(given, directions, strict=True)]).double()

    sampled = torch.stack([gradients(False) for _ in range(draws)])
    error = sampled.std(0) / math.sqrt(draws)
    assert ((sampled.mean(0) - gradients(True)).abs() < 4 * error).all()


def test_images_have_no_mask():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    outputs = []
    for attention in ("yoso", "sdpa", "dense_yoso"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval().double()
        # initial weights are so small that all attention is nearly uniform; these make it too sharp for float32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)
        outputs.append(model(pixels).last_hidden_state)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3


def test_a_decoder_beside_an_encoder_keeps_its_softmax():
    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        yoso_similarity="cosine",
    )  # fmt: skip
    models = {}
    for attention in ("yoso", "sdpa"):
        torch.manual_seed(0)
        # a model keeps the configuration, and notes its attention there
        models[attention] = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=attention)
        models[attention].eval()
    ids, mask = padded(tokens(), (21, 8, 3), "roberta")
    states = torch.randn(3, 21, 32)
    decoded = [
        model.decoder(
            input_ids=tokens(3, 7), encoder_hidden_states=states, encoder_attention_mask=mask, use_cache=False
        ).last_hidden_state
        for model in models.values()
    ]
    torch.testing.assert_close(decoded[0], decoded[1], rtol=1e-5, atol=1e-6)
    encoded = [model.encoder(ids, attention_mask=mask).last_hidden_state for model in models.values()]
    assert (encoded[0] - encoded[1])[mask.bool()].abs().max() > 1e-4


def test_numbers_by_layer_are_of_the_encoder_where_its_decoder_has_more_layers():
    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        yoso_similarity="cosine",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso").eval()
    outputs = []
    for lengths in (4, [[4] * 4] * 2, [[4] * 4, [5] * 4]):
        model.config.yoso_hash_code_len = lengths
        outputs.append(model(tokens(), decoder_input_ids=tokens(3, 7), use_cache=False))
    assert torch.equal(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    assert not torch.equal(outputs[0].encoder_last_hidden_state, outputs[2].encoder_last_hidden_state)
    fit = fit_hash_code_len(model, [{"input_ids": tokens(), "decoder_input_ids": tokens(3, 7)}])
    assert [len(lengths) for lengths in fit.hash_code_len] == [4, 4]


def test_attention_to_other_tokens_keeps_its_softmax_where_there_are_as_many_of_them():
    """Moonshine has one class for the attention to a text's own tokens and to the encoder's."""
    config = transformers.MoonshineConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1, encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0,
    )  # fmt: skip
    states = torch.randn(3, 7, 32)
    decoded = []
    for attention in ("yoso", "sdpa"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)
        decoder = model.decoder(input_ids=tokens(3, 7), encoder_hidden_states=states, use_cache=False)
        decoded.append(decoder.last_hidden_state)
    torch.testing.assert_close(decoded[0], decoded[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["nllb-moe", "t5gemma2_decoder"])
def test_a_decoder_is_causal_without_a_mask(model_type):
    """Layers of NLLB-MoE do not say that they are; T5Gemma 2 joins the masks of a text's own and of other tokens."""
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
    if model_type == "nllb-moe":
        config = transformers.NllbMoeConfig(
            **sizes, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_experts=2, decoder_sparse_step=0,
        )  # fmt: skip
    else:
        text = {**sizes, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
        config = transformers.T5Gemma2Config(encoder={"text_config": text}, decoder=text)
    decoded = []
    for attention in ("yoso", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        states = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1))
        out = model.decoder(input_ids=tokens(3, 7), encoder_hidden_states=states, use_cache=False)
        decoded.append(out.last_hidden_state)
    torch.testing.assert_close(decoded[0], decoded[1], rtol=1e-5, atol=1e-5)


def test_a_mask_that_a_model_expands_by_itself():
    """Siglip2's pooling repeats the mask of its encoder for each head."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, patch_size=2, num_patches=16
    )
    torch.manual_seed(0)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation="yoso").eval()
    pixels, shapes = torch.randn(2, 16, 12), torch.tensor([[4, 4], [2, 3]])
    mask = torch.arange(16) < shapes.prod(1)[:, None]
    together = model(pixels, mask.long(), shapes).pooler_output
    for row in range(2):
        alone = model(pixels[row : row + 1], mask[row : row + 1].long(), shapes[row : row + 1]).pooler_output
        torch.testing.assert_close(together[row], alone[0], rtol=1e-4, atol=1e-5)
    pixels[1, 6:] = 100
    torch.testing.assert_close(model(pixels, mask.long(), shapes).pooler_output, together, rtol=1e-4, atol=1e-5)


def test_a_mask_that_a_model_makes_by_itself():
    """LayoutLM's is added to softmax's weights."""
    model = transformers.LayoutLMModel._from_config(transformers.LayoutLMConfig(**LONG), attn_implementation="yoso")
    model.eval()
    ids, mask = padded(tokens(), (21, 13, 1), "bert")
    together = model(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate((21, 13, 1)):
        alone = model(ids[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-3, atol=1e-4)
    # where nothing can be asked of what it holds
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, attention_mask=mask).last_hidden_state, together, rtol=1e-4, atol=1e-5)
    model.to("meta")
    assert model(ids.to("meta"), attention_mask=mask.to("meta")).last_hidden_state.shape == together.shape


@torch.no_grad()
@pytest.mark.parametrize("config", [transformers.LlamaConfig, transformers.Qwen3Config])
def test_decoders_that_attend_in_both_directions(config):
    """By Transformers' own switch."""
    ids, mask = padded(tokens(), (21, 13, 1), "bert")
    states = []
    for attention in ("sdpa", "yoso_expectation"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(
            config(**LONG, num_key_value_heads=2, is_causal=False), attn_implementation=attention
        ).eval()
        states.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_model_with_layers_that_keep_their_softmax_compiles_into_one_graph(caplog):
    torch.compiler.reset()
    attention_interface.logger.warning_once.cache_clear()
    config = transformers.ModernBertConfig(
        **LONG,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()).last_hidden_state, model(tokens()).last_hidden_state)
    assert "Softmax remains where ModernBertAttention is causal, has a sliding window" in caplog.text


@torch.no_grad()
def test_a_part_of_a_model_by_its_configuration():
    """CLIP, whose texts are causal: its pictures get YOSO, and its texts keep their softmax."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": VOCAB_SIZE, "eos_token_id": 1},
        vision_config={**sizes, "image_size": 32, "patch_size": 8, "yoso_similarity": "cosine"},
    )
    inputs = {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 32, 32)}
    outputs = []
    for attention in ("sdpa", {"vision_config": "yoso"}):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        outputs.append(model(**inputs))
    torch.testing.assert_close(outputs[0].text_embeds, outputs[1].text_embeds)
    assert (outputs[0].image_embeds - outputs[1].image_embeds).abs().max() > 1e-4
    with pytest.raises(ValueError, match="CLIPAttention is causal"):
        transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation="yoso")(**inputs)


def test_what_yoso_cannot_compute_is_refused():
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso")
    with pytest.raises(ValueError, match="GPT2Attention is causal"):
        model(tokens())
    with pytest.raises(ValueError, match="BertSelfAttention is causal"):
        build("bert", "yoso", is_decoder=True)(tokens())
    pairs = torch.ones(3, 1, 21, 21, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attention_mask of shape \[B, N\].*got \[3, 1, 21, 21\]"):
        build("bert", "yoso")(tokens(), attention_mask=pairs)
    for shape, named in (((3, 20), r" = \[3, 21\], got \[3, 20\]"), ((21,), r", got \[21\]")):
        with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, N\]" + named):
            build("bert", "yoso")(tokens(), attention_mask=torch.ones(shape))
    # a bias of keys is no mask
    for bias in (torch.zeros(3, 1, 1, 21, requires_grad=True), torch.linspace(0, 1, 21).expand(3, 1, 1, 21)):
        with pytest.raises(ValueError, match="needs a floating-point attention_mask of 0 for real tokens"):
            build("bert", "yoso")(tokens(), attention_mask=bias)
    layer = build("bert", "yoso").encoder.layer[0].attention.self
    rows = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match="cannot use the position_bias of BertSelfAttention"):
        yoso_attention_forward(layer, rows, rows, rows, None, position_bias=torch.zeros(1, 4, 5, 5))
    # also where the layer would be left to sdpa, which drops them
    with pytest.raises(ValueError, match="cannot use the s_aux of BertSelfAttention"):
        yoso_attention_forward(layer, rows, rows, rows, None, sliding_window=2, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="cannot use the softcap of BertSelfAttention"):
        yoso_attention_forward(layer, rows, rows, rows, None, sliding_window=2, softcap=50.0)
    config = transformers.MistralConfig(**LONG, num_key_value_heads=4, sliding_window=8)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso")
    with pytest.raises(ValueError, match="MistralAttention is causal"):
        model(tokens())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mask_in_floating_point_is_one_of_tokens(dtype):
    """The least number of a dtype is what models add for a masked token; of float16 it is only -65504."""
    model, ids = build("bert", "yoso").to(dtype), tokens()
    real = torch.arange(21) < torch.tensor([[21], [9], [3]])
    masks = real, torch.where(real, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
    expected, found = (model(ids, attention_mask=mask).last_hidden_state[real] for mask in masks)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("attention", ["yoso", "yoso_expectation"])
def test_models_that_would_ignore_the_name_are_refused(attention):
    config = transformers.NystromformerConfig(**LONG, segment_means_seq_len=64, num_landmarks=8)
    with pytest.raises(ValueError, match=f'NystromformerModel does not take attn_implementation="{attention}"'):
        transformers.AutoModel.from_config(config, attn_implementation=attention)
    with pytest.raises(ValueError, match="YosoModel does not take .*: its attention is YOSO already"):
        YosoModel._from_config(YosoConfig(**LONG), attn_implementation=attention)
    # a model with an encoder of its own kind beside a decoder that looks its attention up
    seq2seq = {"vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    for other in (
        transformers.BigBirdPegasusConfig(**seq2seq, attention_type="original_full"),
        transformers.PegasusXConfig(**seq2seq),
        transformers.LongT5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=48),
    ):
        with pytest.raises(ValueError, match=f'Model does not take attn_implementation="{attention}"'):
            transformers.AutoModel.from_config(other, attn_implementation=attention)
    # attention by names of their own, by a name that is looked up in the wrong place, none by name beside some,
    # PyTorch's own layers of attention, and models of another library
    for model_class in (
        transformers.SamModel,
        transformers.Kosmos2_5Model,
        transformers.Gemma3nAudioEncoder,
        transformers.BridgeTowerModel,
        transformers.TimmWrapperModel,
    ):
        assert not takes_attention(model_class)
    # of a class of another module, and of one without a source
    for base in (transformers.DebertaV2Model, transformers.MPNetModel):
        derived = type("Derived", (base,), {"__module__": "builtins"})
        assert not takes_attention(derived)
    derived = type("Derived", (transformers.DebertaV2Model,), {"__module__": __name__})
    assert not takes_attention(derived)
    # all other names go where they went before
    assert transformers.AutoModel.from_config(config, attn_implementation="eager") is not None


def test_models_that_transformers_knows_no_sdpa_for_are_taken_where_all_layers_look_their_attention_up():
    names = ["SplinterModel", "Speech2TextModel", "MarkupLMModel", "AlignTextModel", "NllbMoeModel", "BertModel"]
    # PyTorch's layers of attention in a pooling, and across
    names += ["SiglipModel", "AriaModel"]
    # a part of models that take it
    names.append("TimmBackbone")
    assert all(takes_attention(getattr(transformers, name)) for name in names)
    # derived here, and typed in
    for module in (__name__, "builtins", "no.module"):
        assert takes_attention(type("Derived", (transformers.BertForMaskedLM,), {"__module__": module}))


def test_settings_are_those_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 4)
    settings = {"yoso_num_hash": 3, "yoso_hash_code_len": [[2, 3, 4, 5], [6, 7, 8, 9]], "yoso_hash_seed": 5}
    settings |= {"yoso_similarity": "cosine"}
    model = build("bert", "yoso", yoso_use_expectation=False, **settings)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="yoso")
    assert all(getattr(loaded.config, name) == value for name, value in settings.items())
    ids = tokens()
    expected = model(ids).last_hidden_state
    torch.testing.assert_close(loaded(ids).last_hidden_state, expected, rtol=0, atol=0)
    changes = {
        "yoso_num_hash": 4,
        "yoso_hash_code_len": [[2, 3, 4, 5], [6, 7, 8, 8]],
        "yoso_hash_seed": 6,
        "yoso_local_window": 3,
        "yoso_use_expectation": True,
        "yoso_normalization": "l2",
    }
    for name, value in changes.items():
        other = copy.deepcopy(loaded)
        setattr(other.config, name, value)
        assert (other(ids).last_hidden_state - expected).abs().max() > 1e-4, name
    # samples of softmax have one length of codes
    loaded.config.yoso_hash_code_len = 5
    expected = loaded(ids).last_hidden_state
    loaded.config.yoso_similarity = "softmax"
    assert (loaded(ids).last_hidden_state - expected).abs().max() > 1e-4
    assert set(changes) | {"yoso_backward", "yoso_similarity"} == set(SETTINGS)


@pytest.mark.parametrize(
    ("settings", "attention", "warned"),
    [
        ({"yoso_similarity": "cosine", "yoso_hash_code_len": 9}, None, True),
        ({"yoso_similarity": "cosine", "yoso_hash_code_len": 9}, "sdpa", True),
        ({"yoso_similarity": "cosine", "yoso_hash_code_len": 9}, "yoso", False),
        ({}, "sdpa", False),
    ],
)
def test_settings_that_the_attention_does_not_use_are_warned_of(tmp_path, caplog, settings, attention, warned):
    """Transformers saves no attn_implementation."""
    build("bert", "yoso", **settings).save_pretrained(tmp_path)
    attention_interface.logger.warning_once.cache_clear()
    transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=attention)
    assert ("holds settings of YOSO (yoso_...), which the attention 'sdpa' does not use" in caplog.text) == warned


def test_a_wrong_setting_is_named_whatever_was_used_before():
    """1 and True, and 4 and 4.0, are the same to a cache."""
    for good, bad in ((1, True), (4, 4.0), (4, [4])):
        build("bert", "yoso", yoso_use_expectation=False, yoso_num_hash=good).eval()(tokens())
        with pytest.raises(ValueError, match="yoso_num_hash must be an integer, got"):
            build("bert", "yoso", yoso_use_expectation=False, yoso_num_hash=bad).eval()(tokens())


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="the configuration has yoso_num_hashes, but YOSO's settings are yoso_num_h"):
        build("bert", "yoso", yoso_num_hashes=3)(tokens())
    with pytest.raises(ValueError, match="num_hash must be at least 1, got 0"):
        build("bert", "yoso", yoso_num_hash=0)(tokens())
    with pytest.raises(ValueError, match="DistilBertSelfAttention does not know which layer it is in"):
        build("distilbert", "yoso", yoso_hash_code_len=[[4] * 4] * 2)(tokens())
    # one number for each of two layers, and one layer too few or too many
    for lengths in ([4, 4], [[4] * 4], [[4] * 4] * 3):
        with pytest.raises(ValueError, match="yoso_hash_code_len must be one number, or a list of 2 lists"):
            build("bert", "yoso", yoso_hash_code_len=lengths)(tokens())
    with pytest.raises(ValueError, match="hash_code_len must be one number or 4, one for each head, got 3"):
        build("bert", "yoso", yoso_hash_code_len=[[4] * 3] * 2)(tokens())
    for length in (4.5, None):
        with pytest.raises(ValueError, match=f"hash_code_len must be an integer, got {length}"):
            build("bert", "yoso", yoso_hash_code_len=length)(tokens())
    for seed in (-1, 2**32, "0"):
        # such short texts are not sampled
        with pytest.raises(ValueError, match="yoso_hash_seed must be .*, got '?" + str(seed)):
            build("bert", "yoso", yoso_hash_seed=seed)(tokens())


@pytest.mark.parametrize("layer_idx", [0, 1])
def test_every_layer_has_hash_functions_of_its_own(layer_idx):
    settings = {
        "yoso_similarity": "cosine",
        "yoso_use_expectation": False,
        "yoso_hash_code_len": 4,
        "yoso_hash_seed": 5,
    }
    model = build("bert", "yoso", **settings)
    attention = model.encoder.layer[layer_idx].attention.self
    query, key, value = torch.randn(3, 2, 4, 9, 8).unbind()
    out, _ = yoso_attention_forward(attention, query, key, value, None)
    functions = HashFunctions.seeded(5, layer_idx, 4, 8, 64, 4)
    expected = yoso_attention(query, key, value, hash_functions=functions, normalization="sum")
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_long_sequences_are_sampled(monkeypatch):
    """Where "auto" samples, two seeds give two results; where it is exact, one."""
    # without them, nothing is sampled
    monkeypatch.setattr(attention_module, "HAS_CPU_KERNELS", True)
    crossing = 64 * EXACT_TOKENS_PER_HASH["softmax"]
    for length, equal in ((crossing, True), (crossing + 1, False)):
        ids = tokens(1, length)
        outputs = [
            build("bert", "yoso", max_position_embeddings=crossing + 1, yoso_hash_seed=seed)(ids).last_hidden_state
            for seed in (0, 1)
        ]
        assert torch.equal(*outputs) == equal


def test_checkpointing_draws_the_same_hash_functions_again():
    model = build("bert", "yoso", yoso_use_expectation=False, yoso_hash_code_len=4, hidden_dropout_prob=0.1).train()
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens()).last_hidden_state.square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    # the expectation's graph is the same in training
    ("expectation", "training"),
    [(True, False), (False, False), ("auto", False), (False, True), ("auto", True)],
)
@pytest.mark.parametrize(("similarity", "lengths"), [("softmax", 4), ("cosine", 4), ("cosine", [[3, 4, 3, 5]] * 2)])
def test_it_compiles_into_one_graph(expectation, training, similarity, lengths, monkeypatch):
    # what other cases compiled counts against a limit
    torch.compiler.reset()
    monkeypatch.setattr(attention_module, "NUM_HEAVY_KEYS", 4)
    settings = {"yoso_similarity": similarity, "yoso_hash_code_len": lengths}
    model = build("bert", "yoso", yoso_use_expectation=expectation, **settings)
    model.train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids, mask = padded(tokens(), (21, 8, 3), "bert")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert result.isfinite().all()
    if not training:
        expected = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_an_exported_model_keeps_its_hash_functions_and_no_other_model_gets_them():
    """torch.export runs the model on tensors without data."""
    hashing._kept_parameters.cache_clear()
    model = build("bert", "yoso", yoso_use_expectation=False, yoso_hash_code_len=4)
    ids = tokens()
    exported = torch.export.export(model, (), {"input_ids": ids}, strict=False).module()
    expected = model(ids).last_hidden_state
    assert type(expected) is torch.Tensor
    for _ in range(2):
        torch.testing.assert_close(exported(input_ids=ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_a_vmapped_model_keeps_its_hash_functions_and_no_other_model_gets_them(randomness):
    hashing._kept_parameters.cache_clear()
    model = build("bert", "yoso", yoso_use_expectation=False, yoso_hash_code_len=4)
    ids = tokens()
    run = torch.vmap(lambda ids: model(input_ids=ids).last_hidden_state, randomness=randomness)
    states = run(ids[:, None])[:, 0]
    assert type(states) is torch.Tensor
    expected = build("bert", "yoso", yoso_use_expectation=False, yoso_hash_code_len=4)(ids).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_stays_close(dtype):
    ids, mask = padded(tokens(), (21, 8, 3), "bert")
    expected = build("bert", "yoso")(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    result = build("bert", "yoso").to(dtype)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert result.dtype == dtype
    # as far away as softmax's own result in that dtype, twice
    softmax = build("bert", "sdpa")(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    rounded = build("bert", "sdpa").to(dtype)(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert (result - expected).square().mean() < 4 * (rounded - softmax).square().mean()


@pytest.mark.parametrize("settings", [{}, {"yoso_similarity": "cosine", "yoso_normalization": "l2"}])
def test_weights_are_those_of_the_output(settings):
    """Grouped keys and padding; eager's weights are the truth of softmax's, the output is that of both."""
    layer = torch.nn.Module()
    layer.config = transformers.BertConfig(**settings)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    key_mask = (torch.arange(7) < torch.tensor([[7], [4]]))[:, None, None]
    given = (layer, query, key, value, key_mask)
    out, weights = yoso_expectation_attention_forward(*given, output_attentions=True)
    assert yoso_expectation_attention_forward(*given)[1] is None
    expected = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
    if settings:
        expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert weights[1, ..., 4:].eq(0).all()
    with pytest.raises(ValueError, match='output_attentions=True needs attn_implementation="yoso_expectation" or'):
        yoso_attention_forward(*given, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("how", ["compile", "export", "strict export"])
def test_a_graph_refuses_a_bias_of_keys_as_it_runs(how):
    torch.compiler.reset()
    model = build("bert", "yoso_expectation")
    ids = tokens()
    mask = torch.zeros(3, 1, 1, 21)
    mask[1, :, :, 9:] = torch.finfo(torch.float32).min
    if how == "compile":
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        inputs = {"input_ids": ids, "attention_mask": mask}
        graph = torch.export.export(model, (), inputs, strict="strict" in how).module()
    expected = model(ids, attention_mask=mask).last_hidden_state
    found = graph(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mask[2, :, :, 5] = -3
    with pytest.raises(RuntimeError, match="needs a floating-point attention_mask of 0 for real tokens"):
        graph(input_ids=ids, attention_mask=mask)


def test_weights_are_refused_where_a_layer_keeps_its_softmax():
    """Transformers would give those of the other layers, without a word of which they are."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**LONG, local_attention=8, global_attn_every_n_layers=2, **special)
    model = transformers.AutoModel.from_config(config, attn_implementation="yoso_expectation").eval()
    assert model(tokens()).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match="output_attentions=True needs YOSO in all layers, but ModernBertAttention"):
        model(tokens(), output_attentions=True)


def test_a_model_gives_the_weights_of_eager():
    ids, mask = padded(tokens(), (21, 8, 3), "bert")
    outputs = [
        build("bert", attention)(ids, attention_mask=mask, output_attentions=True)
        for attention in ("yoso_expectation", "eager")
    ]
    assert len(outputs[0].attentions) == CONFIGS["bert"].num_hidden_layers
    for weights, expected in zip(*(output.attentions for output in outputs), strict=True):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_one_mask_for_a_batch_is_broadcast_as_by_sdpa():
    ids = tokens()
    mask = (torch.arange(ids.shape[1]) < 9)[None, None, None]
    results = [build("bert", attention)(ids, attention_mask=mask).last_hidden_state for attention in ("yoso", "sdpa")]
    torch.testing.assert_close(results[0][:, :9], results[1][:, :9], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_jit_trace_takes_the_exact_kernel_where_it_is_the_cheaper():
    ids, mask = padded(tokens(), (21, 8, 3), "bert")
    model = build("bert", "yoso", return_dict=False)
    states = torch.jit.trace(model, (ids[:, :15], mask[:, :15]))(ids, mask)[0]
    torch.testing.assert_close(states, model(ids, mask)[0])
