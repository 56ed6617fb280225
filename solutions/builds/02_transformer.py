"""Chapter 02. A LLaMA from scratch: read a Hugging Face folder, compute logits, loss and gradients, and write a folder.

    x = x + attention(norm(x))
    x = x + down(silu(gate(norm(x))) * up(norm(x)))         in each layer; then a norm, and the head

Modules are named as in LlamaForCausalLM, so `state_dict` has the names of its files. (Touvron et al. 2023; RoPE: Su et al. 2021.)
"""

import json
import math

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE = {"default": (), "linear": ("factor",), "llama3": LLAMA3}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IGNORED, TOKENS = -100, 64  # a target that is none; how many tokens' logits `loss` holds at a time


def require(condition, message):
    if not condition:
        raise ValueError(message)


def whole(key, value):
    require(type(value) is int and value >= 1, f"{key} is {value!r}: it must be an integer of at least 1.")  # True is of another type
    return value


def settings(config):
    for key, only in (("model_type", ("llama",)), ("hidden_act", ("silu", None)), ("quantization_config", (None,))):
        require(config.get(key) in only, f"{key} is {str(config.get(key))[:60]!r}, and only {only[0]!r} is known here.")
    given = {key: value for key, value in config.items() if value is not None}
    found = {key: whole(key, given.get(key)) for key in REQUIRED}
    heads = found["num_attention_heads"]
    shared = found["num_key_value_heads"] = whole("num_key_value_heads", given.get("num_key_value_heads", heads))
    found["head_dim"] = whole("head_dim", given.get("head_dim", found["hidden_size"] // heads))
    require(heads % shared == 0, f"num_key_value_heads is {shared}, which does not divide {heads} heads.")
    require(found["head_dim"] % 2 == 0, f"head_dim is {found['head_dim']}: RoPE turns pairs, so it must be even.")
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}  # as transformers 5 writes it, or 4
    kind = rope.get("rope_type") or rope.get("type") or "default"
    require(kind in ROPE, f"rope_type is {kind!r}, and only {', '.join(ROPE)} are known here.")
    for key in ROPE[kind]:
        require(rope.get(key) is not None, f"RoPE of type {kind} needs {key}, which the configuration lacks.")
    found["rope_theta"] = rope.get("rope_theta") or given.get("rope_theta", 10000.0)
    found["rope_scaling"] = None if kind == "default" else {"rope_type": kind} | {key: rope[key] for key in ROPE[kind]}
    return found | {key: given.get(key, default) for key, default in DEFAULTS.items()}


def read_json(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): copy it again.") from None
    require(isinstance(found, dict), f"{path} holds no JSON object: copy it again.")
    return found


def tensors(folder):
    names, found = {}, {}  # names of each file; None for all that it holds
    if (folder / INDEX).exists():
        for name, file in read_json(folder / INDEX)["weight_map"].items():
            names.setdefault(file, []).append(name)
    else:
        require((folder / SINGLE).exists(), f"{folder} has neither {SINGLE} nor {INDEX}: no weights that can be read without running code.")
        names = {SINGLE: None}
    for file, wanted in names.items():
        try:
            with safe_open(folder / file, "pt") as opened:  # a copy: what is read is mapped from the file, which may be replaced
                found |= {name: opened.get_tensor(name).clone() for name in wanted or opened.keys()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder / file} is missing, cut short, or lacks a tensor that the index expects in it: {error}") from None
    return found


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x):
        wide = x.float()  # squares overflow in float16, and lose digits in bfloat16
        return self.weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # the half-rotated layout: i with i + d/2
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.size, self.group = s["head_dim"], s["num_attention_heads"] // s["num_key_value_heads"]
        queries, hidden, bias = s["num_attention_heads"] * self.size, s["hidden_size"], s["attention_bias"]
        self.q_proj, self.o_proj = nn.Linear(hidden, queries, bias), nn.Linear(queries, hidden, bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, queries // self.group, bias) for _ in range(2))

    def forward(self, x, cos, sin, mask):
        q, k, v = (proj(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (each.repeat_interleave(self.group, dim=1) for each in (k, v))  # neighbours share a head: 0, 0, 1, 1
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # the scores are never whole
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, s):
        super().__init__()
        hidden, inner, bias = s["hidden_size"], s["intermediate_size"], s["mlp_bias"]
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(s["hidden_size"], s["rms_norm_eps"]), Attention(s)
        self.post_attention_layernorm, self.mlp = RMSNorm(s["hidden_size"], s["rms_norm_eps"]), FeedForward(s)

    def forward(self, x, *shared):
        x = x + self.self_attn(self.input_layernorm(x), *shared)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """config: of config.json. weights(name, parameter) -> the tensor that a parameter begins with, of which only the shape is known."""

    def __init__(self, config, weights):
        super().__init__()
        s = self.settings = settings(config)
        self.config = config
        with torch.device("meta"):
            self.model = nn.Module()
            self.model.embed_tokens = nn.Embedding(s["vocab_size"], s["hidden_size"])
            self.model.layers = nn.ModuleList([Layer(s) for _ in range(s["num_hidden_layers"])])
            self.model.norm = RMSNorm(s["hidden_size"], s["rms_norm_eps"])
            self.lm_head = None if s["tie_word_embeddings"] else nn.Linear(s["hidden_size"], s["vocab_size"], bias=False)
        self.load_state_dict({name: weights(name, like) for name, like in self.named_parameters()}, assign=True)

    def hidden(self, ids, documents=None):
        require(ids.dim() == 2 and ids.dtype == torch.int64, f"ids are {ids.dtype} {list(ids.shape)}: they must be int64 [rows, columns].")
        if (strange := ids[(ids < 0) | (ids >= self.settings["vocab_size"])]).numel():
            raise ValueError(f"There is a token {strange[0]}, and the vocabulary has 0 to {self.settings['vocab_size'] - 1}.")
        mask = None
        if documents is not None:
            require(documents.shape == ids.shape, f"documents have shape {list(documents.shape)}, and ids {list(ids.shape)}.")
            mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        angles = torch.arange(ids.shape[1])[:, None].float() * frequencies(self.settings)  # no buffer, which `.to` would round
        cos, sin, x = angles.cos(), angles.sin(), self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def head(self, x):
        return F.linear(x, (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight)

    def loss_of(self, x, targets):
        return F.cross_entropy(self.head(x).float(), targets, reduction="sum", ignore_index=IGNORED)


def create(config, seed):
    random = torch.Generator().manual_seed(seed)

    def drawn(name, like):
        if like.dim() == 1:
            return torch.ones(like.shape) if name.endswith("norm.weight") else torch.zeros(like.shape)
        return torch.empty(like.shape).normal_(0.0, settings(config)["initializer_range"], generator=random)

    return Llama(config, drawn)


def state(model):
    return model.state_dict()


def load(folder):
    config = read_json(folder / "config.json")
    found = {name: tensor for name, tensor in tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if settings(config)["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)

    def read(name, like):
        require(name in found, f"{folder} has no tensor {name}, which its config.json calls for.")
        tensor = found.pop(name)
        require(tensor.shape == like.shape, f"{name} is {list(tensor.shape)} in {folder}, and by its config.json {list(like.shape)}.")
        return tensor

    model = Llama(config, read)
    require(not found, f"{folder} has tensors for which its config.json has no place: {', '.join(sorted(found))[:200]}.")
    return model


def logits(model, ids):
    return model.head(model.hidden(ids))


def frequencies(settings):
    scaling, size = settings["rope_scaling"], settings["head_dim"]
    found = 1.0 / settings["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if scaling is None:
        return found
    if scaling["rope_type"] == "linear":  # Chen et al. 2023
        return found / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)  # that a pair makes over the context of the pretraining
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # fast pairs stay, slow ones are stretched, and those between are blended
    return kept * found + (1 - kept) * found / scaling["factor"]


def packed_logits(model, ids, documents):
    return model.head(model.hidden(ids, documents))


def loss(model, ids, documents=None):
    targets = ids[:, 1:]
    hidden = model.hidden(ids, documents)[:, :-1].flatten(0, 1)
    if documents is not None:
        targets = targets.where(documents[:, 1:] == documents[:, :-1], IGNORED)  # a document's end predicts nothing
    parts = zip(hidden.split(TOKENS), targets.flatten().split(TOKENS))
    losses = [checkpoint(model.loss_of, *part, use_reentrant=False) for part in parts]  # logits are made again in the backward pass
    return sum(losses) / (targets != IGNORED).sum()


def gradients(model):
    return {name: weight.grad for name, weight in model.named_parameters()}


def save(model, folder, most):
    require(most >= 1, f"most is {most}: a file needs at least 1 byte.")
    weights, shards, filled = state(model), [[]], 0
    for name, tensor in weights.items():
        if shards[-1] and filled + tensor.nbytes > most:
            shards, filled = [*shards, []], 0
        shards[-1].append(name)
        filled += tensor.nbytes
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):  # of another model: an old index, or an old single file, would be read first
        old.unlink()
    for file, names in zip(files, shards):
        save_file({name: weights[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    if count > 1:
        places = {name: file for file, names in zip(files, shards) for name in names}
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    dtype = str(weights["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    changes = {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(model.config | changes, indent=2), encoding="utf-8")
