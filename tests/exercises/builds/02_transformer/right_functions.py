"""Another right build of chapter 02: no layers as modules. A model holds its weights in a list, and functions look them up by name.

Rotation by complex numbers, attention by blocks of queries with einsum, grouped heads without repeating them, every block computed again in
the backward pass, files read by hand.
"""

import json
import math
import os
import struct

import torch
from safetensors.torch import save as bytes_of
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    out |= {key: get(key, value) for key, value in {"rms_norm_eps": 1e-6, "initializer_range": 0.02}.items()}
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


class Model(nn.Module):
    def __init__(self, config, weights):
        super().__init__()
        self.config, self.s, self.names = config, settings(config), list(weights)
        self.weights = nn.ParameterList([nn.Parameter(weight) for weight in weights.values()])

    def named(self):
        return dict(zip(self.names, self.weights, strict=True))


def create(config, seed):
    s, generator = settings(config), torch.Generator()
    generator.manual_seed(seed)
    weights = {}
    for name, shape in shapes(s).items():
        matrix = torch.randn(shape, generator=generator) * s["initializer_range"] if len(shape) > 1 else None
        weights[name] = torch.full(shape, float("norm" in name)) if matrix is None else matrix
    return Model(dict(config), weights)


def state(model):
    return {name: weight.detach() for name, weight in model.named().items()}


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


def norm(x, weight, eps):
    return (x.float() / torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def turned(x, spin):
    """x: [rows, columns, heads, d]; spin: [columns, d / 2] complex."""
    half = x.shape[-1] // 2
    both = torch.view_as_real(torch.complex(x[..., :half].float(), x[..., half:].float()) * spin[:, None])
    return torch.cat([both[..., 0], both[..., 1]], dim=-1).to(x.dtype)


def block_of(q, k, v, places, documents):
    """Queries [rows, block, K, n, d] at `places`."""
    scores = torch.einsum("bqkgd,btkd->bkgqt", q, k).float() * q.shape[-1] ** -0.5
    seen = places[:, None] >= torch.arange(k.shape[1])
    if documents is not None:
        seen = seen & (documents[:, places, None] == documents[:, None, :])[:, None, None]
    weights = torch.softmax(torch.where(seen, scores, -math.inf), dim=-1).to(v.dtype)
    return torch.einsum("bkgqt,btkd->bqkgd", weights, v).flatten(2)


def hidden(model, ids, documents=None):
    need(ids.dtype == torch.int64 and ids.ndim == 2, f"ids are {ids.dtype} with {ids.ndim} dimensions, shape {tuple(ids.shape)}.")
    s, w, (rows, columns) = model.s, model.named(), ids.shape
    for worst in (int(ids.min()), int(ids.max())):
        need(0 <= worst < s["vocab_size"], f"token {worst} is none of {s['vocab_size']}.")
    need(documents is None or documents.shape == ids.shape, f"documents {getattr(documents, 'shape', 0)} for ids {ids.shape}.")
    angles = torch.outer(torch.arange(columns).float(), frequencies(s))
    spin, d = torch.polar(torch.ones_like(angles), angles), s["head_dim"]
    x = w["model.embed_tokens.weight"][ids]

    def linear(x, name):
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    for layer in range(s["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        h = norm(x, w[own + "input_layernorm.weight"], s["rms_norm_eps"])
        q, k, v = (linear(h, f"{own}self_attn.{n}_proj").reshape(rows, columns, -1, d) for n in "qkv")
        q, k = turned(q, spin).reshape(rows, columns, s["num_key_value_heads"], -1, d), turned(k, spin)
        blocks = torch.arange(columns).split(BLOCK)
        mixed = [checkpoint(block_of, q[:, places], k, v, places, documents, use_reentrant=False) for places in blocks]
        x = x + linear(torch.cat(mixed, dim=1), own + "self_attn.o_proj")
        h = norm(x, w[own + "post_attention_layernorm.weight"], s["rms_norm_eps"])
        gate = linear(h, own + "mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, own + "mlp.up_proj"), own + "mlp.down_proj")
    return norm(x, w["model.norm.weight"], s["rms_norm_eps"])


def head(model):
    w = model.named()
    return w.get("lm_head.weight", w["model.embed_tokens.weight"])


def logits(model, ids):
    return hidden(model, ids) @ head(model).T


def packed_logits(model, ids, documents):
    return hidden(model, ids, documents) @ head(model).T


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


def block_loss(x, weight, targets):
    return -(x @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None]).sum()


def loss(model, ids, documents=None):
    x = hidden(model, ids, documents)
    predicts = torch.ones_like(ids[:, 1:], dtype=torch.bool) if documents is None else documents[:, 1:] == documents[:, :-1]
    x, targets, total = x[:, :-1][predicts], ids[:, 1:][predicts], 0.0
    for start in range(0, len(x), BLOCK):
        part = x[start : start + BLOCK], head(model), targets[start : start + BLOCK]
        total = total + checkpoint(block_loss, *part, use_reentrant=False)
    return total / len(x)


def gradients(model):
    return {name: weight.grad for name, weight in model.named().items()}


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
