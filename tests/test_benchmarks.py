import argparse
import copy
import itertools
import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from matplotlib import image
from test_docs import save_small_bert

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_attention  # noqa: E402
import bench_cuda  # noqa: E402
import bench_embeddings  # noqa: E402
import bench_expectation_attention  # noqa: E402
import bench_hash  # noqa: E402
import bench_models  # noqa: E402
import bench_sampled_attention  # noqa: E402
import harness  # noqa: E402
import softmax_peer  # noqa: E402
from attention_cases import Softmax, TransformersYoso  # noqa: E402

import yoso_hf  # noqa: E402
from yoso_hf import modeling_yoso  # noqa: E402
from yoso_hf.conversion import convert_checkpoint  # noqa: E402

BOTH = "forward and backward"
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")


@pytest.fixture(autouse=True)
def other_tests_keep_their_warnings():
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)


class Script:
    """A clock, and what happened on it."""

    def __init__(self):
        self.now = 0.0
        self.events = []


@dataclass
class Scripted(harness.Case):
    """Takes the given seconds, one after the other."""

    letter: str
    seconds: list

    def attach(self, script: Script, wrong: bool = False) -> "Scripted":
        self.script, self.wrong, self.left = script, wrong, list(self.seconds)
        self.name = self.letter
        return self

    def verify(self):
        self.script.events.append(f"verify {self.name}")
        if self.wrong:
            raise harness.WrongResult("2 is not 3")

    def run(self):
        self.script.events.append(self.name)
        self.script.now += self.left.pop(0)


@pytest.fixture
def script(monkeypatch):
    script = Script()
    monkeypatch.setattr(harness, "perf_counter", lambda: script.now)
    return script


def test_cases_are_timed_in_turns_and_give_their_medians(script):
    # b ends by its seconds, after three runs; a by its repeats
    a = Scripted("cpu", "a", [1.0, 5.0, 2.0, 3.0, 9.0, 100.0]).attach(script)
    b = Scripted("cpu", "b", [40.0, 10.0, 20.0, 100.0]).attach(script)
    rows = harness.measure([a, b], repeats=5, seconds=30)
    assert script.events == ["verify a", "verify b", "a", "b", "a", "b", "a", "b", "a", "a"]
    figures = [(row["case"], row["ms"], row["runs"], row["times_the_first"]) for row in rows]
    assert figures == [("a", 3000.0, 5, 1.0), ("b", 20000.0, 3, pytest.approx(20 / 3))]


def test_a_wrong_result_gives_no_figure(script):
    cases = [Scripted("cpu", name, [1.0] * 9).attach(script, wrong=name == "b") for name in "abc"]
    with pytest.raises(SystemExit, match="wrong result of .*, b: 2 is not 3"):
        harness.measure(cases, repeats=5, seconds=30)
    assert script.events == ["verify a", "verify b"]


@pytest.mark.parametrize(
    ("ratio", "asked", "aim", "direction", "passed", "aim_reached"),
    [
        (2.9, 3, 6, "at least", False, False),
        (3.0, 3, 6, "at least", True, False),
        (6.1, 3, 6, "at least", True, True),
        (1.16, 1.15, 1.05, "at most", False, False),
        (1.1, 1.15, 1.05, "at most", True, False),
        (1.04, 1.15, 1.05, "at most", True, True),
        (1.01, 1, 1, "at most", False, False),
    ],
)
def test_the_table_says_what_is_reached(ratio, asked, aim, direction, passed, aim_reached, capsys):
    row = harness.compare("forward", ratio, asked=asked, aim=aim)
    assert (row["direction"], row["passed"], row["aim_reached"]) == (direction, passed, aim_reached)
    harness.print_table([row])
    verdict = "aim reached" if aim_reached else "passed" if passed else "MISSED"
    assert capsys.readouterr().out.rstrip().endswith(verdict)


@pytest.mark.parametrize("benchmark", [bench_attention, bench_cuda, bench_hash, bench_models])
def test_some_cases_do_not_replace_the_figures_of_all(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_some.py", "--lengths", "128"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "--output is needed with --lengths" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [bench_attention, bench_expectation_attention])
def test_figures_of_another_dtype_do_not_replace_those_of_float32(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_some.py", "--dtype", "bfloat16"])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert "--output is needed with --dtype" in capsys.readouterr().err


def test_texts_of_the_users_do_not_replace_the_figures_of_others(monkeypatch, capsys):
    """Nor does a run without documents."""
    files = ["--model_name_or_path", "model", "--validation_file", "pairs.jsonl", "--train_file", "pairs.jsonl"]
    monkeypatch.setattr(sys, "argv", ["bench_some.py", *files])
    with pytest.raises(SystemExit, match="2"):
        bench_embeddings.main()
    assert "--output is needed with --model_name_or_path, --validation_file" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    class Figure:
        def savefig(self, path, **_):
            path.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        harness.save_picture(Figure(), tmp_path / "new" / "a.png")
    assert list((tmp_path / "new").iterdir()) == []


def test_slow_peers_are_left_out_by_the_square_of_the_length():
    case = Softmax("cpu", "forward", 4000)
    rows = [
        {"case": case.name, "length": 1000, "ms": 2000.0},
        {"case": case.name, "length": 2000, "ms": 3000.0},
        {"case": "another", "length": 2000, "ms": 9000.0},
    ]
    # 4 times 3 seconds
    assert harness.within_limit(case, rows, 12.1)
    assert not harness.within_limit(case, rows, 11.9)
    assert harness.within_limit(case, rows[2:], 0.1)


@dataclass
class Allocation(harness.Case):
    mib: int

    def setup(self):
        self.kept = torch.ones(128, 2**18)

    def run(self):
        torch.ones(self.mib, 2**18)
        torch.ones(self.mib // 2, 2**18)


@needs_proc
@pytest.mark.parametrize("mib", [16, 64])
def test_memory_is_the_peak_of_a_run_above_what_was_there_before(mib):
    assert harness.peak_memory(Allocation("cpu", mib)) == pytest.approx(mib, rel=0.1)


@pytest.mark.parametrize(
    "kind",
    [
        bench_attention.Sampled,
        bench_attention.Expectation,
        bench_attention.LocalWindow,
        bench_sampled_attention.SampledAttention,
        Softmax,
        TransformersYoso,
    ],
)
def test_verification_finds_wrong_attention(kind):
    class Wrong(kind):
        """What `spoil` makes of the inputs reaches the attention."""

        def attend(self, *tensors):
            return super().attend(*self.spoil(*tensors))

    def verify(task, spoil, data="random"):
        case = Wrong("cpu", task, 40, heads=2, data=data)
        case.spoil = spoil
        case.setup()
        case.verify()

    def unread_key(query, key, value):
        return query, key, torch.cat([value[:, :, :-1], torch.zeros_like(value[:, :, :1])], dim=2)

    def other_gradient(which):
        def spoil(*tensors):
            # the same number, 1.01 times the gradient
            return [1.01 * x - 0.01 * x.detach() if i == which else x for i, x in enumerate(tensors)]

        return spoil

    for data in ("random", "equal keys", "clustered keys", "clustered queries and keys"):
        for task in ("forward", "backward", BOTH):
            verify(task, lambda *tensors: tensors, data)
    with pytest.raises(harness.WrongResult, match="the output has error"):
        verify("forward", unread_key)
    for which, name in enumerate(("query", "key", "value")):
        verify("forward", other_gradient(which))
        with pytest.raises(harness.WrongResult, match=f"the gradient of {name} has error"):
            verify(BOTH, other_gradient(which))


def test_verification_finds_other_weights_and_numbers_that_are_not_finite():
    case = bench_attention.Expectation("cpu", "forward", 40, heads=2)
    case.setup()
    case.attend = bench_attention.Expectation("cpu", "forward", 40, heads=2, hash_code_len=8).attend
    with pytest.raises(harness.WrongResult, match="the output has error"):
        case.verify()
    case.attend = lambda *tensors: tensors[2] * float("nan")
    with pytest.raises(harness.WrongResult, match="the output has error nan"):
        case.verify()


def test_verification_finds_wrong_codes():
    for kind in (bench_hash.Hadamard, bench_hash.Gaussian, bench_hash.MatrixProduct):
        case = kind("cpu", 40)
        case.setup()
        case.verify()
        codes = case.run()
        case.run = lambda codes=codes: codes ^ 1
        with pytest.raises(harness.WrongResult, match="of the codes differ"):
            case.verify()


def test_verification_finds_wrong_models():
    case = bench_models.Yoso("cpu", "forward", 64)
    case.setup()
    case.verify()
    attention = modeling_yoso.yoso_attention

    def without_mask(*tensors, **options):
        return attention(*tensors[:3], **options)

    def value_itself(*tensors, **_):
        return tensors[2]

    with (
        mock.patch.object(modeling_yoso, "yoso_attention", without_mask),
        pytest.raises(harness.WrongResult, match="the output with padding has error"),
    ):
        case.verify()
    with (
        mock.patch.object(modeling_yoso, "yoso_attention", value_itself),
        pytest.raises(harness.WrongResult, match="does not reach far tokens"),
    ):
        case.verify()
    case.task = bench_models.STEP
    with (
        mock.patch.object(modeling_yoso, "yoso_attention", value_itself),
        pytest.raises(harness.WrongResult, match="query.weight has no gradient"),
    ):
        case.verify()


@pytest.fixture
def run_here(monkeypatch, tmp_path, capsys):
    """Runs a benchmark's main with few, short runs, and returns what it wrote."""

    def run(benchmark, *arguments: str) -> dict:
        output = tmp_path / f"{benchmark.__name__}.json"
        monkeypatch.setattr(sys, "argv", [benchmark.__name__, "--output", str(output), "--seconds", "0", *arguments])
        benchmark.main()
        return check_result(output, capsys.readouterr().out)

    return run


def check_result(output: Path, printed: str) -> dict:
    result = json.loads(output.read_text())
    assert result["machine"]["torch"] == torch.__version__
    # the other rows are of quality
    timed = [row for row in result["rows"] if not {"spearman", "state_cosine"} & row.keys()]
    assert timed
    assert all(row["ms"] > 0 and row["runs"] == 3 for row in timed)
    assert all(row["name"] in printed for row in result.get("table", []))
    return result


@pytest.mark.parametrize(
    ("benchmark", "size"),
    [(bench_hash, 3), (bench_sampled_attention, 2), (bench_expectation_attention, 4)],
)
def test_operator_benchmarks_run(benchmark, size, run_here):
    rows = run_here(benchmark, "--lengths", "24", "40")["rows"]
    assert {row["length"] for row in rows} == {24, 40}
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        assert len({row["case"] for row in group}) == size
        for row in group:
            assert row["times_the_first"] == pytest.approx(row["ms"] / group[0]["ms"])


@needs_proc
def test_the_attention_benchmark_runs_and_is_drawn(tmp_path):
    # as a program: its cases reach the processes that measure memory from there too
    output = tmp_path / "attention.json"
    command = [sys.executable, BENCHMARKS / "bench_attention.py", "--output", output, "--seconds", "0"]
    command += ["--lengths", "24", "512", "--length", "16"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    attention = check_result(output, run.stdout)
    assert len(attention["table"]) == 2 + 3 + 3 + 2 + 1
    forward = {
        row["case"]: row
        for row in attention["rows"]
        if (row["group"], row["task"], row["length"]) == ("lengths", "forward", 512)
    }
    assert all(row["peak_mib"] > 0 for row in forward.values())
    asked = attention["table"][0]
    assert asked["name"] == "forward, N = 512: times as fast as softmax"
    assert asked["ratio"] == pytest.approx(forward["softmax (sdpa)"]["ms"] / forward["yoso"]["ms"])
    growth = [row for row in attention["rows"] if row["group"] == "growth"]
    assert [(row["length"], row["hash_code_len"], row["heads"]) for row in growth] == [
        (16, 9, 12),
        (256, 9, 12),
        (16, 9, 12),
        (256, 13, 12),
        (512, 9, 2),
        (1024, 9, 2),
    ]

    picture, models = tmp_path / "lengths.png", BENCHMARKS / "results" / "models-cpu.json"
    subprocess.run([sys.executable, BENCHMARKS / "plot_lengths.py", output, models, picture], check=True)
    pixels = image.imread(picture)[..., :3]
    # softmax is drawn in red, in both rows of the picture
    red = (pixels[..., 0] > 0.8) & (pixels[..., 1:] < 0.25).all(-1)
    assert red[: len(red) // 2].any()
    assert red[len(red) // 2 :].any()


@pytest.mark.slow
@needs_proc
def test_the_benchmark_of_models_runs(run_here):
    models = run_here(bench_models, "--lengths", "64", "128", "--pair_lengths", "64", "--limit", "0")
    cases = {
        length: {row["case"] for row in models["rows"] if (row["group"], row["length"]) == ("lengths", length)}
        for length in (64, 128)
    }
    assert cases[64] == {kind.name for kind in (*bench_models.OURS, *bench_models.PEERS)}
    # a limit of no time at all leaves the peers out where an earlier length tells their time
    assert cases[128] == {kind.name for kind in bench_models.OURS}
    peak = {
        row["case"]: row["peak_mib"]
        for row in models["rows"]
        if (row["group"], row["task"], row["length"]) == ("lengths", bench_models.STEP, 64)
    }
    assert len(models["table"]) == 3
    assert models["table"][2]["ratio"] == pytest.approx(peak["yoso"] / peak["BERT (sdpa)"])


def test_embeddings_are_compared_with_those_of_softmax(tmp_path, run_here):
    texts = [f"the {a} cat sees {b} dogs" for a in ("old", "new", "red") for b in ("no", "two", "many three")]
    save_small_bert(tmp_path / "model", texts)
    pairs = [
        {"sentence1": one, "sentence2": other, "label": float(i * j % 7)}
        for i, one in enumerate(texts)
        for j, other in enumerate(texts)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = ["softmax", "exact, cosine, tau 9", "exact, cosine, tau fitted", "sampled, cosine, tau 9, m 32"]
    files = [
        "--validation_file",
        str(file),
        "--train_file",
        str(file),
        "--model_name_or_path",
        str(tmp_path / "model"),
    ]
    result = run_here(bench_embeddings, *files, "--lengths", "10", "100", "--settings", *settings)
    rows = {row["setting"]: row for row in result["rows"] if "spearman" in row}
    assert list(rows) == settings

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    embeddings = {}
    for setting in settings[:2]:
        attention = "sdpa" if setting == "softmax" else "yoso_expectation"
        model = transformers.AutoModel.from_pretrained(tmp_path / "model", attn_implementation=attention).eval()
        model.config.update({"yoso_hash_code_len": 9, "yoso_similarity": "cosine"})
        with torch.no_grad():
            means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
        embeddings[setting] = F.normalize(torch.stack(means), dim=-1)
        cosines = (embeddings[setting] @ embeddings[setting].T).flatten()
        expected = bench_embeddings.spearmanr(cosines, [pair["label"] for pair in pairs]).statistic
        # equal cosines are ranked by their rounding
        assert abs(rows[setting]["spearman"] - expected) < 0.02
    cosine = (embeddings["softmax"] * embeddings[settings[1]]).sum(-1).mean().item()
    assert abs(rows[settings[1]]["cosine_to_softmax"] - cosine) < 1e-4 < 1 - cosine
    assert abs(rows["softmax"]["cosine_to_softmax"] - 1) < 1e-5
    fitted = rows["exact, cosine, tau fitted"]
    assert fitted["cosine_to_softmax"] > rows[settings[1]]["cosine_to_softmax"]
    assert [len(layer) for layer in fitted["hash_code_len"]] == [4, 4]
    assert {(row["length"], row["setting"]) for row in result["rows"] if "ms" in row} == {
        (length, setting) for length in (10, 100) for setting in settings
    }


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_longer_positions_are_those_of_the_table_repeated(kind):
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes, max_position_embeddings=12, intermediate_size=8)
    model = transformers.AutoModel.from_config(config).eval()
    own, first = (12, 0) if kind == "bert" else (10, 2)
    ids = torch.randint(2, 30, (1, 23))
    for length in (5, 23):
        longer = copy.deepcopy(model)
        bench_embeddings.lengthen(longer, length)
        given = ids[:, :length]
        expected = model(given, position_ids=first + torch.arange(length)[None] % own).last_hidden_state
        torch.testing.assert_close(longer(given).last_hidden_state, expected)


def test_states_of_documents_are_compared_with_those_of_softmax(tmp_path, run_here):
    texts = [" ".join(f"{word} {i} cats saw {i + 7} dogs" for i in range(20)) for word in ("old", "new", "red")]
    save_small_bert(tmp_path / "model", texts)
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    others = ("new dogs", "red 5 saw")
    pairs = [{"sentence1": "old 3 cats", "sentence2": other, "label": i} for i, other in enumerate(others)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    positions = transformers.AutoConfig.from_pretrained(tmp_path / "model").max_position_embeddings
    setting, lengths = "exact, cosine, tau 9", [positions // 2, positions + 9]
    names = {"model_name_or_path": "model", "document_file": "documents.jsonl"}
    names |= {"validation_file": "pairs.jsonl", "train_file": "pairs.jsonl"}
    files = [part for name, file in names.items() for part in (f"--{name}", str(tmp_path / file))]
    options = ["--lengths", "10", "--settings", setting, "--max_documents", "2", "--document_lengths"]
    result = run_here(bench_embeddings, *files, *options, *map(str, lengths))
    rows = [row for row in result["rows"] if "state_cosine" in row]
    assert [(row["document_length"], row["setting"]) for row in rows] == [(length, setting) for length in lengths]

    models = [
        transformers.AutoModel.from_pretrained(tmp_path / "model", attn_implementation=name).eval()
        for name in ("sdpa", "yoso_expectation")
    ]
    models[1].config.update({"yoso_hash_code_len": 9, "yoso_similarity": "cosine"})
    for row, length in zip(rows, lengths, strict=True):
        states, embeddings = [], []
        # the two of three that are evenly spread
        for text in texts[::2]:
            ids = tokenizer(text, return_tensors="pt").input_ids[:, : length - 1]
            ids = torch.cat([ids, torch.tensor([[tokenizer.sep_token_id]])], dim=1)
            places = {"position_ids": torch.arange(length)[None] % positions, "token_type_ids": torch.zeros_like(ids)}
            with torch.no_grad():
                one, other = (model(ids, **places).last_hidden_state[0] for model in models)
            states.append(F.cosine_similarity(one, other, dim=-1).mean())
            embeddings.append(F.cosine_similarity(one.mean(0), other.mean(0), dim=0))
        assert abs(row["state_cosine"] - sum(states) / 2) < 1e-5 < 1 - row["state_cosine"]
        assert abs(row["embedding_cosine"] - sum(embeddings) / 2) < 1e-5
    with pytest.raises(ValueError, match="must hold documents of 9999 tokens"):
        run_here(bench_embeddings, *files, *options, "9999")


def test_softmax_peer_is_the_original_at_its_length_and_longer(tmp_path):
    save_small_bert(tmp_path / "bert", ["Of all the words that a text holds, the model sees some masked."])
    original = transformers.BertModel.from_pretrained(tmp_path / "bert").eval()
    length = original.config.max_position_embeddings
    convert_checkpoint(tmp_path / "bert", tmp_path / "yoso", max_position_embeddings=2 * length)
    softmax_peer.main(str(tmp_path / "yoso"), str(tmp_path / "peer"))
    peer = transformers.BertForMaskedLM.from_pretrained(tmp_path / "peer").eval()
    ids = torch.randint(5, original.config.vocab_size, (1, 2 * length))
    with torch.no_grad():
        torch.testing.assert_close(peer.bert(ids[:, :length])[0], original(ids[:, :length])[0])
        assert peer(ids).logits.shape == (1, 2 * length, original.config.vocab_size)
    yoso = yoso_hf.YosoForMaskedLM.from_pretrained(tmp_path / "yoso")
    assert torch.equal(peer.cls.predictions.transform.dense.weight, yoso.cls.predictions.transform.dense.weight)


class AuthorsKernels:
    """Stands in for the authors' compiled kernels, of which it has the interface."""

    slope = 1

    @staticmethod
    def fast_hash(_query_mask, query, _key_mask, key, num_hash, hash_code_len, *_settings):
        directions = torch.randn(query.shape[0], query.shape[-1], num_hash * hash_code_len)
        bits = [(x @ directions > 0).unflatten(-1, (num_hash, hash_code_len)) for x in (query, key)]
        return [(bit * 2 ** torch.arange(hash_code_len)).sum(-1).int() for bit in bits]

    @staticmethod
    def collisions(query_mask, query_code, key_mask, key_code):
        hits = (query_code[:, :, None] == key_code[:, None]).float().mean(-1)
        return hits * query_mask[:, :, None] * key_mask[:, None]

    def lsh_cumulation(self, query_mask, query_code, key_mask, key_code, value, *_settings):
        return self.collisions(query_mask, query_code, key_mask, key_code) @ value

    def lsh_weighted_cumulation(
        self, query_mask, query_code, query_weight, key_mask, key_code, key_weight, value, *_settings
    ):
        hits = self.collisions(query_mask, query_code, key_mask, key_code)
        return self.slope * (hits * (query_weight @ key_weight.mT)) @ value


def test_the_authors_kernels_are_verified(monkeypatch):
    case = bench_cuda.Authors("cpu", BOTH, 65, heads=3, hash_code_len=4, batch=2)
    monkeypatch.setattr(bench_cuda.Authors, "kernels", AuthorsKernels())
    case.setup()
    case.verify()
    monkeypatch.setattr(AuthorsKernels, "slope", 1.01)
    with pytest.raises(harness.WrongResult, match="gradient of query"):
        case.verify()


def test_both_ways_of_the_backward_are_timed_and_the_setting_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(bench_cuda, "LENGTHS_OF_WAYS", (24, 40))
    monkeypatch.setattr(bench_cuda, "BATCH", 2)
    monkeypatch.setenv("YOSO_CUDA_BACKWARD", "as it was")
    settings = []
    attend = bench_cuda.Sampled.attend
    monkeypatch.setattr(
        bench_cuda.Sampled,
        "attend",
        lambda *inputs: settings.append(os.environ["YOSO_CUDA_BACKWARD"]) or attend(*inputs),
    )
    parts = list(bench_cuda.ways(argparse.Namespace(device="cpu", repeats=1, seconds=0)))
    assert [(row["length"], row["way"]) for rows, _ in parts for row in rows] == [
        (length, way) for length in (24, 40) for way in ("pairs", "buckets")
    ]
    assert set(settings) == {"pairs", "buckets"}
    assert os.environ["YOSO_CUDA_BACKWARD"] == "as it was"


def test_exact_weights_are_timed_beside_samples_and_softmax(monkeypatch):
    monkeypatch.setattr(bench_cuda, "LENGTHS_OF_EXACT", (24, 40))
    monkeypatch.setattr(bench_cuda, "BATCH", 2)
    # which the CPU has
    monkeypatch.setattr(bench_cuda, "FAST_BACKENDS", ("MATH",))
    parts = list(bench_cuda.exact(argparse.Namespace(device="cpu", repeats=1, seconds=0)))
    assert [(row["task"], row["length"], row["case"]) for rows, _ in parts for row in rows] == [
        (task, length, case)
        for task in ("forward", BOTH)
        for length in (24, 40)
        for case in ("yoso expectation", "yoso", "softmax (sdpa)")
    ]


def test_the_time_of_a_call_is_told_by_kernels(monkeypatch):
    monkeypatch.setattr(bench_cuda, "BATCH", 2)
    parts = list(bench_cuda.kernels(argparse.Namespace(device="cpu", lengths=[24])))
    for (rows, table), task in zip(parts, ("forward", BOTH), strict=True):
        assert table == []
        assert {(row["task"], row["length"]) for row in rows} == {(task, 24)}
        assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
        launches = {row["case"]: row["launches"] for row in rows}
        # the queries' and the keys'
        assert (launches["hash_hadamard"], launches["sampled_attention"]) == (2, 1)
        assert launches.get("sampled_attention_backward", 0) == (task == BOTH)
    name = "void yoso::(anonymous namespace)::add_kernel<c10::BFloat16, yoso::(anonymous namespace)::Plan<64> >(int*)"
    assert bench_cuda.kernel_name(name) == "add_kernel<BFloat16, Plan<64> >"


def test_a_group_of_the_gpu_s_benchmark_that_fails_is_named_after_the_others(monkeypatch, tmp_path, capsys):
    def group_of(row, error=None):
        def group(_):
            yield [{"case": row}], [harness.compare(row, 2.0, asked=1, aim=3)]
            if error is not None:
                raise error

        return group

    groups = {
        "attention": group_of("first", SystemExit("wrong result of a case")),
        "float32": group_of("second", torch.OutOfMemoryError("of the GPU")),
        "exact": group_of("third"),
    }
    monkeypatch.setattr(bench_cuda, "GROUPS", groups)
    output = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["bench_cuda.py", "--output", str(output), "--groups", *groups])
    with pytest.raises(SystemExit, match="attention: wrong result of a case\nfloat32: of the GPU$"):
        bench_cuda.main()
    assert [row["case"] for row in json.loads(output.read_text())["rows"]] == ["first", "second", "third"]
    # the table, whatever failed
    assert "third" in capsys.readouterr().out.splitlines()[-1]


def test_a_directory_without_the_authors_sources_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["bench_cuda.py", "--authors", str(tmp_path), "--output", "x"])
    with pytest.raises(SystemExit):
        bench_cuda.main()
    assert "a clone of mlpen/YOSO has encoders/" in capsys.readouterr().err


def page_text(page: str) -> str:
    return " ".join((BENCHMARKS.parent / page).read_text().split())


def page_rows(corner: str, page: str) -> list[list[str]]:
    """The cells of the table whose first cell is given, without the line below its head."""
    lines = (BENCHMARKS.parent / page).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {corner} |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    head, _, *rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table]
    return [head, *rows]


def readme_table(corner: str, page: str = "README.md") -> dict[str, dict[int, str]]:
    """The cells of the table whose first cell is given, by row and by length."""
    head, *rows = page_rows(corner, page)
    return {row[0]: dict(zip(map(int, head[1:]), row[1:], strict=True)) for row in rows}


def test_results_are_those_of_a_commit():
    """A "+" stands for code that differs from it."""
    commits = {
        path.name: json.loads(path.read_text())["machine"]["commit"]
        for path in (BENCHMARKS / "results").glob("*.json")
    }
    assert commits
    assert [name for name, commit in commits.items() if not commit or commit.endswith("+")] == []


def measured(name: str, task: str, case: str, field: str, group: str = "lengths") -> dict[int, float]:
    rows = json.loads((BENCHMARKS / "results" / name).read_text())["rows"]
    wanted = (group, task, case)
    return {row["length"]: row[field] for row in rows if (row["group"], row["task"], row["case"]) == wanted}


@pytest.mark.parametrize("task", ["forward", BOTH])
def test_the_readmes_times_of_attention_are_those_of_the_results(task):
    table = readme_table("ms at N =")
    times = {
        name: measured("attention-cpu.json", task, case, "ms")
        for name, case in (("YOSO", "yoso"), ("softmax", "softmax (sdpa)"))
    }
    for name, by_length in times.items():
        for length, cell in table[f"{name}, {task}"].items():
            # three digits are shown, of short times two
            assert float(cell.replace(",", "")) == pytest.approx(by_length[length], rel=5e-3, abs=0.05)


@pytest.mark.parametrize("task", ["forward", BOTH])
def test_the_times_of_bfloat16_with_amx_are_those_of_the_results(task):
    table = readme_table("at N =", "docs/results/README.md")
    for name, group, case in (
        ("YOSO, sampled", "lengths", "yoso"),
        ("YOSO, expectation", "lengths", "yoso expectation"),
        ("softmax, PyTorch's", "lengths", "softmax (sdpa)"),
        ("softmax, samples (m = 64)", "similarity", "yoso, samples of softmax"),
        ("softmax, ours", "similarity", "yoso, softmax"),
        ("softmax, PyTorch's, beside these", "similarity", "softmax (sdpa)"),
    ):
        by_length = measured("attention-bfloat16-amx.json", task, case, "ms", group)
        cells = {length: float(cell.replace(",", "")) for length, cell in table[f"{name}, {task}"].items()}
        assert cells.keys() == by_length.keys()
        for length, cell in cells.items():
            assert cell == pytest.approx(by_length[length], abs=0.051 if cell < 100 else 0.51)


@pytest.mark.parametrize(
    ("name", "forward", "both"),
    [
        ("expectation_attention-bfloat16-amx", "0.71 to 0.81", "0.26 to 0.60"),
        ("expectation_attention-bfloat16-amx-busy", "1.07 to 1.29", "0.23 to 0.73"),
    ],
)
def test_the_shares_of_softmax_s_time_with_amx_are_those_of_the_results(name, forward, both):
    ms = defaultdict(dict)
    for row in json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())["rows"]:
        ms[row["task"], row["case"]][row["length"]] = row["ms"]
    for task, told in (("forward", forward), (BOTH, both)):
        shares = [
            own / ms[task, "softmax (sdpa)"][length]
            for case in ("softmax_attention", "expectation_attention")
            for length, own in ms[task, case].items()
        ]
        assert " to ".join(f"{share:.2f}" for share in (min(shares), max(shares))) == told
        assert told in page_text("docs/results/README.md")
    assert forward in page_text("README.md")


@pytest.mark.parametrize("task", ["forward", BOTH])
def test_the_times_without_kernels_are_those_of_the_results(task):
    table = readme_table("N =", "docs/kernels.md")
    for name, case in (("sampled", "yoso"), ("exact", "yoso expectation"), ("softmax", "softmax (sdpa)")):
        by_length = measured("attention-cpu-reference.json", task, case, "ms")
        cells = table[f"{name}, {task}"].items()
        assert {length: float(cell.replace(",", "")) for length, cell in cells} == pytest.approx(by_length, abs=0.5)


def test_the_readmes_first_table_is_that_of_the_results():
    head, *rows = page_rows("speed over softmax's (1: as fast), at tokens", "README.md")
    lengths = [int(cell.replace(",", "")) for cell in head[1:]]
    gpu = defaultdict(dict)
    for row in json.loads((BENCHMARKS / "results" / "cuda-h200.json").read_text())["rows"]:
        if row["group"] == "attention":
            times = gpu[row["task"], row["case"].partition(" ")[0]]
            times[row["length"]] = min(row["ms"], times.get(row["length"], math.inf))
    for place, cells in zip(itertools.product(("cpu", "gpu"), ("forward", BOTH)), rows, strict=True):
        (device, task), (name, *cells) = place, cells
        assert name.endswith("forward" if task == "forward" else "with backward")
        own, softmax = (
            measured("attention-cpu.json", task, case, "ms") if device == "cpu" else gpu[task, case.partition(" ")[0]]
            for case in ("yoso", "softmax (sdpa)")
        )
        for length, cell in zip(lengths, cells, strict=True):
            if cell == "–":
                assert length not in softmax
            else:
                assert float(cell) == pytest.approx(softmax[length] / own[length], rel=0.03)


def test_the_figures_of_a_gpu_are_those_of_the_results():
    results = json.loads((BENCHMARKS / "results" / "cuda-h200.json").read_text())
    ms = defaultdict(list)
    for row in results["rows"]:
        if row["group"] == "attention":
            ms[row["case"].partition(" ")[0].replace("yoso", "YOSO"), row["task"], row["length"]].append(row["ms"])
    head, *rows = page_rows("N =", "docs/cuda.md")
    lengths = [int(cell.replace(",", "")) for cell in head[1:-1]]
    ratios = {row["name"]: row for row in results["table"]}
    for (own, *own_cells, growth), (other, *other_cells, _), (_, *ratio_cells, asked_growth) in zip(
        rows[::3], rows[1::3], rows[2::3], strict=True
    ):
        (name, task), (other_name, other_task) = own.split(", "), other.split(", ")
        assert task == other_task
        assert float(growth) == pytest.approx(ratios[f"{task}: time at N = 65536 over 4096"]["ratio"], abs=0.05)
        assert asked_growth == f"{ratios[f'{task}: time at N = 65536 over 4096']['asked']} at most"
        for length, *cells, ratio in zip(lengths, own_cells, other_cells, ratio_cells, strict=True):
            found = [min(ms[case, task, length]) for case in (name, other_name)]
            assert [float(cell) for cell in cells] == pytest.approx(found, rel=5e-3, abs=0.005)
            ratio, _, asked = ratio.partition("; ")
            assert float(ratio) == pytest.approx(found[1] / found[0], rel=0.03)
            assert asked == (f"{bench_cuda.ASKED[task][length][0]}" if length in bench_cuda.ASKED[task] else "")


@pytest.mark.parametrize("name", ["BERT (sdpa)", "transformers' Yoso", "Nystromformer", "Longformer", "YOSO"])
def test_the_readmes_training_steps_are_those_of_the_results(name):
    ms, mib = (
        measured("models-cpu.json", "training step", name.replace("YOSO", "yoso"), f) for f in ("ms", "peak_mib")
    )
    for length, cell in readme_table("s / MiB at N =")[name].items():
        if cell == "–":
            assert length not in ms
            continue
        seconds, memory = (float(x.replace(",", "")) for x in cell.split("/"))
        assert seconds == pytest.approx(ms[length] / 1e3, abs=0.005)
        assert memory == pytest.approx(mib[length], abs=0.5)


@pytest.mark.parametrize("task", ["forward", "training step"])
def test_the_times_far_beyond_4096_tokens_are_those_of_the_results(task):
    _, *rows = page_rows("s / MiB at N =", "docs/results/README.md")
    ms, mib = (measured("models-long-cpu.json", task, "yoso", f) for f in ("ms", "peak_mib"))
    seconds = [f"{x / 1e3:.2f}" if x < 1e3 else f"{x / 1e3:.1f}" for x in ms.values()]
    assert list(ms) == [1024, 32768, 65536]
    assert [row[1:] for row in rows if row[0] == task] == [
        [f"{time} / {memory:,.0f}" for time, memory in zip(seconds, mib.values(), strict=True)]
    ]


def test_the_times_by_instruction_set_are_those_of_the_results():
    _, *rows = page_rows("| AVX-512", "docs/kernels.md")
    assert [row[0] for row in rows] == ["forward", BOTH]
    for task, *cells in rows:
        for name, cell in zip(("", "-avx2", "-default"), cells, strict=True):
            own, softmax = (
                measured(f"attention-cpu{name}.json", task, case, "ms")[4096] for case in ("yoso", "softmax (sdpa)")
            )
            shown, times = cell.removesuffix("x").split(", ")
            assert float(shown) == pytest.approx(own, rel=5e-3, abs=0.05)
            assert float(times) == pytest.approx(softmax / own, abs=0.05)


@pytest.mark.parametrize(("results", "of"), [("", ""), ("-short", "of 64 texts, ")])
def test_the_time_of_softmax_attention_is_that_of_the_results(results, of):
    rows = json.loads((BENCHMARKS / "results" / f"expectation_attention{results}-cpu.json").read_text())["rows"]
    ms = {(row["case"], row["task"], row["length"]): row["ms"] for row in rows}
    cases = {"ours": "softmax_attention", "PyTorch's": "softmax (sdpa)"}
    table = readme_table(f"ms, {of}at N =", "docs/kernels.md")
    assert len(table) == 6
    for name, cells in table.items():
        case, task = name.split(", ")
        for length, cell in cells.items():
            own, *other = (ms[cases[part], task, length] for part in case.split(" over "))
            expected = own / other[0] if other else own
            assert float(cell.replace(",", "")) == pytest.approx(expected, rel=0.01)


def test_the_closeness_to_softmax_is_that_of_the_results():
    rows = json.loads((BENCHMARKS / "results" / "embeddings-cpu.json").read_text())["rows"]
    quality = {row["setting"]: row for row in rows if "spearman" in row}
    ms = {(row["setting"], row["length"]): row["ms"] for row in rows if "ms" in row}
    _, *table = page_rows("attention", "docs/results/README.md")
    assert [cells[0] for cells in table] == list(quality) == list(bench_embeddings.SETTINGS)
    for setting, spearman, cosine, *times in table:
        found = quality[setting]
        assert (spearman, cosine) == (f"{found['spearman']:.4f}", f"{found['cosine_to_softmax']:.4f}")
        by_length = [(ms[setting, n], ms["softmax", n]) for n in (128, 512, 2048, 4096, 8192)]
        assert times == [f"{own:.0f}, {own / softmax:.2f}" for own, softmax in by_length]
    found = {
        (row["setting"], row["document_length"]): f"{row['state_cosine']:.3f}, {row['embedding_cosine']:.3f}"
        for row in rows
        if "state_cosine" in row
    }
    table = readme_table("cosine of states, of embeddings, at tokens", "docs/results/README.md")
    shown = {(setting, length): cell for setting, by_length in table.items() for length, cell in by_length.items()}
    assert len(shown) > 40 and shown.items() <= found.items()
