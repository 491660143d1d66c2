"""Masked language modelling with Trainer: repeatable masks, logits for the masked positions only."""

import copy
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DataCollatorForLanguageModeling,
    EvalPrediction,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.trainer_utils import TrainOutput, unwrap_peft_model

from .model_card import CardTrainer
from .modeling_yoso import IGNORED_LABEL, count_labels


class Masking:
    """BERT's masking: of the chosen tokens 80 % become the mask token, 10 % another token, 10 % stay.

    Args:
        tokenizer: a tokenizer with a mask token; its special tokens are never chosen.
        probability: chance of a token to be chosen, 0..1.

    Raises:
        ValueError: the tokenizer has no mask token, or the probability is out of range.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float):
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        self.special = torch.tensor(tokenizer.all_special_ids)

    def __call__(self, input_ids: Tensor, seed: Sequence[int]) -> dict[str, Tensor]:
        """Mask blocks, the same way for the same seed.

        Args:
            input_ids: int64 tensor of any shape.
            seed: numbers >= 0 that together decide the masks.

        Returns:
            "input_ids", masked, and "labels", the original ids where masked and -100 elsewhere; both with the
            shape and on the device of the given ones.
        """
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        # a copy's generator: other threads have theirs, and a spawned worker could not be sent it
        collator = copy.copy(self.collator)
        collator.generator = torch.Generator().manual_seed(int(state[0]))
        original = input_ids.cpu()
        masked, labels = collator.torch_mask_tokens(
            original.clone(), special_tokens_mask=torch.isin(original, self.special)
        )
        return {"input_ids": masked.to(input_ids.device), "labels": labels.to(input_ids.device)}

    def mask_rows(self, rows: dict[str, list]) -> dict[str, list[Tensor]]:
        """Mask each block by a seed made of its own tokens: the same at every evaluation, in whatever batch.

        Args:
            rows: "input_ids", a list of blocks, as `Dataset.with_transform` hands them over.

        Returns:
            "input_ids" and "labels" as lists of tensors.
        """
        masked = []
        for block in rows["input_ids"]:
            tokens = torch.as_tensor(block, dtype=torch.int64)
            masked.append(self(tokens, [zlib.crc32(tokens.numpy().tobytes())]))
        return {name: [block[name] for block in masked] for name in ("input_ids", "labels")}


def mean_loss(outcome: EvalPrediction) -> dict[str, float]:
    """Cross-entropy of the masked tokens of a whole evaluation, and its perplexity.

    Args:
        outcome: predictions, the sum of each block's losses; label_ids, its number of masked tokens.

    Returns:
        "loss", not a number where nothing is masked, and "perplexity", infinite where float64 cannot hold it.
    """
    masked = outcome.label_ids.sum()
    loss = outcome.predictions.sum(dtype=np.float64) / masked if masked > 0 else math.nan
    return {"loss": float(loss), "perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()}


class MaskedLMTrainer(CardTrainer):
    """Trainer for masked language modelling on blocks without padding.

    Training batches hold "input_ids" alone and are masked here, by a seed made of the run's seed, the step
    and the process: a resumed run gets the masks of an uninterrupted one, whatever has been prefetched. The
    loss is computed here as well: many models take no notice of `num_items_in_batch`, and Trainer would add
    up their mean losses under gradient accumulation. In evaluations every masked token weighs the same, whatever the
    batches and the processes. Where TrainingArguments.include_num_input_tokens_seen counts tokens, `train` reports how
    many it took a second.

    Args:
        masking: the masks.
        sparse_prediction: apply the model's head to the masked positions only. Works with every model whose
            head takes the base model's last_hidden_state position by position.
        arguments: those of CardTrainer.

    Raises:
        ValueError: sparse_prediction is asked for several GPUs in one process.
    """

    def __init__(self, *, masking: Masking, sparse_prediction: bool = True, **arguments: Any):
        super().__init__(
            data_collator=default_data_collator,
            compute_loss_func=self.masked_lm_loss,
            compute_metrics=mean_loss,
            **arguments,
        )
        self.masking = masking
        self.sparse_prediction = sparse_prediction
        # [K] positions in the flattened batch, while its loss is computed
        self._masked = None
        self._hooked = None
        if sparse_prediction and self.args.n_gpu > 1:
            raise ValueError(
                f"sparse_prediction takes one GPU per process, got {self.args.n_gpu}: start the script "
                "with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU"
            )

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        output = super().train(*args, **kwargs)
        # of this process' time, also where it resumed a run
        tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
        if tokens > 0:
            output.metrics["train_tokens_per_second"] = tokens / output.metrics["train_runtime"]
        return output

    def _keep_masked(self, _module: nn.Module, _inputs: tuple, output: Any) -> Any:
        if self._masked is not None:
            hidden = output.last_hidden_state.flatten(0, 1)
            output.last_hidden_state = hidden.index_select(0, self._masked)[None]
        return output

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        place = (self.args.seed, self.state.global_step, self.args.process_index)
        masked = (self.masking(batch["input_ids"], (*place, index)) for index, batch in enumerate(epoch_iterator))
        return super().get_batch_samples(masked, num_batches, device)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any):
        if not self.sparse_prediction:
            return super().compute_loss(model, inputs, *args, **kwargs)
        # not once and for all: model_init makes another model for every call of train
        base_model = unwrap_peft_model(self.accelerator.unwrap_model(self.model)).base_model
        if base_model is not self._hooked:
            base_model.register_forward_hook(self._keep_masked)
            self._hooked = base_model
        labels = inputs["labels"].flatten()
        self._masked = (labels != IGNORED_LABEL).nonzero().squeeze(1)
        try:
            return super().compute_loss(model, inputs | {"labels": labels[self._masked][None]}, *args, **kwargs)
        finally:
            self._masked = None

    def masked_lm_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Cross-entropy of the masked tokens, in float32.

        Args:
            outputs: of the model, with logits [B, N, vocab], or [1, K, vocab] in sparse prediction.
            labels: int64, shaped as the logits without their last dimension; -100 is left out.
            num_items_in_batch: masked tokens of the whole optimiser step; None: those in labels.

        Returns:
            The sum divided by num_items_in_batch; 0 where nothing is masked.
        """
        loss = F.cross_entropy(
            outputs.logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=self.args.label_smoothing_factor if self.model.training else 0.0,
        )
        return loss / count_labels(labels, num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any):
        """What `mean_loss` needs of a batch; Trainer gathers it and leaves out rows that only fill the last one.

        Args:
            model: the model.
            inputs: "input_ids" and "labels", [B, N].

        Returns:
            No loss of the batch; as predictions the sum of each block's losses, as labels its number of masked
            tokens, [B].
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs["labels"]
        with torch.no_grad(), self.compute_loss_context_manager():
            _, outputs = self.compute_loss(model, dict(inputs), return_outputs=True)
        chosen = labels != IGNORED_LABEL
        logits = outputs.logits[0] if self.sparse_prediction else outputs.logits[chosen]
        losses = F.cross_entropy(logits.float(), labels[chosen], reduction="none")
        sums = losses.new_zeros(len(labels)).index_add(0, chosen.nonzero()[:, 0], losses)
        return None, sums, chosen.sum(dim=1)
