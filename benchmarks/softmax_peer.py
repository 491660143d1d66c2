"""Save the softmax model that a conversion is measured against: BERT with the conversion's weights.

    python benchmarks/softmax_peer.py runs/minilm-4096 runs/minilm-4096-softmax

The repeated positions and the new language model head are the same in both, so that they differ by the attention only.
"""

import sys

from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from yoso_hf import YosoForMaskedLM
from yoso_hf.modeling_yoso import POSITION_OFFSET

POSITIONS = "bert.embeddings.position_embeddings.weight"


def softmax_peer(converted: YosoForMaskedLM) -> BertForMaskedLM:
    """BERT with the weights of a masked language model that convert_checkpoint made of a BERT checkpoint."""
    ours = converted.config.to_dict()
    shared = BertConfig().to_dict().keys() - {"model_type", "architectures"}
    peer = BertForMaskedLM(BertConfig(**{name: ours[name] for name in shared & ours.keys()}))
    weights = {name.replace("yoso.", "bert.", 1): weight for name, weight in converted.state_dict().items()}
    weights[POSITIONS] = weights[POSITIONS][POSITION_OFFSET:]
    peer.load_state_dict(weights)
    return peer.eval()


def main(converted: str, output_dir: str) -> None:
    softmax_peer(YosoForMaskedLM.from_pretrained(converted)).save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(converted).save_pretrained(output_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
