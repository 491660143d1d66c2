"""Time and peak memory of whole models of equal size, and the table of what is asked of YosoModel.

    python benchmarks/bench_models.py
    python benchmarks/bench_models.py --lengths 512 4096 --pair_lengths --output models.json

Two layers of base size: hidden 768, 12 heads of 64, feed-forward 3072; random weights, one sequence, float32, no
dropout. YOSO has m = 32, tau = 9, the others the attention that their configurations have by default; Longformer's
first token is global; up to 704 tokens BigBird replaces its attention by a full one. A training step is forward, a
loss, and backward, without the optimizer.

"yoso, value itself" is YosoModel with its attention replaced by the value: what the rest of the model costs. As no
gradient reaches its queries and keys, its step also saves the backward of their projections.

A peer whose step would take longer than --limit seconds is left out at that length.
"""

from dataclasses import dataclass
from unittest import mock

import torch
import transformers
from harness import (
    Case,
    WrongResult,
    argument_parser,
    check_close,
    compare,
    measure,
    parse_arguments,
    print_table,
    within_limit,
    write_results,
)
from torch import Tensor, nn
from transformers.models.yoso.modeling_yoso import YosoModel as TransformersYosoModel

from yoso_hf import YosoConfig, YosoModel, modeling_yoso

STEP = "training step"
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
}
LAYERS = {"num_hidden_layers": 2, "intermediate_size": 3072, "attention_probs_dropout_prob": 0.0}
YOSO = {**SIZES, **LAYERS, "hash_code_len": 9}
# ids from here on stand for nothing special in any of the models
FIRST_WORD = 10
TOLERANCE = 1e-4


@dataclass
class ModelCase(Case):
    """One model at one length; task is "forward" or "training step"."""

    task: str
    length: int

    # whether a token can change the outputs of tokens that are far away
    sees_far = True
    # names of weights that no gradient reaches
    without_gradient = ("pooler",)

    def build(self) -> nn.Module:
        raise NotImplementedError

    def setup(self) -> None:
        # models say which of their defaults they fell back to
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        self.model = self.build().to(self.device).train(self.task == STEP)
        self.ids = torch.randint(FIRST_WORD, SIZES["vocab_size"], (1, self.length), device=self.device)
        self.settings = {}

    def hidden_states(self, ids: Tensor) -> Tensor:
        return self.model(ids, **self.settings).last_hidden_state

    def run(self) -> None:
        if self.task == STEP:
            self.model.zero_grad()
            # a loss that is not constant after a LayerNorm, whose outputs have fixed mean and length
            self.hidden_states(self.ids).relu().sum().backward()
        else:
            self.evaluate(self.ids)

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> Tensor:
        return self.hidden_states(ids)

    def verify(self) -> None:
        if self.task == STEP:
            self.run()
            self.verify_gradients()
        else:
            self.verify_outputs()

    def verify_gradients(self) -> None:
        for name, weight in self.model.named_parameters():
            expected = not any(part in name for part in self.without_gradient)
            if (weight.grad is not None) != expected:
                raise WrongResult(f"{name} has {'no' if expected else 'a'} gradient")
            if expected and not weight.grad.isfinite().all():
                raise WrongResult(f"the gradient of {name} is not finite")

    def verify_outputs(self) -> None:
        changed_ids = self.ids.clone()
        changed_ids[0, self.length // 2] = FIRST_WORD - 1
        # whatever is drawn inside is drawn the same again
        torch.manual_seed(1)
        out = self.evaluate(self.ids)
        torch.manual_seed(1)
        changed = self.evaluate(changed_ids)
        if not out.isfinite().all():
            raise WrongResult("the outputs are not finite")
        far = slice(self.length // 4)
        if torch.equal(out[:, far], changed[:, far]) == self.sees_far:
            raise WrongResult(
                f"a change of the middle token {'does not reach' if self.sees_far else 'reaches'} far tokens"
            )


class Yoso(ModelCase):
    name = "yoso"

    def build(self) -> nn.Module:
        settings = {"use_expectation": False, "num_hash": 32, "max_position_embeddings": self.length}
        return YosoModel(YosoConfig(**YOSO, **settings))

    def verify_outputs(self) -> None:
        super().verify_outputs()
        tokens = self.length - self.length // 4
        short = self.evaluate(self.ids[:, :tokens])
        self.settings = {"attention_mask": (torch.arange(self.length, device=self.device) < tokens)[None].long()}
        padded = self.evaluate(self.ids)[:, :tokens]
        self.settings = {}
        check_close("the output with padding", padded, short.double(), TOLERANCE)


class YosoValue(Yoso):
    name = "yoso, value itself"
    sees_far = False
    without_gradient = ("pooler", "self.query", "self.key")

    def hidden_states(self, ids: Tensor) -> Tensor:
        with mock.patch.object(modeling_yoso, "yoso_attention", lambda *tensors, **_: tensors[2]):
            return super().hidden_states(ids)


class TransformersYoso(ModelCase):
    name = "transformers' Yoso"

    def build(self) -> nn.Module:
        return TransformersYosoModel(transformers.YosoConfig(**YOSO, max_position_embeddings=self.length))

    def verify_outputs(self) -> None:
        super().verify_outputs()
        twin = YosoModel(YosoConfig(**YOSO, max_position_embeddings=self.length)).to(self.device).eval()
        twin.load_state_dict(self.model.state_dict(), strict=False)
        with torch.no_grad():
            check_close("the output", self.evaluate(self.ids), twin(self.ids).last_hidden_state.double(), TOLERANCE)


class Bert(ModelCase):
    name = "BERT (sdpa)"

    def build(self) -> nn.Module:
        config = transformers.BertConfig(**SIZES, **LAYERS, max_position_embeddings=self.length)
        return transformers.BertModel._from_config(config, attn_implementation="sdpa")

    def verify_outputs(self) -> None:
        super().verify_outputs()
        # the N x N matrix of the eager attention would be too large for all
        ids = self.ids[:, :512]
        fused = self.evaluate(ids)
        self.model.set_attn_implementation("eager")
        plain = self.evaluate(ids)
        self.model.set_attn_implementation("sdpa")
        check_close("the output", fused, plain.double(), TOLERANCE)


class Nystromformer(ModelCase):
    name = "Nystromformer"

    def build(self) -> nn.Module:
        sizes = {"max_position_embeddings": self.length, "segment_means_seq_len": self.length}
        return transformers.NystromformerModel(transformers.NystromformerConfig(**SIZES, **LAYERS, **sizes))


class Longformer(ModelCase):
    name = "Longformer"

    def build(self) -> nn.Module:
        # positions begin after the padding's, 1
        config = transformers.LongformerConfig(**SIZES, **LAYERS, max_position_embeddings=self.length + 2)
        return transformers.LongformerModel(config)

    def setup(self) -> None:
        super().setup()
        is_global = torch.zeros_like(self.ids)
        is_global[:, 0] = 1
        self.settings = {"global_attention_mask": is_global}


class BigBird(ModelCase):
    name = "BigBird"

    def build(self) -> nn.Module:
        config = transformers.BigBirdConfig(**SIZES, **LAYERS, max_position_embeddings=self.length)
        return transformers.BigBirdModel(config)


class Reformer(ModelCase):
    name = "Reformer"

    def build(self) -> nn.Module:
        return transformers.ReformerModel(
            transformers.ReformerConfig(
                **SIZES,
                attn_layers=["local", "lsh"],
                feed_forward_size=LAYERS["intermediate_size"],
                local_attention_probs_dropout_prob=0.0,
                lsh_attention_probs_dropout_prob=0.0,
                axial_pos_embds=False,
                max_position_embeddings=self.length,
            )
        )


OURS = (Yoso, YosoValue)
PEERS = (Bert, TransformersYoso, Nystromformer, Longformer, BigBird, Reformer)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(9, 14)])
    parser.add_argument("--pair_lengths", type=int, nargs="*", default=[512, 4096], help="yoso and value itself only")
    parser.add_argument("--limit", type=float, default=8, help="seconds of a peer's step")
    # calls are long, and cases many
    parser.set_defaults(seconds=1)
    args = parse_arguments(parser)
    rows, table = [], []
    for length in args.pair_lengths:
        for task, asked, aim in (("forward", 1.15, 1.05), (STEP, 1.3, 1.15)):
            # a difference of a few percent takes more runs
            cases = [kind(args.device, task, length) for kind in OURS]
            yoso, value = pair = measure(cases, args.repeats, 10 * args.seconds)
            rows += [{"group": "pair", **row} for row in pair]
            name = f"{task}, N = {length}: time over that with the value itself"
            table.append(compare(name, yoso["ms"] / value["ms"], asked=asked, aim=aim))
    for length in args.lengths:
        steps = [row for row in rows if row["task"] == STEP]
        peers = [kind for kind in PEERS if within_limit(kind(args.device, STEP, length), steps, args.limit)]
        for task in ("forward", STEP):
            group = measure(
                [kind(args.device, task, length) for kind in (*OURS, *peers)], args.repeats, args.seconds, memory=True
            )
            rows += [{"group": "lengths", **row} for row in group]
        if length in args.pair_lengths[-1:] and Bert in peers:
            peak = {row["case"]: row["peak_mib"] for row in group}
            name = f"{STEP}, N = {length}: peak memory over that of {Bert.name}"
            table.append(compare(name, peak[Yoso.name] / peak[Bert.name], asked=1, aim=1))
    print_table(table)
    write_results(args, rows, table)


if __name__ == "__main__":
    main()
