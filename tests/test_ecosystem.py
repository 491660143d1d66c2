"""YOSO models in the rest of the Hugging Face ecosystem: what docs/ecosystem.md says of each tool.

Independent truths: the model itself called directly, one sequence at a time and without padding; float32; eager mode.
"""

import copy
import importlib.util
import itertools
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed
import transformers
from doc_blocks import python_blocks
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch._dynamo.utils import counters
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from yoso_hf import (
    HashFunctions,
    YosoConfig,
    YosoForMaskedLM,
    YosoForMultipleChoice,
    YosoForQuestionAnswering,
    YosoForSequenceClassification,
    YosoForTokenClassification,
    YosoModel,
    graphs,
    modeling_yoso,
    ops,
)
from yoso_hf import attention as attention_module
from yoso_hf.data import train_tokenizer
from yoso_hf.modeling_yoso import YosoEmbeddings, YosoLayer
from yoso_hf.training import end_processes

GUIDE = Path(__file__).parents[1] / "docs" / "ecosystem.md"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = [f"w{index}" for index in range(60)]
VOCAB_SIZE = len(SPECIAL) + len(WORDS)
MAX_LENGTH = 4096
# words of the texts: short, and far beyond 512
TEXT_LENGTHS = (3, 700, 2500)
MODES = {"sampled": {"use_expectation": False}, "expectation": {"use_expectation": True}}

both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
all_modes = pytest.mark.parametrize("mode", [*MODES.values(), {"use_expectation": "auto"}], ids=[*MODES, "auto"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_config(**changes):
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 37,
        "max_position_embeddings": MAX_LENGTH,
        "hash_code_len": 5,
        "num_hash": 8,
        "num_labels": 3,
        "use_expectation": False,
        "hidden_dropout_prob": 0.0,
        # large weights, so that a wrong attention shows in the outputs
        "initializer_range": 0.15,
    }
    return YosoConfig(**{**sizes, **changes})


def make_model(model_class, **changes):
    return model_class(make_config(**changes)).eval()


def make_tokenizer():
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=MAX_LENGTH,
    )


def make_texts():
    return [" ".join(random.Random(length).choices(WORDS, k=length)) for length in TEXT_LENGTHS]


def make_batch(length=20, real=12):
    """Two sequences, the second one padded, and the mask as bool."""
    ids = torch.randint(len(SPECIAL), VOCAB_SIZE, (2, length))
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_near(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# pipelines


@torch.no_grad()
@both_modes
def test_fill_mask_pipeline(mode):
    model, tokenizer = make_model(YosoForMaskedLM, **mode), make_tokenizer()
    texts = [text + " <mask> w1 w2" for text in make_texts()]
    pipe = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    for text, batched in zip(texts, pipe(texts, batch_size=len(texts)), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        logits = model(**inputs).logits[inputs.input_ids == tokenizer.mask_token_id]
        scores, tokens = logits.softmax(-1)[0].topk(5)
        assert scores[0] < 0.99
        for answers in (batched, pipe(text)):
            assert [answer["token"] for answer in answers] == tokens.tolist()
            assert_near(torch.tensor([answer["score"] for answer in answers]), scores)


@torch.no_grad()
@both_modes
def test_text_classification_pipeline(mode):
    model, tokenizer = make_model(YosoForSequenceClassification, **mode), make_tokenizer()
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    texts = make_texts()
    for text, batched in zip(texts, pipe(texts, batch_size=len(texts)), strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        for answers in (batched, pipe(text)[0]):
            by_label = {answer["label"]: answer["score"] for answer in answers}
            assert_near(torch.tensor([by_label[f"LABEL_{label}"] for label in range(3)]), expected)


@torch.no_grad()
@both_modes
def test_token_classification_pipeline(mode):
    model, tokenizer = make_model(YosoForTokenClassification, **mode), make_tokenizer()
    pipe = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer)
    texts = make_texts()
    for text, batched in zip(texts, pipe(texts, batch_size=len(texts)), strict=True):
        scores, labels = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0, 1:-1].max(-1)
        for answers in (batched, pipe(text)):
            assert [answer["word"] for answer in answers] == text.split()
            assert [answer["entity"] for answer in answers] == [f"LABEL_{label}" for label in labels]
            assert_near(torch.tensor([float(answer["score"]) for answer in answers]), scores)


@torch.no_grad()
@both_modes
def test_feature_extraction_pipeline(mode):
    model, tokenizer = make_model(YosoModel, **mode), make_tokenizer()
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer, return_tensors=True)
    texts = make_texts()
    for text, batched in zip(texts, pipe(texts, batch_size=len(texts)), strict=True):
        expected = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        assert_near(pipe(text), expected)
        # this pipeline leaves the rows of the padding in
        assert_near(batched[:, : expected.shape[1]], expected)


def test_pipeline_refuses_what_is_too_long_and_truncates_on_demand():
    model, tokenizer = make_model(YosoForSequenceClassification), make_tokenizer()
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    words = ("w1 w2 " * MAX_LENGTH).split()
    with pytest.raises(ValueError, match=f"at most max_position_embeddings={MAX_LENGTH} tokens, got {len(words) + 2}"):
        pipe(" ".join(words))
    (truncated,), (expected,) = pipe(" ".join(words), truncation=True), pipe(" ".join(words[: MAX_LENGTH - 2]))
    assert truncated["score"] == pytest.approx(expected["score"], abs=1e-6)


def test_fill_mask_pipeline_refuses_what_is_too_long_and_truncates_on_demand():
    pipe = transformers.pipeline("fill-mask", model=make_model(YosoForMaskedLM), tokenizer=make_tokenizer())
    words = ("<mask> " + "w1 w2 " * MAX_LENGTH).split()
    with pytest.raises(ValueError, match=f"at most max_position_embeddings={MAX_LENGTH} tokens, got {len(words) + 2}"):
        pipe(" ".join(words))
    truncated = pipe(" ".join(words), tokenizer_kwargs={"truncation": True})
    expected = pipe(" ".join(words[: MAX_LENGTH - 2]))
    assert [answer["score"] for answer in truncated] == pytest.approx([answer["score"] for answer in expected])


def test_token_classification_pipeline_cuts_what_is_too_long_unless_it_has_a_stride():
    model, tokenizer = make_model(YosoForTokenClassification), make_tokenizer()
    text = "w1 w2 " * MAX_LENGTH
    pipe = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer)
    assert len(pipe(text)) == MAX_LENGTH - 2
    pieces = pipe(text, stride=128, aggregation_strategy="simple")
    assert pieces[-1]["end"] == len(text.rstrip())


def test_question_answering_pipeline_is_gone_from_transformers():
    model = make_model(YosoForQuestionAnswering)
    with pytest.raises(KeyError, match="question-answering"):
        transformers.pipeline("question-answering", model=model, tokenizer=make_tokenizer())


# sentence-transformers


@torch.no_grad()
@both_modes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers(mode, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model, tokenizer = make_model(YosoModel, **mode), make_tokenizer()
    model.save_pretrained(tmp_path / "yoso")
    tokenizer.save_pretrained(tmp_path / "yoso")
    encoder = sentence_transformers.SentenceTransformer(str(tmp_path / "yoso"), device="cpu")
    assert type(encoder[0].auto_model) is YosoModel
    assert encoder.max_seq_length == MAX_LENGTH
    texts = make_texts()
    expected = torch.cat([model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts])
    assert_near(encoder.encode(texts, batch_size=len(texts), convert_to_tensor=True), expected)
    assert_near(encoder.encode(texts, batch_size=1, convert_to_tensor=True), expected)
    encoder.save(str(tmp_path / "saved"))
    loaded = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert type(loaded[0].auto_model) is YosoModel
    assert_near(loaded.encode(texts, convert_to_tensor=True), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sentence_transformers_with_another_encoder(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    # weights far from uniform
    config = transformers.BertConfig(**sizes, intermediate_size=37, pad_token_id=1, initializer_range=0.5)
    tokenizer = make_tokenizer()
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")

    def load(**model_kwargs):
        return sentence_transformers.SentenceTransformer(
            str(tmp_path / "bert"), device="cpu", model_kwargs=model_kwargs
        )

    encoder = load(attn_implementation="yoso")
    # exact at these lengths
    texts = [" ".join(WORDS[:length]) for length in (3, 60)]
    softmax, close = (x.encode(texts, convert_to_tensor=True) for x in (load(), encoder))
    model = encoder[0].auto_model
    model.config.yoso_similarity = "cosine"
    expected = torch.cat([model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in texts])
    assert_near(encoder.encode(texts, convert_to_tensor=True), expected)
    assert relative_error(close, softmax) < 0.1 < relative_error(expected, softmax)


# accelerate and FSDP

DEVICE_MAPS = {
    "auto": "auto",
    "cpu": "cpu",
    "one layer": {
        "yoso.embeddings": "cpu",
        "yoso.encoder.layer.0": "disk",
        "yoso.encoder.layer.1": "cpu",
        "cls": "cpu",
    },
    "everything": {"": "disk"},
}


@torch.no_grad()
@all_modes
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("device_map", DEVICE_MAPS.values(), ids=DEVICE_MAPS)
def test_device_map(mode, tied, device_map, tmp_path):
    # before, accelerate itself refuses to put all of a model on the disk
    pytest.importorskip("accelerate", minversion="1.15" if device_map == {"": "disk"} else None)
    model = make_model(YosoForMaskedLM, conv_window=3, tie_word_embeddings=tied, **mode)
    model.save_pretrained(tmp_path / "model")
    inputs, real = make_batch()
    expected = model(**inputs).logits[real]
    offload = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    loaded = YosoForMaskedLM.from_pretrained(tmp_path / "model", **offload)
    offloaded = isinstance(device_map, dict)
    assert offloaded == any(parameter.is_meta for parameter in loaded.parameters())
    assert_near(loaded(**inputs).logits[real], expected)
    loaded.save_pretrained(tmp_path / "again")
    assert_near(YosoForMaskedLM.from_pretrained(tmp_path / "again")(**inputs).logits[real], expected)


def test_automatic_device_map_keeps_layers_whole():
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = YosoModel(make_config(num_hidden_layers=4, use_expectation=True))
    layer = sum(parameter.nbytes for parameter in model.encoder.layer[0].parameters())
    embeddings = sum(parameter.nbytes for parameter in model.embeddings.parameters())
    budget = {"cpu": embeddings + int(2.5 * layer), "disk": 2**30}
    # transformers has a set, which accelerate takes from 1.14 on
    whole = list(model._no_split_modules)
    device_map = accelerate.infer_auto_device_map(model, budget, no_split_module_classes=whole)
    assert set(device_map.values()) == {"cpu", "disk"}
    assert all(re.fullmatch(r"embeddings.*|encoder\.layer\.\d", name) for name in device_map), device_map


def test_embedding_tables_may_be_on_different_devices():
    embeddings = YosoEmbeddings(make_config())
    embeddings.LayerNorm.to("meta")
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert embeddings(torch.randn(2, 5, 32, device="meta"), ids, ids).is_meta


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def assert_same_loss_after_a_step(model, reference):
    inputs, _ = make_batch()
    labels = inputs["input_ids"] % reference.config.num_labels
    losses = []
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss = each(**inputs, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), each(**inputs, labels=labels).loss.item()))
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][1] < losses[0][0] - 1e-3


@all_modes
@pytest.mark.parametrize("model_class", [YosoForMaskedLM, YosoForTokenClassification])
@pytest.mark.filterwarnings("ignore")
def test_fsdp_by_the_policy_of_accelerate(mode, model_class, one_process):  # noqa: ARG001
    accelerate = pytest.importorskip("accelerate")
    model = make_model(model_class, **mode)
    reference = copy.deepcopy(model)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1, auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel
    sharded = fsdp(
        model, auto_wrap_policy=plugin.auto_wrap_policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    units = [module.module for module in sharded.modules() if isinstance(module, fsdp)]
    assert [type(unit) for unit in units] == [model_class, YosoLayer, YosoLayer]
    assert_same_loss_after_a_step(sharded, reference)


def shard_by_layer(model):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            torch.distributed.fsdp.fully_shard(module, mesh=mesh)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


@all_modes
@pytest.mark.parametrize("model_class", [YosoForMaskedLM, YosoForTokenClassification])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fully_shard(mode, model_class, one_process):  # noqa: ARG001
    model = make_model(model_class, **mode)
    reference = copy.deepcopy(model)
    assert_same_loss_after_a_step(shard_by_layer(model), reference)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_a_sharded_model_is_saved_with_its_code(one_process, tmp_path):  # noqa: ARG001
    model = make_model(YosoForTokenClassification)
    model.save_pretrained(tmp_path / "whole")
    sharded = shard_by_layer(model)
    kind = type(sharded)
    assert kind is not YosoForTokenClassification
    sharded.save_pretrained(tmp_path / "sharded", state_dict=whole_weights(sharded))
    assert type(sharded) is kind
    whole, files = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "sharded")
    )
    assert files == whole


def wrap_by_layer(model):
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={YosoLayer})
    fsdp = torch.distributed.fsdp.FullyShardedDataParallel
    return fsdp(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def whole_weights(model):
    """All weights of a model of which this process may have a part, by name."""
    if isinstance(model, torch.distributed.fsdp.FullyShardedDataParallel):
        with model.summon_full_params(model):
            return {name.replace("_fsdp_wrapped_module.", ""): weight for name, weight in model.state_dict().items()}
    model = getattr(model, "module", model)
    return {
        name: weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for name, weight in model.state_dict().items()
    }


PARALLEL = {"DDP": torch.nn.parallel.DistributedDataParallel, "FSDP": wrap_by_layer, "fully_shard": shard_by_layer}


def run_in_a_group(rank, store, parallel):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train_one_half(rank, parallel)
    # when no model refers to the group any more
    end_processes()


def train_one_half(rank, parallel):
    """Each of two processes trains on one of two sequences; both have what one process learns of both."""
    modes = [{"use_expectation": False}, {"use_expectation": True}, {"use_expectation": True, "checkpointing": True}]
    for model_class, mode in itertools.product((YosoForMaskedLM, YosoForTokenClassification), modes):
        torch.manual_seed(0)
        reference = make_model(model_class, use_expectation=mode["use_expectation"])
        model = copy.deepcopy(reference)
        if "checkpointing" in mode:
            model.gradient_checkpointing_enable()
            # for layers in eval mode it has no effect
            model.train()
        model = PARALLEL[parallel](model)
        inputs, _ = make_batch()
        inputs["labels"] = inputs["input_ids"] % reference.config.num_labels
        halves = [{name: tensor[half : half + 1] for name, tensor in inputs.items()} for half in range(2)]
        for _ in range(2):
            for each, batches in ((model, [halves[rank]]), (reference, halves)):
                (sum(each(**batch).loss for batch in batches) / len(batches)).backward()
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
        weights = whole_weights(model)
        for name, expected in reference.state_dict().items():
            assert_near(weights[name], expected, atol=1e-6)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes(parallel, tmp_path):
    torch.multiprocessing.spawn(run_in_a_group, (tmp_path / "store", parallel), nprocs=2)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fsdp2_of_accelerate_is_refused_for_the_language_model(one_process):  # noqa: ARG001
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        pytest.skip("refused by torch 2.13 and newer")
    model = make_model(YosoForMaskedLM)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    # the groups that accelerate makes beside the layers
    torch.distributed.fsdp.fully_shard([model.get_input_embeddings(), model.get_output_embeddings()], mesh=mesh)
    with pytest.raises(ValueError, match="shared with a parameter already managed by another FSDP group"):
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        model(**make_batch()[0])


# PEFT

HEADS = {
    YosoForSequenceClassification: ("SEQ_CLS", ["classifier"]),
    YosoForTokenClassification: ("TOKEN_CLS", ["classifier"]),
    YosoForQuestionAnswering: ("QUESTION_ANS", ["qa_outputs"]),
    YosoForMultipleChoice: (None, ["pre_classifier", "classifier"]),
    YosoForMaskedLM: (None, None),
}


@all_modes
@pytest.mark.parametrize("model_class", HEADS, ids=lambda model_class: model_class.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_lora(mode, model_class, tmp_path):
    peft = pytest.importorskip("peft")
    task_type, heads = HEADS[model_class]
    model = make_model(model_class, **mode)
    model.save_pretrained(tmp_path / "base")
    before = copy.deepcopy(model.state_dict())
    # the task type names the head by itself
    modules_to_save = None if task_type else heads
    config = peft.LoraConfig(
        r=4, target_modules=["query", "value"], task_type=task_type, modules_to_save=modules_to_save
    )
    tuned = peft.get_peft_model(model, config)
    inputs, _ = make_batch()
    labels = {
        YosoForSequenceClassification: {"labels": torch.tensor([0, 2])},
        YosoForTokenClassification: {"labels": inputs["input_ids"] % 3},
        YosoForQuestionAnswering: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
        YosoForMultipleChoice: {"labels": torch.tensor([1])},
        YosoForMaskedLM: {"labels": inputs["input_ids"]},
    }[model_class]
    if model_class is YosoForMultipleChoice:
        inputs = {name: tensor[None] for name, tensor in inputs.items()}
    trained = {name: parameter for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in trained if "lora_" in name} == {"default"}
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    for head in heads or []:
        assert any(f".{head}.modules_to_save" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = tuned(**inputs, **labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    for name, parameter in trained.items():
        assert parameter.grad.any(), name
    tuned.eval()
    with torch.no_grad():
        expected = tuned(**inputs)[0]
        tuned.save_pretrained(tmp_path / "adapter")
        base = model_class.from_pretrained(tmp_path / "base")
        for name, tensor in base.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert_near(loaded(**inputs)[0], expected)
        merged = loaded.merge_and_unload()
        assert type(merged) is model_class
        # merging rounds the weights, which may change a hash code, so this takes the exact kernel's bound
        assert_near(merged(**inputs)[0], expected, atol=1e-3)


VIRTUAL_TOKENS = 4
# not token classification: PEFT gives virtual tokens no labels
PROMPTED = {"SEQ_CLS": YosoForSequenceClassification, "QUESTION_ANS": YosoForQuestionAnswering}


@all_modes
@pytest.mark.parametrize("task_type", PROMPTED)
@pytest.mark.parametrize("config_class", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens(mode, task_type, config_class, tmp_path):
    peft = pytest.importorskip("peft")
    model_class = PROMPTED[task_type]
    model = make_model(model_class, **mode)
    model.save_pretrained(tmp_path / "base")
    config = getattr(peft, config_class)(num_virtual_tokens=VIRTUAL_TOKENS, task_type=task_type)
    tuned = peft.get_peft_model(model, config).eval()
    tuned.save_pretrained(tmp_path / "adapter")
    inputs, mask = make_batch()
    with torch.no_grad():
        outputs = tuned(**inputs)[0]
        base = model_class.from_pretrained(tmp_path / "base")
        words = base.get_input_embeddings()(inputs["input_ids"])
        prompted = torch.cat([tuned.get_prompt(batch_size=2), words], dim=1)
        prompted_mask = torch.cat([mask.new_ones(2, VIRTUAL_TOKENS), mask], dim=1)
        assert_near(outputs, base(inputs_embeds=prompted, attention_mask=prompted_mask)[0])
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert_near(loaded(**inputs)[0], outputs)
    labels = {
        "SEQ_CLS": {"labels": torch.tensor([0, 2])},
        "QUESTION_ANS": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])},
    }[task_type]
    tuned(**inputs, **labels).loss.backward()
    trained = {name: parameter for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    assert any("prompt_encoder" in name for name in trained)
    for name, parameter in trained.items():
        assert parameter.grad.any(), name


def test_prefix_tuning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(num_virtual_tokens=VIRTUAL_TOKENS, task_type="SEQ_CLS")
    tuned = peft.get_peft_model(make_model(YosoForSequenceClassification), config)
    with pytest.raises(ValueError, match="does not support past key values"):
        tuned(**make_batch()[0])


# torch.func


@torch.no_grad()
@all_modes
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_models_and_texts(mode):
    models = [make_model(YosoModel, **mode) for _ in range(3)]
    inputs, mask = make_batch()
    states = torch.func.stack_module_state(models)

    def encode(state, buffers, ids, mask):
        inputs = {"input_ids": ids[None], "attention_mask": mask[None]}
        return torch.func.functional_call(models[0], (state, buffers), kwargs=inputs).last_hidden_state[0]

    of_texts = torch.vmap(encode, in_dims=(None, None, 0, 0))
    outputs = torch.vmap(of_texts, in_dims=(0, 0, None, None))(*states, *inputs.values())
    for output, model in zip(outputs, models, strict=True):
        assert_near(output[mask], model(**inputs).last_hidden_state[mask])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_losses_of_a_language_model():
    model = make_model(YosoForMaskedLM)
    ids = torch.randint(5, VOCAB_SIZE, (3, 2, 10))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.5, -100)
    losses = torch.vmap(lambda ids, labels: model(ids, labels=labels).loss)(ids, labels)
    expected = torch.stack([model(x, labels=y).loss for x, y in zip(ids, labels, strict=True)])
    assert_near(losses, expected)
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(each.square().sum(), parameters) for each in (losses, expected))
    for actual, wanted in zip(*gradients, strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("use_expectation", [False, True, "auto"])
def test_derivatives_of_torch_func_are_refused(use_expectation):
    model = make_model(YosoModel, use_expectation=use_expectation)
    words = torch.randn(1, 20, 32)

    def encode(words):
        return model(inputs_embeds=words).last_hidden_state.sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(encode)(words)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(encode, (words,), (words,))


# torch.compile


@torch.no_grad()
@pytest.mark.parametrize(
    ("use_expectation", "graphs_in_all"), [(False, 1), (True, 1), ("auto", 2)], ids=["sampled", "expectation", "auto"]
)
def test_compiled_once_for_all_lengths(use_expectation, graphs_in_all):
    model = make_model(YosoForMaskedLM, num_hidden_layers=1, use_expectation=use_expectation)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for length in (40, 41, 88, 89, 513):
        inputs, real = make_batch(length, length // 2)
        assert_near(compiled(**inputs).logits[real], model(**inputs).logits[real])
    assert counters["stats"]["unique_graphs"] == graphs_in_all


@pytest.mark.slow
@torch.no_grad()
@both_modes
def test_inductor(mode):
    model = make_model(YosoForMaskedLM, **mode)
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=True)
    for length in (40, 77, 300):
        inputs, real = make_batch(length, length // 2)
        assert_near(compiled(**inputs).logits[real], model(**inputs).logits[real], atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("tool", ["compile", "lora"])
def test_activations_computed_again(tool, gradient_checkpointing, monkeypatch):
    monkeypatch.setattr(modeling_yoso, "RECOMPUTED_TOKENS", 1)
    model = make_model(YosoForMaskedLM, hidden_dropout_prob=0.0, use_expectation=True).train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, _ = make_batch()
    if tool == "compile":
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, backend="aot_eager")
    else:
        peft = pytest.importorskip("peft")
        # what is dropped before these projections has to be the same in the backward
        config = peft.LoraConfig(r=4, target_modules=r".*\.output\.dense", lora_dropout=0.5, init_lora_weights=False)
        model = peft.get_peft_model(model, config)

    def gradients():
        torch.manual_seed(0)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        return [x.grad for x in model.parameters() if x.grad is not None]

    again = gradients()
    torch.compiler.reset()
    monkeypatch.setattr(modeling_yoso, "RECOMPUTED_TOKENS", 10**9)
    for grad, expected in zip(again, gradients(), strict=True):
        assert_near(grad, expected)


# torch.export and ONNX


SAMPLED_SOFTMAX = {"use_expectation": False, "similarity": "softmax", "normalization": "sum"}


def dynamic_shapes(inputs, min_length=None):
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=min_length, max=MAX_LENGTH)}
    return dict.fromkeys(inputs, sizes)


@torch.no_grad()
@both_modes
@pytest.mark.parametrize("model_class", [YosoForMaskedLM, YosoForSequenceClassification, YosoForQuestionAnswering])
def test_export(mode, model_class, tmp_path):
    model = make_model(model_class, num_hidden_layers=1, conv_window=3, **mode)
    inputs, _ = make_batch()
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes(inputs))
    torch.export.save(program, tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    for length in (7, 300):
        inputs, _ = make_batch(length, length // 2)
        inputs = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in inputs.items()}
        assert_near(exported(**inputs)[0], model(**inputs)[0])


@torch.no_grad()
def test_export_of_samples_of_softmax(monkeypatch):
    # the codes of longer texts, whatever the length
    monkeypatch.setattr(attention_module, "FEWEST_BITS", 16)
    model = make_model(YosoModel, num_hidden_layers=1, hash_code_len=16, **SAMPLED_SOFTMAX)
    inputs, _ = make_batch(100, 50)
    # as many as there are keys that are not sampled
    exported = torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes(inputs, 64)).module()
    for length in (64, 300):
        inputs, mask = make_batch(length, length // 2)
        assert_near(exported(**inputs)[0][mask], model(**inputs)[0][mask])


def test_export_refuses_a_floating_point_mask():
    model = make_model(YosoModel, num_hidden_layers=1)
    inputs, _ = make_batch()
    inputs["attention_mask"] = inputs["attention_mask"].float()
    message = "attention_mask must be bool or int64 in an export, .* got torch.float32"
    with pytest.raises(ValueError, match=message):
        torch.export.export(model, (), inputs)
    with pytest.raises(RuntimeError, match=message):
        torch.export.export(model, (), inputs, strict=True)


def test_export_of_auto_needs_a_fixed_length():
    model = make_model(YosoModel, num_hidden_layers=1, use_expectation="auto")
    inputs, _ = make_batch()
    exported = torch.export.export(model, (), inputs).module()
    assert_near(exported(**inputs)[0], model(**inputs)[0])
    message = (
        r'expectation="auto" \(use_expectation of a model, yoso_use_expectation of an encoder\) cannot be exported '
        "with a dynamic length or strict=True: choose True or False"
    )
    with pytest.raises(ValueError, match=message):
        torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes(inputs))


@pytest.mark.filterwarnings("ignore")
def test_onnx_refuses_auto_with_a_dynamic_length(tmp_path):
    pytest.importorskip("onnxscript")
    model = make_model(YosoModel, num_hidden_layers=1, use_expectation="auto")
    inputs, _ = make_batch()
    options = {"kwargs": inputs, "dynamic_shapes": dynamic_shapes(inputs), "dynamo": True, "verbose": False}
    message = "cannot be exported with a dynamic length or strict=True: choose"
    with pytest.raises(torch.onnx.OnnxExporterError, match=rf"{message} True or False, or"):
        torch.onnx.export(model, (), tmp_path / "x", **options)
    # whose samples are refused as well
    softmax = make_model(YosoModel, num_hidden_layers=1, **SAMPLED_SOFTMAX | {"use_expectation": "auto"})
    with pytest.raises(torch.onnx.OnnxExporterError, match=rf"{message} True or False \(True for ONNX, .*\), or"):
        torch.onnx.export(softmax, (), tmp_path / "x", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "operator"),
    [
        ({"use_expectation": False, "local_window": 2}, "local_attention"),
        (SAMPLED_SOFTMAX, "sampled_remainder"),
    ],
)
def test_onnx_refuses_what_has_no_graph(settings, operator, tmp_path):
    pytest.importorskip("onnxscript")
    model = make_model(YosoModel, num_hidden_layers=1, **settings)
    inputs, _ = make_batch()
    with pytest.raises(torch.onnx.OnnxExporterError, match=rf"yoso_hf\.{operator}"):
        torch.onnx.export(model, (), tmp_path / "x", kwargs=inputs, dynamo=True, verbose=False)


@pytest.mark.filterwarnings("ignore")
def test_onnx_refuses_a_program_exported_before(tmp_path):
    pytest.importorskip("onnxscript")
    inputs, _ = make_batch()
    program = torch.export.export(make_model(YosoModel, num_hidden_layers=1), (), inputs)
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"yoso_hf\.hash_hadamard"):
        torch.onnx.export(program, f=tmp_path / "x", dynamo=True, verbose=False)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_jit_trace_takes_the_exact_kernel_only():
    inputs, mask = make_batch()
    arguments = inputs["input_ids"], inputs["attention_mask"]
    exact = make_model(YosoModel, use_expectation=True, return_dict=False)
    (output,) = torch.jit.trace(exact, tuple(x[:, :20] for x in arguments))(*arguments)
    assert_near(output[mask], exact(*arguments)[0][mask])
    with pytest.raises(
        ValueError, match="num_heads must be an integer, .*: torch.jit.trace takes the exact kernel only"
    ):
        torch.jit.trace(make_model(YosoModel, use_expectation=False, return_dict=False), arguments)


ONNX = {
    "expectation": (YosoForMaskedLM, {"use_expectation": True, "conv_window": 3}),
    "softmax": (YosoForMaskedLM, {**SAMPLED_SOFTMAX, "use_expectation": True}),
    "hadamard": (YosoForMaskedLM, {"use_fast_hash": True}),
    "gaussian": (YosoForMaskedLM, {"use_fast_hash": False, "conv_window": 3}),
    "classification": (YosoForSequenceClassification, {"use_expectation": True}),
}
SLOW_ONNX = ("gaussian", "classification")


@torch.no_grad()
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.slow if x in SLOW_ONNX else ()) for x in ONNX])
@pytest.mark.filterwarnings("ignore")
def test_onnx(case, tmp_path):
    model_class, settings = ONNX[case]
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make_model(model_class, num_hidden_layers=1, **settings)
    inputs, _ = make_batch()
    file = tmp_path / "model.onnx"
    shapes = dynamic_shapes(inputs)
    torch.onnx.export(model, (), file, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for length in (7, 600):
        inputs, real = make_batch(length, length // 2)
        inputs = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in inputs.items()}
        expected = model(**inputs)[0]
        actual = torch.tensor(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])
        if expected.dim() == 3:
            real = inputs["attention_mask"].bool()
            actual, expected = actual[real], expected[real]
        assert_near(actual, expected, atol=1e-4)


@pytest.mark.parametrize("hash_code_len", [3, 16])
@pytest.mark.parametrize("kind", ["hadamard", "gaussian"])
def test_graphs_of_the_hashes_equal_the_operators(kind, hash_code_len):
    # 40 hash functions of 32-wide transforms take two of them a bit
    x, mask = torch.randn(2, 3, 11, 20, dtype=torch.float64), torch.arange(11) < torch.tensor([[11], [6]])
    functions = HashFunctions.sample(3, 20, 40, hash_code_len, kind=kind)
    graph, operator = (getattr(module, f"hash_{kind}{suffix}") for module, suffix in ((graphs, "_graph"), (ops, "")))
    for arguments in ((mask, 40, hash_code_len), (None, 40, hash_code_len)):
        codes = operator(x, functions.parameters, *arguments)
        assert torch.equal(graph(x, functions.parameters, *arguments), codes.int())


@pytest.mark.parametrize("unit", [True, False])
def test_graphs_of_the_attentions_equal_the_operators(unit):
    query, key, value = (torch.randn(2, 3, length, 20, dtype=torch.float64) for length in (9, 11, 11))
    mask = torch.arange(11) < torch.tensor([[11], [6]])
    functions = HashFunctions.sample(3, 20, 40, 3)
    sampled = (query, key, value, functions.codes(query), functions.codes(key, mask), 3, False, unit)
    assert_near(graphs.sampled_attention_graph(*sampled)[0], ops.sampled_attention(*sampled)[0], atol=1e-9)
    exact = (query, key, value, 3, False, unit)
    assert_near(graphs.expectation_attention_graph(*exact)[0], ops.expectation_attention(*exact)[0], atol=1e-9)


# dtypes

CASTS = {torch.float16: 0.01, torch.bfloat16: 0.03, torch.float64: 1e-5}


@torch.no_grad()
@all_modes
@pytest.mark.parametrize(("dtype", "bound"), CASTS.items(), ids=str)
def test_cast_model_is_near_float32(mode, dtype, bound):
    model = make_model(YosoForMaskedLM, num_hash=32, **mode)
    inputs, real = make_batch(300, 120)
    expected = model(**inputs).logits[real]
    cast = copy.deepcopy(model).to(dtype)
    logits = cast(**inputs).logits
    assert logits.dtype == dtype
    assert relative_error(logits[real], expected) < bound
    # padding changes nothing but the place of the rows in a product
    alone = cast(inputs["input_ids"][1:, :120]).logits[0]
    assert relative_error(logits[1, :120], alone) < bound


@torch.no_grad()
@all_modes
def test_autocast_respects_padding(mode):
    model = make_model(YosoForMaskedLM, num_hash=32, **mode)
    inputs, real = make_batch(300, 120)
    expected = model(**inputs).logits[real]
    with torch.autocast("cpu", torch.bfloat16):
        logits, alone = model(**inputs).logits, model(inputs["input_ids"][1:, :120]).logits[0]
    assert relative_error(logits[real], expected) < 0.03
    assert relative_error(logits[1, :120], alone) < 0.03


def hash_parameters(model):
    return [module.hash_parameters for module in model.modules() if hasattr(module, "hash_parameters")]


@pytest.mark.parametrize("use_fast_hash", [True, False])
@pytest.mark.parametrize("change", ["half", "bfloat16", "double", "to_empty"])
def test_casts_and_moves_keep_the_hash_functions(change, use_fast_hash):
    model = make_model(YosoModel, use_fast_hash=use_fast_hash)
    expected = copy.deepcopy(hash_parameters(model))
    changed = model.to("meta").to_empty(device="cpu") if change == "to_empty" else getattr(model, change)()
    assert len(expected) == 2
    for actual, before in zip(hash_parameters(changed), expected, strict=True):
        assert torch.equal(actual, before)


@torch.no_grad()
def test_rounded_buffers_keep_the_hash_functions():
    """As FSDP rounds them, whose mixed precision has a dtype for buffers."""
    model = make_model(YosoModel)
    inputs, _ = make_batch()
    expected = model(**inputs).last_hidden_state
    for parameters in hash_parameters(model):
        parameters.data = parameters.bfloat16()
    assert torch.equal(model(**inputs).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, SAMPLED_SOFTMAX, {**SAMPLED_SOFTMAX, "use_expectation": True}])
def test_meta_device(settings):
    model = make_model(YosoForMaskedLM, **settings)
    inputs, _ = make_batch()
    expected = model(**inputs).logits
    empty = copy.deepcopy(model).to("meta")
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert empty(**{name: tensor.to("meta") for name, tensor in inputs.items()}).logits.shape == expected.shape
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert_near(empty(**inputs).logits, expected)


def test_safetensors_hold_tied_weights_once(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    model = make_model(YosoForMaskedLM)
    model.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {"yoso.embeddings.word_embeddings.weight", "cls.predictions.bias"} <= names
    assert not any("decoder" in name or "hash" in name for name in names)
    loaded = YosoForMaskedLM.from_pretrained(tmp_path)
    assert loaded.cls.predictions.decoder.weight is loaded.yoso.embeddings.word_embeddings.weight
    assert loaded.cls.predictions.decoder.bias is loaded.cls.predictions.bias


# quantisation


def torchao_config():
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


def quanto_config():
    pytest.importorskip("optimum.quanto")
    return transformers.QuantoConfig(weights="int8")


def bitsandbytes_config():
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


@torch.no_grad()
@all_modes
@pytest.mark.parametrize("make_quantization", [torchao_config, quanto_config, bitsandbytes_config])
@pytest.mark.filterwarnings("ignore")
def test_eight_bits(mode, make_quantization, tmp_path):
    pytest.importorskip("accelerate")
    quantization = make_quantization()
    model = make_model(YosoForMaskedLM, num_hash=32, hidden_size=64, intermediate_size=128, **mode)
    model.save_pretrained(tmp_path)
    inputs, real = make_batch(300, 120)
    expected = model(**inputs).logits[real]
    quantized = YosoForMaskedLM.from_pretrained(tmp_path, quantization_config=quantization, device_map="cpu")
    query = quantized.yoso.encoder.layer[0].attention.self.query
    assert type(query.weight) is not torch.nn.Parameter
    logits = quantized(**inputs).logits
    assert 1e-4 < relative_error(logits[real], expected) < 0.1
    assert relative_error(quantized(inputs["input_ids"][1:, :120]).logits[0], logits[1, :120]) < 1e-3


@torch.no_grad()
@all_modes
@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantization_of_torch(mode):
    model = make_model(YosoForMaskedLM, num_hash=32, **mode)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    inputs, _ = make_batch(300, 300)
    assert 1e-4 < relative_error(quantized(**inputs).logits, model(**inputs).logits) < 0.2


# docs/ecosystem.md


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blocks_of_the_guide_run(tmp_path, monkeypatch):
    for package in ("accelerate", "sentence_transformers", "peft", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["the cat sat on the mat " * 20], 300)
    tokenizer.model_max_length = MAX_LENGTH
    tokenizer.save_pretrained("runs/quickstart/model")
    make_model(YosoForMaskedLM, vocab_size=len(tokenizer)).save_pretrained("runs/quickstart/model")
    blocks = python_blocks(GUIDE)
    assert len(blocks) >= 8
    for block in blocks:
        if "torchao" in block and importlib.util.find_spec("torchao") is None:
            continue
        exec(compile(block, GUIDE.name, "exec"), {"__name__": "guide"})
