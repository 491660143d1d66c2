"""YOSO attention for Hugging Face Transformers: importing it registers its classes with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    RobertaTokenizer,
)

from .attention import yoso_attention
from .attention_interface import register_attention
from .configuration_yoso import YosoConfig
from .hashing import HashFunctions
from .modeling_yoso import (
    YosoForMaskedLM,
    YosoForMultipleChoice,
    YosoForQuestionAnswering,
    YosoForSequenceClassification,
    YosoForTokenClassification,
    YosoModel,
)

# transformers has classes of its own for this model type: a head left out here would quietly be one of them
AutoConfig.register("yoso", YosoConfig, exist_ok=True)
AutoModel.register(YosoConfig, YosoModel, exist_ok=True)
AutoModelForMaskedLM.register(YosoConfig, YosoForMaskedLM, exist_ok=True)
AutoModelForMultipleChoice.register(YosoConfig, YosoForMultipleChoice, exist_ok=True)
AutoModelForQuestionAnswering.register(YosoConfig, YosoForQuestionAnswering, exist_ok=True)
AutoModelForSequenceClassification.register(YosoConfig, YosoForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(YosoConfig, YosoForTokenClassification, exist_ok=True)
AutoTokenizer.register(YosoConfig, RobertaTokenizer, exist_ok=True)
register_attention()

__all__ = [
    "HashFunctions",
    "YosoConfig",
    "YosoForMaskedLM",
    "YosoForMultipleChoice",
    "YosoForQuestionAnswering",
    "YosoForSequenceClassification",
    "YosoForTokenClassification",
    "YosoModel",
    "yoso_attention",
]
