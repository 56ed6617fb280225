"""Our model in the clothes of transformers, so that peft can put its virtual tokens before it."""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from shared.model.context import KeyValueCache
from shared.model.transformer import TransformerModel


class GivenPast(KeyValueCache):
    """The keys and values that peft gives, in front of the computed ones."""

    def __init__(self, past: DynamicCache):
        self.past, self.length = past, past.get_seq_length()

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.past.update(keys, values, layer)


class OurModelForPeft(PreTrainedModel):
    """What peft's prompt and prefix tuning ask of a base: embeddings or a cache in, logits out. Everything between is `model`'s own."""

    config_class = PretrainedConfig

    def __init__(self, model: TransformerModel):
        size = model.config
        super().__init__(
            PretrainedConfig(vocab_size=size.vocab_size, hidden_size=size.hidden_size, num_hidden_layers=size.num_hidden_layers)
        )
        self.model = model
        self.rows = nn.Embedding.from_pretrained(model.embedding.tokens.weight.detach())

    def get_input_embeddings(self) -> nn.Embedding:
        return self.rows

    def prepare_inputs_for_generation(self) -> None:
        raise NotImplementedError("peft asks whether there is one.")

    def forward(self, input_ids=None, inputs_embeds=None, past_key_values=None, **others) -> CausalLMOutputWithPast:
        if inputs_embeds is None:
            return CausalLMOutputWithPast(logits=self.model(input_ids, cache=GivenPast(past_key_values)))
        self.model.embedding.tokens.forward = lambda ids: inputs_embeds
        try:
            return CausalLMOutputWithPast(logits=self.model(torch.zeros(inputs_embeds.shape[:2], dtype=torch.long)))
        finally:
            del self.model.embedding.tokens.forward
