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
# what is saved brings its code along
YosoConfig.register_for_auto_class()
for auto_class, model_class in {
    AutoModel: YosoModel,
    AutoModelForMaskedLM: YosoForMaskedLM,
    AutoModelForMultipleChoice: YosoForMultipleChoice,
    AutoModelForQuestionAnswering: YosoForQuestionAnswering,
    AutoModelForSequenceClassification: YosoForSequenceClassification,
    AutoModelForTokenClassification: YosoForTokenClassification,
}.items():
    auto_class.register(YosoConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class)
AutoTokenizer.register(YosoConfig, RobertaTokenizer, exist_ok=True)
register_attention()

__version__ = "0.1.0"

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
