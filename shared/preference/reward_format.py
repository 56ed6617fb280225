"""Chapter 11. Format of reward models: transformers' sequence classification with one label (`LlamaForSequenceClassification` and others).

Its files hold the decoder under its usual names, no language-model head, and one vector, `score.weight` [1, D]. `config.json` says the
number of labels by listing them.
"""

from dataclasses import replace

from shared.model.config import ModelConfig
from shared.model.hf.format import ConfigJson, FileTensor, Format, same

HEAD, SCORE = "head.weight", "score.weight"  # the vector's logical name, and its name in the files


def sequence_classification(known: Format, raw: ConfigJson) -> tuple[Format, ConfigJson]:
    """The format and config.json of a decoder with a language-model head -> the format and config.json of the reward model.

    Files of OLMoE and dots.llm1 are written in the same way; transformers 5 has no class that reads them.
    """
    architecture = known.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForSequenceClassification"

    def tensors(config: ModelConfig) -> list[FileTensor]:
        return [*(each for each in known.tensors(config) if not each.ours[0].startswith("head.")), same(SCORE, HEAD)]

    changed = replace(known, architecture=architecture, tensors=tensors, tied=(), ignored=(*known.ignored, *known.tied))
    return changed, raw | {"architectures": [architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
