"""Sharing through the hub, with its real client and a server on loopback, in processes of their own.

One process with the package pushes, one without it loads; the tests look at what both left behind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doc_blocks import python_blocks
from hub_server import HubServer
from huggingface_hub import ModelCard

import yoso_hf
from yoso_hf.modeling_yoso import AUTO_MAP

ROOT = Path(__file__).parent.parent
CODE = {
    "attention.py",
    "configuration_yoso.py",
    "graphs.py",
    "hashing.py",
    "modeling_yoso.py",
    "ops.py",
    "reference.py",
}
MODEL_FILES = {"README.md", "config.json", "model.safetensors"} | CODE

# what both processes know: the repositories, and how a model is run
PRELUDE = """
import json, sys
from pathlib import Path
import torch
import transformers

HEADS = (
    "AutoModel", "AutoModelForMaskedLM", "AutoModelForMultipleChoice", "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification",
)
MODES = {
    "gaussian": {"use_fast_hash": False},
    "auto-exact": {"use_expectation": "auto", "num_hash": 8},
    "auto-sampled": {"use_expectation": "auto", "num_hash": 1},
    "exact": {"use_expectation": True},
    "unseeded": {"hash_seed": None},
    "by-head": {"hash_code_len": [[3, 4, 5, 6], [5, 5, 2, 7]], "normalization": "sum"},
    "softmax": {"similarity": "softmax", "normalization": "sum"},
    "half": {"dtype": "bfloat16"},
}
REPOS = {name: (name, {"conv_window": 3}) for name in HEADS} | {
    name: ("AutoModelForMaskedLM", changes) for name, changes in MODES.items()
}
folder = Path(sys.argv[1])
torch.set_grad_enabled(False)


def run(model, masked=True):
    model.eval()
    ids = torch.arange(3, 43).view(2, 20)
    mask = torch.ones_like(ids)
    if masked:
        mask[1, 12:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: value[None] for name, value in inputs.items()}
    outputs = model(**inputs)
    # values at padding mean nothing, and of question answering are the lowest number
    return outputs[0][mask.bool()] if outputs[0].shape[:2] == mask.shape else outputs[0]
"""

PUSH = """
from datasets import Dataset
from transformers import TrainingArguments
import yoso_hf
from yoso_hf.data import train_tokenizer
from yoso_hf.model_card import CardTrainer

torch.manual_seed(0)
tokenizer = train_tokenizer(["a small text for a small tokenizer"] * 9, 300)
sizes = dict(
    vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
    max_position_embeddings=48, hash_code_len=5, num_hash=8, num_labels=3, initializer_range=0.3,
)
expected = {}
for repo, (auto_class, changes) in REPOS.items():
    changes = {"use_expectation": False, **changes}
    dtype = changes.pop("dtype", "float32")
    config = yoso_hf.YosoConfig(**{**sizes, **changes})
    model = getattr(transformers, auto_class).from_config(config, dtype=getattr(torch, dtype)).eval()
    model.push_to_hub(f"your-name/{repo}")
    expected[repo] = run(model)
    for trust_remote_code in (True, False, None):
        loaded = getattr(transformers, auto_class).from_pretrained(
            f"your-name/{repo}", trust_remote_code=trust_remote_code
        )
        assert type(loaded) is type(model), type(loaded)
torch.save(expected, folder / "expected.pt")
yoso_hf.YosoConfig(**sizes).push_to_hub("your-name/config")
(folder / "tokens.json").write_text(json.dumps(tokenizer("a small text")["input_ids"]))

# the commands of README.md, and again
for _ in range(2):
    exec(Path(sys.argv[2]).read_text(), {"model": model, "tokenizer": tokenizer})

# checkpoints loaded from the hub and saved without the hub's help
loaded = transformers.AutoModelForMaskedLM.from_pretrained("your-name/gaussian")
loaded.save_pretrained(folder / "saved again")


class Mine(yoso_hf.YosoForMaskedLM):
    pass


Mine.from_pretrained("your-name/gaussian").save_pretrained(folder / "subclass")

# a run of Trainer: what is pushed at a checkpoint, and what at the end
ids = [[0] + [5 + i % 7] * 6 + [2] for i in range(8)]
data = Dataset.from_dict({"input_ids": ids, "labels": [i % 3 for i in range(8)]})
# transformers refuses the configuration: nothing of it loads without this package or trust
model = yoso_hf.YosoForSequenceClassification(yoso_hf.YosoConfig(**sizes, use_expectation="auto"))
arguments = TrainingArguments(
    folder / "run", push_to_hub=True, hub_model_id="your-name/run", max_steps=2, save_steps=1, logging_steps=1,
    hub_always_push=True, eval_strategy="steps", eval_steps=1, use_cpu=True, report_to="none",
)
trainer = CardTrainer(
    model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
    compute_metrics=lambda outcome: {"accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean())},
    datasets=["nyu-mll/glue"],
    evaluated_on={"task_type": "text-classification", "dataset_type": "nyu-mll/glue", "dataset_name": "GLUE"},
)
with torch.enable_grad():
    trainer.train()
trainer.push_to_hub()
(folder / "metrics.json").write_text(json.dumps(trainer.state.log_history))
torch.save(run(model), folder / "run.pt")
"""

# without the package, as on a machine that does not have it
BLOCK = """
import sys
sys.modules["yoso_hf"] = None
"""

LOAD = """
def load(auto_class, name, **arguments):
    model, report = getattr(transformers, auto_class).from_pretrained(
        name, output_loading_info=True, **{"trust_remote_code": True, **arguments}
    )
    return model.eval(), report


found, outputs = {}, {}
for repo, (auto_class, changes) in REPOS.items():
    model, report = load(auto_class, f"your-name/{repo}")
    outputs[repo] = run(model)
    found[repo] = [type(model).__module__, sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])]
    if repo == "unseeded":
        found["unseeded differs"] = not torch.equal(run(model), run(model))
    if repo == "gaussian":
        # the code goes on with a model that came with it
        model.save_pretrained(folder / "saved without")
outputs["saved again"] = run(load("AutoModelForMaskedLM", folder / "saved again")[0])
outputs["saved without"] = run(load("AutoModelForMaskedLM", folder / "saved without")[0])
outputs["run"] = run(load("AutoModelForSequenceClassification", "your-name/run")[0])
found["heads"] = {head: type(load(head, "your-name/gaussian")[0]).__module__ for head in HEADS}
tokenizer = transformers.AutoTokenizer.from_pretrained("your-name/your-yoso")
found["tokens"] = tokenizer("a small text")["input_ids"]
fill_mask = transformers.pipeline("fill-mask", model="your-name/your-yoso", trust_remote_code=True)
found["pipeline"] = [type(fill_mask.model).__module__, len(fill_mask("a small<mask>"))]
config = transformers.AutoConfig.from_pretrained("your-name/config", trust_remote_code=True)
found["config"] = [type(config).__module__, config.vocab_size]
found["compiled"] = [name for name in sys.modules if name.endswith("._C") and "yoso" in name]

for mode, trust_remote_code in (
    ("exact", None), ("exact", False), ("gaussian", None), ("auto-exact", None), ("by-head", None),
):
    try:
        model, _ = load("AutoModelForMaskedLM", f"your-name/{mode}", trust_remote_code=trust_remote_code)
        found[f"{mode} {trust_remote_code} class"] = type(model).__module__
        found[f"{mode} {trust_remote_code} ignores"] = torch.equal(
            model(torch.arange(3, 23)[None], attention_mask=torch.ones(1, 20)).logits,
            model(torch.arange(3, 23)[None], attention_mask=torch.tensor([[1] * 9 + [0] * 11])).logits,
        )
    except Exception as error:
        found[f"{mode} {trust_remote_code} error"] = f"{type(error).__name__}: {error}"
torch.save(outputs, folder / "outputs.pt")
(folder / "found.json").write_text(json.dumps(found))
"""

BOTH = """
first = sys.argv[2]
if first == "package":
    import yoso_hf
load = transformers.dynamic_module_utils.get_class_from_dynamic_module
remote_class = load("modeling_yoso.YosoForMaskedLM", "your-name/gaussian")
remote = remote_class.from_pretrained("your-name/gaussian")
assert ("yoso_hf" in sys.modules) == (first == "package"), "a checkpoint's code must not import the package"
import yoso_hf
local = transformers.AutoModelForMaskedLM.from_pretrained("your-name/gaussian", trust_remote_code=True)
assert type(local) is yoso_hf.YosoForMaskedLM and remote_class is not type(local)
remote_ops = sys.modules[remote_class.__module__.replace("modeling_yoso", "ops")]
assert remote_ops.compiled_backends() == set()
for name in yoso_hf.ops.SCHEMAS:
    assert getattr(remote_ops, name) is not getattr(yoso_hf.ops, name)
torch.save([run(remote), run(local)], folder / f"{first}.pt")
gradients = []
for model in (remote, local):
    with torch.enable_grad():
        run(model).square().mean().backward()
    gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
assert all(gradient.abs().sum() > 0 for name, gradient in gradients[0].items() if "query" in name)
torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)
"""


# version 1 of the client asks huggingface.co about a card, wherever HF_ENDPOINT points
HUB_1 = """
import huggingface_hub
if huggingface_hub.__version__.startswith("1."):
    huggingface_hub.ModelCard.validate = lambda *arguments, **named: None
"""


def run_python(code: str, *arguments: Path | str, environment: dict[str, str], folder: Path) -> None:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, **environment}
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def pushed(hub, tmp_path_factory):
    """The folder of the process that pushed."""
    folder = tmp_path_factory.mktemp("hub")
    block = next(block for block in python_blocks(ROOT / "README.md") if "push_to_hub" in block)
    (folder / "readme.py").write_text(block)
    environment = hub.environment(folder / "home of the pusher")
    run_python(PRELUDE + PUSH, folder, folder / "readme.py", environment=environment, folder=folder)
    return folder


@pytest.fixture(scope="module")
def loaded(hub, pushed):
    """What the process without the package found."""
    environment = hub.environment(pushed / "home of the loader")
    run_python(BLOCK + PRELUDE + LOAD, pushed, environment=environment, folder=pushed)
    return json.loads((pushed / "found.json").read_text()), torch.load(pushed / "outputs.pt")


@pytest.mark.usefixtures("pushed")
def test_a_pushed_model_has_weights_configuration_code_and_card(hub):
    for repo in ("AutoModel", "AutoModelForMultipleChoice", "unseeded"):
        files = hub.files(f"your-name/{repo}")
        assert files.keys() == MODEL_FILES
        for name in CODE:
            assert files[name] == (Path(yoso_hf.__file__).parent / name).read_bytes()
        assert json.loads(files["config.json"])["auto_map"] == AUTO_MAP
    guide = (ROOT / "docs" / "hub.md").read_text()
    assert {name for name in MODEL_FILES if f"`{name}`" not in guide} == set()
    # weights went the way of large files
    assert [path for method, path in hub.requests if method == "PUT" and path.startswith("/lfs/")]


def test_a_pushed_model_loads_without_the_package_with_equal_outputs(pushed, loaded):
    found, outputs = loaded
    expected = torch.load(pushed / "expected.pt")
    for repo in expected:
        module, other_keys = found[repo]
        assert module.startswith("transformers_modules.") and other_keys == [], repo
    # the paths round bfloat16 differently
    torch.testing.assert_close(outputs["half"], expected.pop("half"), rtol=0, atol=0.1)
    del expected["unseeded"]
    torch.testing.assert_close({repo: outputs[repo] for repo in expected}, expected, rtol=0, atol=1e-4)
    assert found["unseeded differs"]
    assert found["compiled"] == []


def test_every_head_of_a_checkpoint_is_its_own_code(loaded):
    """Not transformers' class, which takes a head that the checkpoint's configuration does not list."""
    found, _ = loaded
    modules = set(found["heads"].values())
    assert len(found["heads"]) == 6 and len(modules) == 1 and modules.pop().startswith("transformers_modules.")


def test_auto_map_names_the_registered_classes():
    import transformers

    for auto_class, reference in AUTO_MAP.items():
        module, name = reference.split(".")
        local = getattr(sys.modules[f"yoso_hf.{module}"], name)
        if auto_class != "AutoConfig":
            assert local._auto_class == auto_class
            assert getattr(transformers, auto_class)._model_mapping[yoso_hf.YosoConfig] is local


def test_code_goes_on_with_a_model_that_is_saved_again(pushed, loaded):
    _, outputs = loaded
    expected = torch.load(pushed / "expected.pt")["gaussian"]
    for name in ("saved again", "saved without"):
        torch.testing.assert_close(outputs[name], expected, rtol=0, atol=1e-4)
        assert {path.name for path in (pushed / name).iterdir()} == MODEL_FILES - {"README.md"}
        assert json.loads((pushed / name / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_a_pipeline_runs_on_pushed_code(loaded):
    found, _ = loaded
    module, guesses = found["pipeline"]
    assert module.startswith("transformers_modules.") and guesses == 5


def test_a_subclass_is_saved_without_code(pushed):
    files = {"config.json", "configuration_yoso.py", "model.safetensors"}
    assert {path.name for path in (pushed / "subclass").iterdir()} == files
    assert json.loads((pushed / "subclass" / "config.json").read_text())["auto_map"].keys() == {"AutoConfig"}


def test_what_transformers_own_class_does_with_a_pushed_model(loaded):
    """The card and docs/hub.md warn of this."""
    found, _ = loaded
    for trust_remote_code in (None, False):
        assert found[f"exact {trust_remote_code} class"].startswith("transformers.models.yoso")
        assert found[f"exact {trust_remote_code} ignores"] is True
    assert found["gaussian None class"].startswith("transformers.models.yoso")
    assert "AttributeError" in found["gaussian None error"]
    assert "use_expectation" in found["auto-exact None error"]
    assert "hash_code_len" in found["by-head None error"]


def test_a_pushed_configuration_and_tokenizer(hub, pushed, loaded):
    assert set(hub.files("your-name/config")) == {"README.md", "config.json", "configuration_yoso.py"}
    assert "tokenizer.json" in hub.files("your-name/your-yoso")
    found, _ = loaded
    assert found["config"][0].startswith("transformers_modules.") and found["config"][1] == 300
    assert found["tokens"] == json.loads((pushed / "tokens.json").read_text())


@pytest.mark.usefixtures("pushed")
def test_commands_of_the_readme_run_twice(hub):
    repo = "your-name/your-yoso"
    assert hub.files(repo).keys() > MODEL_FILES
    assert len(hub.commits[repo]) >= 3


@pytest.mark.parametrize("first", ["package", "checkpoint"])
def test_checkpoint_code_and_package_in_one_process(first, hub, pushed):
    """Whichever comes first, each has its own operators, and both give the same outputs."""
    environment = hub.environment(pushed / "home of both")
    run_python(PRELUDE + BOTH, pushed, first, environment=environment, folder=pushed)
    remote, local = torch.load(pushed / f"{first}.pt")
    expected = torch.load(pushed / "expected.pt")["gaussian"]
    torch.testing.assert_close(remote, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(local, expected, rtol=0, atol=1e-4)


def test_a_run_of_trainer_is_pushed_with_code_and_card(hub, pushed, loaded):
    in_progress = [files for summary, files in hub.commits["your-name/run"] if "in progress" in summary]
    assert in_progress
    for files in (*in_progress, hub.files("your-name/run")):
        assert CODE | {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    card = ModelCard(hub.files("your-name/run")["README.md"].decode())
    history = json.loads((pushed / "metrics.json").read_text())
    metrics = {result.metric_type: result.metric_value for result in card.data.eval_results}
    last = [entry for entry in history if "eval_loss" in entry][-1]
    assert metrics == {"loss": last["eval_loss"], "accuracy": last["eval_accuracy"]}
    assert card.data.datasets == ["nyu-mll/glue"] and "generated_from_trainer" in card.data.tags
    assert "| learning_rate | 5e-05 |" in card.text and "2 steps of Trainer" in card.text
    _, outputs = loaded
    torch.testing.assert_close(outputs["run"], torch.load(pushed / "run.pt"), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("pushed")
def test_code_blocks_of_the_guide_and_of_a_card_run(hub, tmp_path):
    """Those that trust the checkpoint's code without the package, the others with it."""
    guide = python_blocks(ROOT / "docs" / "hub.md")
    (tmp_path / "README.md").write_bytes(hub.files("your-name/run")["README.md"])
    local, remote = python_blocks(tmp_path / "README.md")
    check = "\nassert type(model).__module__.startswith({!r}), type(model)\n"
    with_package = [block for block in guide if "trust_remote_code=True" not in block]
    without_package = [block for block in guide if "trust_remote_code=True" in block]
    assert with_package and without_package
    cut = """
from transformers import AutoTokenizer
pushed = AutoTokenizer.from_pretrained("your-name/your-yoso")
assert len(pushed("and more of them " * 3000, truncation=True).input_ids) == config.max_position_embeddings
"""
    code = "\n".join([HUB_1, local, check.format("yoso_hf."), *with_package, cut])
    run_python(code, environment=hub.environment(tmp_path / "home"), folder=tmp_path)
    code = "\n".join([BLOCK, remote, check.format("transformers_modules."), *without_package])
    run_python(code, environment=hub.environment(tmp_path / "other home"), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run_glue", "run_mlm"])
def test_scripts_push_a_run_from_the_hub_to_the_hub(script, hub, pushed, tmp_path):
    rows = [{"sentence": f"a small text {word}", "label": word % 2} for word in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {
        "run_glue": ["--task_name", "sst2", "--validation_file", str(file)],
        "run_mlm": ["--text_column", "sentence", "--block_size", "16", "--validation_percentage", "20"],
    }[script]
    common = ["--do_train", "--do_eval", "--use_cpu", "--max_steps", "2", "--push_to_hub", "--learning_rate", "1e-3"]
    places = ["--model_name_or_path", "your-name/your-yoso", "--hub_model_id", f"your-name/{script}"]
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "--train_file", str(file), "--output_dir"]
    environment = {**os.environ, **hub.environment(pushed / "home of the scripts")}
    # the second time, from the checkpoint of the finished run
    for _ in range(2):
        result = subprocess.run(
            [*command, str(tmp_path / "run"), *common, *places, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-5000:]
    files = hub.files(f"your-name/{script}")
    assert MODEL_FILES | {"tokenizer.json"} <= files.keys()
    card = ModelCard(files["README.md"].decode())
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    metric = {"run_glue": "accuracy", "run_mlm": "perplexity"}[script]
    assert f"| {metric} | {results[f'eval_{metric}']:.4g} |" in card.text
    # the data are files of this machine
    assert card.data.base_model == "your-name/your-yoso" and card.data.eval_results is None
    assert str(tmp_path) not in card.text
