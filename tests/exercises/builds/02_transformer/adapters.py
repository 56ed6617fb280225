"""The build of chapter 02: a LLaMA that loads a Hugging Face folder, yours from an empty file. About four hours.

    course check 02.build                all stages; course check 02.build.config: one
    course hint 02.build.config          three hints for each stage
    course reset 02.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Most stages have functions of their own, and are NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use PyTorch, safetensors and everything of chapter 01. You need nothing of this chapter's exercises, and may copy from them. The
modules of `shared.model` may not be imported, nor may `transformers`: with its LlamaForCausalLM the checks make folders of random weights,
and compare. Everything is on the CPU. Where no dtype is named, weights are float32, and 1e-4 is the tolerance, of each number and of its
size; the same sums in another order differ by some 1e-6.

A folder, as LlamaForCausalLM.save_pretrained writes it:
    config.json                       the configuration
    model.safetensors                 the weights by name; or, where they are many,
    model.safetensors.index.json      {"weight_map": {name: file}}: the weights that there are, and the file of this folder that has each
There may be other files, also other safetensors files, which are no part of the model.

The model, with the names of its weights (each Linear's weight is [out, in], its bias [out]; N counts layers from 0):
    model.embed_tokens.weight                                            [vocab_size, hidden_size]
    model.layers.N.input_layernorm.weight                                [hidden_size]: RMSNorm, before attention
    model.layers.N.self_attn.q_proj.weight                               num_attention_heads * head_dim out
    model.layers.N.self_attn.k_proj.weight, v_proj.weight                num_key_value_heads * head_dim out
    model.layers.N.self_attn.o_proj.weight                               num_attention_heads * head_dim in
    model.layers.N.post_attention_layernorm.weight                       [hidden_size]: RMSNorm, before the feed-forward layer
    model.layers.N.mlp.gate_proj.weight, up_proj.weight                  intermediate_size out; SiLU on the gate
    model.layers.N.mlp.down_proj.weight                                  intermediate_size in
    model.norm.weight                                                    [hidden_size]: RMSNorm, after the last layer
    lm_head.weight                                                       [vocab_size, hidden_size]; none where tie_word_embeddings is true:
                                                                         the embedding is then the head as well, one weight for both
    ... .q_proj.bias, k_proj, v_proj, o_proj                             where attention_bias is true
    ... .gate_proj.bias, up_proj, down_proj                              where mlp_bias is true
Layers are pre-norm. Attention is causal, its scale is head_dim ** -0.5, query heads g * n .. g * n + n - 1 share key-value head g, with
n = num_attention_heads / num_key_value_heads. RoPE turns queries and keys in the half-rotated layout, dimension i of a head with
i + head_dim / 2, as the exercise `apply_rope` does. Rows may be longer than max_position_embeddings, which limits nothing.

A model is an nn.Module, whatever is in it: its parameters are what an optimizer trains, no number twice, and `.to(dtype)` converts it.
`ids` are int64 [rows, columns].

The stages
    1 config     what a configuration says: transformers 5 and 4, and what holds where it is silent
    2 tensors    the tensors of a folder, in one file or many
    3 create     a new model: weights with LLaMA's names and shapes, tied or not, with initial values from a seed
    4 load       a model from its folder, in the dtype of its files
    5 logits     its logits, which are LlamaForCausalLM's: grouped heads, RoPE, RMSNorm, SwiGLU
    6 rope       RoPE stretched for longer rows: linear, and Llama 3's
    7 packed     rows of several documents, each of which sees itself alone
    8 gradients  the loss, and its gradient for each weight, which are LlamaForCausalLM's
    9 half       weights in bfloat16 and float16, where norms and angles are computed in float32
    10 save      a folder that transformers loads, in files of a given size
    11 budgets   what the steps above may hold and compute (see `loss`)
    12 bad_input what cannot be right is refused with a ValueError that says what
"""

from pathlib import Path
from typing import Any

from torch import Tensor, nn


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration, the contents of config.json, says of the model: a dictionary with these keys.

        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads      must be there
        num_key_value_heads      num_attention_heads where it is silent
        head_dim                 hidden_size // num_attention_heads where it is silent
        rms_norm_eps             1e-6 where it is silent
        initializer_range        0.02
        attention_bias, mlp_bias, tie_word_embeddings      False
        rope_theta               10000
        rope_scaling             None; or {"rope_type": "linear", "factor": ...}; or {"rope_type": "llama3", "factor", "low_freq_factor",
                                 "high_freq_factor", "original_max_position_embeddings": ...}, with these keys and no others

    A key that is null is silent too. transformers 5 writes RoPE as {"rope_parameters": {"rope_type", "rope_theta", options}}.
    transformers 4 wrote "rope_theta" beside "rope_scaling", which is null or {"rope_type" (in older files "type"), options}. The type
    "default" is no scaling. Other keys of a configuration do not matter, but for three of stage 12. `config` stays as it is.

    Raises:
        ValueError (stage 12): the message has the key at fault, and for the first three the value.
            model_type is not "llama"; hidden_act is another one than "silu" (silence means silu);
            rope_type is none of "default", "linear" and "llama3";
            quantization_config is there and not null;
            one of the five is missing; one of them, num_key_value_heads or head_dim is no int of at least 1 (True is none);
            num_key_value_heads does not divide num_attention_heads; head_dim is odd; an option of a scaling is missing.
    """
    raise NotImplementedError("02.build: settings is not written yet")


def tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name, in the dtype of the file: all tensors of model.safetensors. Where there is an index, all tensors
    that it lists, each from the file that it names.

    Raises:
        ValueError (stage 12): there is neither (the message has the folder's path; files that can run code, such as pytorch_model.bin,
            are not opened); a file is missing or cut short, or lacks a tensor that the index expects in it (the file's name).
    """
    raise NotImplementedError("02.build: tensors is not written yet")


def create(config: dict[str, Any], seed: int) -> nn.Module:
    """A new model in float32. Matrices and the embedding are drawn from a normal distribution with mean 0 and standard deviation
    initializer_range, norms are 1, biases 0. The same seed gives the same weights, another one others. PyTorch's global generator is as it
    was. `config` is kept for `save`, and is not changed."""
    raise NotImplementedError("02.build: create is not written yet")


def state(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model under the names above, without a graph. They may share memory with the model's."""
    raise NotImplementedError("02.build: state is not written yet")


def load(folder: Path) -> nn.Module:
    """The model of a folder, with its weights in the dtype of the files (which is one for all) and trainable. Two kinds of tensors, in
    files of other years, are no weights and are left out: names that end with "rotary_emb.inv_freq", and lm_head.weight where
    tie_word_embeddings is true. A folder is read anew at each call, and not changed.
    PyTorch's global generator is as it was.

    Raises:
        ValueError (stage 12): see `settings` and `tensors`; config.json is missing or no JSON object (its name); a tensor is missing, has
            another shape, or belongs to nothing (the tensor's name, and of a wrong shape the first size of both shapes).
    """
    raise NotImplementedError("02.build: load is not written yet")


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [rows, columns, vocab_size] in the dtype of the weights; those at a place predict the token after it. With a graph, unless
    gradients are off.

    Raises:
        ValueError (stage 12): ids are not int64 with two dimensions (the message has their dtype, or their shape or number of dimensions);
            an id is below 0 or at least vocab_size (the id).
    """
    raise NotImplementedError("02.build: logits is not written yet")


def frequencies(settings: dict[str, Any]) -> Tensor:
    """How far RoPE turns each pair at position 1: [head_dim / 2] float32, radians; at position p, p times as far.

    f[i] = rope_theta ** (-2 i / head_dim). Scaling: "linear" divides by factor. "llama3" asks how often a pair turns over the context of
    the pretraining: t[i] = original_max_position_embeddings * f[i] / (2 pi). It keeps f[i] where t[i] is high_freq_factor or more, divides
    by factor where it is low_freq_factor or less, and between them mixes the two: the kept one has a share that grows with t[i]
    from 0 to 1, linearly.

    settings: as the function `settings` returns them.
    """
    raise NotImplementedError("02.build: frequencies is not written yet")


def packed_logits(model: nn.Module, ids: Tensor, documents: Tensor) -> Tensor:
    """Logits as `logits`, of rows in which several documents stand one behind the other. documents: int64 [rows, columns], the number of
    each token's document; the tokens of a document stand together, and each document of a row has a number of its own, which may be any.
    A token sees the tokens of its own document, up to itself. (Positions may start at any number: RoPE depends on differences alone.)

    Raises:
        ValueError (stage 12): documents have another shape than ids (the message has the sizes of both).
    """
    raise NotImplementedError("02.build: packed_logits is not written yet")


def loss(model: nn.Module, ids: Tensor, documents: Tensor | None = None) -> Tensor:
    """The mean cross-entropy over all tokens that are followed by another one of their document, which is what they predict; a scalar in
    float32, with a graph. documents: None: each row is one document. There is at least one such token.

    The budgets. While `loss` and its backward pass run on one row, in two layers, all tensors that they have made and still hold, gradients
    too, have together at most
        as many bytes as one layer's scores in float32, heads * columns * columns * 4: of 512 or 1,024 tokens, with 8 heads, a
            hidden_size of 32 and a small vocabulary, with documents and without. So scores are never whole, forward or backward;
        half as many bytes as the logits in float32, columns * vocab_size * 4: of 1,024 tokens, with a vocabulary of 4,000 and one head of
            size 4, without documents. So logits are never whole either.
    A call of `logits` multiplies each token with each matrix once: it has at most as many floating-point operations as 2 * tokens * the
    numbers of all matrices, and 4 * rows * columns * columns * num_attention_heads * head_dim for each layer. Cosines and sines are
    made for all layers and rows at once: at most columns * head_dim numbers of each.
    A tied model has one tensor for both. `load` and `create` draw nothing that they do not need: see there.
    """
    raise NotImplementedError("02.build: loss is not written yet")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each weight, under the names of `state`, as backward passes have left them: a second pass adds to the first. After an
    optimizer's zero_grad() the next pass begins anew."""
    raise NotImplementedError("02.build: gradients is not written yet")


def save(model: nn.Module, folder: Path, most: int) -> None:
    """Write a folder from which transformers and `load` make the same model again, each weight bit for bit.

    Weights have the names above, each once. If all of them together have at most `most` bytes, they are in model.safetensors. Otherwise
    they are in files of at most `most` bytes of weights each (a weight that is larger alone is in a file of its own), and
    model.safetensors.index.json lists them, with {"metadata": {"total_size": the bytes of all weights}} beside its weight_map.
    config.json has what the model was created or loaded with, every key, also those that you do not use; but "dtype" is the weights'
    ("float32", "bfloat16"), and "architectures" is ["LlamaForCausalLM"].
    The folder need not exist. If another model was saved there, whole or in parts, this one replaces it. It may be the folder that the
    model was loaded from: safetensors maps files into memory, so a file must not be overwritten while a weight still lies in it.

    Raises:
        ValueError (stage 12): most is below 1 (the message has it). Nothing is written then.
    """
    raise NotImplementedError("02.build: save is not written yet")
