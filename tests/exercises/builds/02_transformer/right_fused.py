"""Another right build of chapter 02: fused projections. A layer has one matrix for queries, keys and values, and one for gate and up, which
are cut where a folder is read or written. Tables of cosines are made once and kept, outside of the modules' buffers; attention is
PyTorch's; the loss has a backward pass of its own.
"""

import json
import math
import os
import struct

import torch
import torch.nn.functional as F
from safetensors.torch import save as bytes_of
from torch import nn

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 32


def need(condition, message):
    if not condition:
        raise ValueError(message)


def settings(config):
    get = lambda key, default=None: default if config.get(key) is None else config[key]  # noqa: E731
    need(get("model_type") == "llama", f"model_type {get('model_type')!r} is unknown.")
    need(get("hidden_act", "silu") == "silu", f"hidden_act {get('hidden_act')!r} is unknown.")
    need(get("quantization_config") is None, "quantization_config is there: only plain weights are read.")

    def size(key, value):
        need(isinstance(value, int) and not isinstance(value, bool) and value > 0, f"{key} is {value!r}, no positive integer.")
        return value

    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    out = {key: size(key, get(key)) for key in keys.split()}
    out["num_key_value_heads"] = size("num_key_value_heads", get("num_key_value_heads", out["num_attention_heads"]))
    out["head_dim"] = size("head_dim", get("head_dim", out["hidden_size"] // out["num_attention_heads"]))
    need(out["num_attention_heads"] % out["num_key_value_heads"] == 0, f"num_key_value_heads {out['num_key_value_heads']} does not divide.")
    need(out["head_dim"] % 2 == 0, f"head_dim {out['head_dim']} is odd.")
    out |= {"rms_norm_eps": get("rms_norm_eps", 1e-6), "initializer_range": get("initializer_range", 0.02)}
    out |= {key: get(key, False) for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")}
    rope = {key: value for key, value in (get("rope_parameters") or get("rope_scaling") or {}).items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    out["rope_theta"] = rope.get("rope_theta", get("rope_theta", 10000))
    options = {"default": "", "linear": "factor", "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings"}
    need(kind in options, f"rope_type {kind!r} is unknown.")
    for key in options[kind].split():
        need(key in rope, f"{kind} lacks {key}.")
    out["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **{key: rope[key] for key in options[kind].split()}}
    return out


def read_file(path):
    """A safetensors file: eight bytes with the length of the header, the header as JSON, the numbers."""
    need(path.exists(), f"{path} is missing.")
    data = path.read_bytes()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header, body, found = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :]), {}
        for name, about in header.items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                need(last <= len(body), "cut short")
                found[name] = torch.frombuffer(body[first:last], dtype=DTYPES[about["dtype"]]).reshape(about["shape"])
    except (ValueError, KeyError, struct.error) as error:
        raise ValueError(f"{path} is broken: {error}") from None
    return found


def tensors(folder):
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        need(single.exists(), f"{folder} has no weights.")
        return read_file(single)
    places, files, found = json.loads(index.read_text())["weight_map"], {}, {}
    for name, file in places.items():
        files[file] = files.get(file) or read_file(folder / file)
        need(name in files[file], f"{folder / file} has no {name}.")
        found[name] = files[file][name]
    return found


def shapes(s):
    hidden, inner, d = s["hidden_size"], s["intermediate_size"], s["head_dim"]
    queries, others, out = s["num_attention_heads"] * d, s["num_key_value_heads"] * d, {}
    out["model.embed_tokens.weight"] = (s["vocab_size"], hidden)
    linears = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (others, hidden), "self_attn.v_proj": (others, hidden)}
    linears |= {"self_attn.o_proj": (hidden, queries), "mlp.down_proj": (hidden, inner)}
    linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    for layer in range(s["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{prefix}{name}.weight"] = (hidden,)
        for name, shape in linears.items():
            out[f"{prefix}{name}.weight"] = shape
            if s["attention_bias" if "attn" in name else "mlp_bias"]:
                out[f"{prefix}{name}.bias"] = shape[:1]
    out["model.norm.weight"] = (hidden,)
    if not s["tie_word_embeddings"]:
        out["lm_head.weight"] = (s["vocab_size"], hidden)
    return out


class Layer(nn.Module):
    def __init__(self, s, take):
        super().__init__()
        self.s, make = s, lambda *names: None if names[0] is None else nn.Parameter(torch.cat([take(name) for name in names]))  # noqa: E731
        attention, mlp = ([f"{part}.{name}_proj" for name in names] for part, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))))
        for own, names, bias in (("qkv", attention, "attention_bias"), ("gate_up", mlp, "mlp_bias"),
                                 ("o", ["self_attn.o_proj"], "attention_bias"), ("down", ["mlp.down_proj"], "mlp_bias")):  # fmt: skip
            setattr(self, own, make(*(f"{name}.weight" for name in names)))
            setattr(self, f"{own}_bias", make(*(f"{name}.bias" for name in names)) if s[bias] else None)
        self.norms = nn.ParameterList([nn.Parameter(take(f"{name}_layernorm.weight")) for name in ("input", "post_attention")])

    def parts(self):
        """Name -> the parameter that holds a weight, and its rows."""
        s = self.s
        d, inner, out = s["head_dim"], s["intermediate_size"], {}
        q, k = s["num_attention_heads"] * d, s["num_key_value_heads"] * d
        rows = {"self_attn.q_proj": ("qkv", 0, q), "self_attn.k_proj": ("qkv", q, q + k), "self_attn.v_proj": ("qkv", q + k, q + 2 * k)}
        rows |= {"mlp.gate_proj": ("gate_up", 0, inner), "mlp.up_proj": ("gate_up", inner, 2 * inner)}
        rows |= {"self_attn.o_proj": ("o", 0, None), "mlp.down_proj": ("down", 0, None)}
        for name, (own, first, last) in rows.items():
            out[f"{name}.weight"] = getattr(self, own), slice(first, last)
            if getattr(self, f"{own}_bias") is not None:
                out[f"{name}.bias"] = getattr(self, f"{own}_bias"), slice(first, last)
        out["input_layernorm.weight"], out["post_attention_layernorm.weight"] = ((norm, slice(None)) for norm in self.norms)
        return out

    def forward(self, x, tables, mask):
        s, eps = self.s, self.s["rms_norm_eps"]
        d, heads, groups = s["head_dim"], s["num_attention_heads"], s["num_key_value_heads"]
        h = F.linear(norm(x, self.norms[0], eps), self.qkv, self.qkv_bias).unflatten(-1, (-1, d)).transpose(1, 2)
        q, k, v = h.split([heads, groups, groups], dim=1)
        q, k = (each * tables[0] + torch.cat([-each[..., d // 2 :], each[..., : d // 2]], -1) * tables[1] for each in (q, k))
        k, v = (each[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2) for each in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2)
        x = x + F.linear(h.reshape(*x.shape[:2], -1), self.o, self.o_bias)
        gate, up = F.linear(norm(x, self.norms[1], eps), self.gate_up, self.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


class Model(nn.Module):
    def __init__(self, config, weights):
        super().__init__()
        self.config, self.s, self.tables = config, settings(config), {}
        self.embedding = nn.Parameter(weights["model.embed_tokens.weight"])
        own = lambda number: lambda name: weights[f"model.layers.{number}.{name}"]  # noqa: E731
        self.layers = nn.ModuleList([Layer(self.s, own(number)) for number in range(self.s["num_hidden_layers"])])
        self.norm = nn.Parameter(weights["model.norm.weight"])
        self.head = self.embedding if self.s["tie_word_embeddings"] else nn.Parameter(weights["lm_head.weight"])

    def parts(self):
        out = {"model.embed_tokens.weight": (self.embedding, slice(None)), "model.norm.weight": (self.norm, slice(None))}
        for number, layer in enumerate(self.layers):
            out |= {f"model.layers.{number}.{name}": part for name, part in layer.parts().items()}
        return out if self.s["tie_word_embeddings"] else out | {"lm_head.weight": (self.head, slice(None))}

    def table(self, columns, dtype):
        if (columns, dtype) not in self.tables:
            angles = torch.arange(columns)[:, None].float() * frequencies(self.s)
            self.tables[columns, dtype] = tuple(table.repeat(1, 2).to(dtype) for table in (angles.cos(), angles.sin()))
        return self.tables[columns, dtype]

    def forward(self, ids, documents=None):
        need(ids.dtype == torch.int64 and ids.ndim == 2, f"ids are {ids.dtype} with {ids.ndim} dimensions, shape {tuple(ids.shape)}.")
        for worst in (int(ids.min()), int(ids.max())):
            need(0 <= worst < self.s["vocab_size"], f"token {worst} is none of {self.s['vocab_size']}.")
        mask = None
        if documents is not None:
            need(documents.shape == ids.shape, f"documents {list(documents.shape)} for ids {list(ids.shape)}.")
            place = torch.arange(ids.shape[1])
            begin = F.pad((documents[:, 1:] != documents[:, :-1]).cumsum(1), (1, 0))
            mask = ((begin[:, None] == begin[:, :, None]) & (place <= place[:, None]))[:, None]
            mask = torch.zeros(mask.shape, dtype=self.embedding.dtype).masked_fill(~mask, -math.inf)  # once for all layers
        x = F.embedding(ids, self.embedding)
        for layer in self.layers:
            x = layer(x, self.table(ids.shape[1], x.dtype), mask)
        return norm(x, self.norm, self.s["rms_norm_eps"])


def norm(x, weight, eps):
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def create(config, seed):
    s, generator = settings(config), torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.normal(0.0, s["initializer_range"], shape, generator=generator)  # noqa: E731
    fill = lambda name, shape: draw(shape) if len(shape) > 1 else torch.full(shape, float("norm" in name))  # noqa: E731
    return Model(dict(config), {name: fill(name, shape) for name, shape in shapes(s).items()})


def state(model):
    return {name: weight.detach()[rows] for name, (weight, rows) in model.parts().items()}


def load(folder):
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json of {folder}: {error}") from None
    need(isinstance(config, dict), f"config.json of {folder} is no object.")
    wanted, found = shapes(settings(config)), tensors(folder)
    for name, shape in wanted.items():
        need(name in found, f"{name} is missing.")
        need(found[name].shape == shape, f"{name} is {list(found[name].shape)} and not {list(shape)}.")
    for name in found.keys() - wanted.keys():
        tied = name == "lm_head.weight" and config.get("tie_word_embeddings")
        need(name.endswith("rotary_emb.inv_freq") or tied, f"{name} is not part of this model.")
    return Model(config, {name: found[name] for name in wanted})


def logits(model, ids):
    return model(ids) @ model.head.T


def packed_logits(model, ids, documents):
    return model(ids, documents) @ model.head.T


def frequencies(settings):
    d, scaling, out = settings["head_dim"], settings["rope_scaling"], []
    for i in range(d // 2):
        f = settings["rope_theta"] ** (-2 * i / d)
        if scaling and scaling["rope_type"] == "linear":
            f /= scaling["factor"]
        elif scaling:
            turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
            share = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            share = min(1.0, max(0.0, share))
            f *= share + (1 - share) / scaling["factor"]
        out.append(f)
    return torch.tensor(out, dtype=torch.float32)


class Loss(torch.autograd.Function):
    """Sums of cross-entropies, and their gradients in the same pass, so that no logits are kept."""

    @staticmethod
    def forward(ctx, x, head, targets):
        total, dx, dhead = torch.zeros(()), torch.empty_like(x), torch.zeros_like(head)
        for first in range(0, len(x), BLOCK):
            part = slice(first, first + BLOCK)
            logits = (x[part] @ head.T).float()
            total += F.cross_entropy(logits, targets[part], reduction="sum")
            slope = logits.softmax(-1)
            slope[torch.arange(len(slope)), targets[part]] -= 1
            slope = slope.to(x.dtype)
            dx[part], dhead = slope @ head, dhead + slope.T @ x[part]
        ctx.save_for_backward(dx, dhead)
        return total

    @staticmethod
    def backward(ctx, slope):
        dx, dhead = ctx.saved_tensors
        return slope.to(dx.dtype) * dx, slope.to(dx.dtype) * dhead, None


def loss(model, ids, documents=None):
    x, documents = model(ids, documents), torch.zeros_like(ids) if documents is None else documents
    predicts = documents[:, 1:] == documents[:, :-1]
    return Loss.apply(x[:, :-1][predicts], model.head, ids[:, 1:][predicts]) / predicts.sum()


def gradients(model):
    return {name: None if weight.grad is None else weight.grad[rows] for name, (weight, rows) in model.parts().items()}


def save_file(path, weights):
    """Written beside, then put in place: nothing that is mapped is overwritten."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(bytes_of({name: weight.contiguous() for name, weight in weights.items()}, {"format": "pt"}))
    os.replace(part, path)


def save(model, folder, most):
    need(most >= 1, f"most is {most}.")
    weights = state(model)
    os.makedirs(folder, exist_ok=True)
    total, shards = sum(weight.nbytes for weight in weights.values()), [{}]
    for name, weight in sorted(weights.items(), key=lambda item: -item[1].nbytes):  # first fit, the largest first
        place = next((shard for shard in shards if not shard or sum(w.nbytes for w in shard.values()) + weight.nbytes <= most), None)
        if place is None:
            shards.append(place := {})
        place[name] = weight
    count = len(shards)
    names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for name, shard in zip(names, shards, strict=True):
        save_file(folder / name, shard)
    index = folder / "model.safetensors.index.json"
    for old in folder.glob("model*.safetensors"):
        if old.name not in names:
            old.unlink()
    index.unlink(missing_ok=True)
    if len(shards) > 1:
        places = {weight: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    kind = str(next(iter(weights.values())).dtype)[6:]
    (folder / "config.json").write_text(json.dumps({**model.config, "architectures": ["LlamaForCausalLM"], "dtype": kind}))
