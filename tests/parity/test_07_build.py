"""The oracle of build 07: with the build's weights, its model in one process computes what Hugging Face's LlamaForCausalLM does."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.course import assignments, build_check

NEAR = {"rtol": 1e-5, "atol": 1e-5}  # theirs computes norms and RoPE in float32, whatever the weights' dtype: 6e-7 was measured


def test_the_builds_oracle_is_a_llama():
    pieces = build_check.read_module(assignments.builds()["07.build"].folder / "pieces.py")
    config = pieces.config_of({"num_key_value_heads": 2})
    weights, theirs = pieces.weights_of(config), {}
    for name, weight in weights.items():
        old_new = {"embedding.": "model.embed_tokens.", "final_norm": "model.norm", "head.": "lm_head.", "blocks.": "model.layers."}
        old_new |= {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        old_new |= {"attention.": "self_attn.", "feed_forward.": "mlp."}
        for old, new in old_new.items():
            name = name.replace(old, new)
        if "gate_up" in name:
            theirs |= dict(zip((name.replace("gate_up", "gate"), name.replace("gate_up", "up")), weight.chunk(2), strict=True))
        else:
            theirs[name] = weight
    sizes = {name: getattr(config, name) for name in pieces.SIZES}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=config.norm_eps, attention_bias=True, mlp_bias=True)).double()
    llama.load_state_dict(theirs)
    ids, targets = pieces.tokens(config, 6)
    whole = pieces.Whole(config, weights)
    torch.testing.assert_close(whole.model(ids), llama(ids).logits, **NEAR)
    whole.loss(ids, targets).backward()
    pieces.cross_entropy(llama(ids).logits, targets).backward()
    gradient = whole.gradients()["blocks.1.feed_forward.gate_up_proj.weight"]
    mlp = llama.model.layers[1].mlp
    torch.testing.assert_close(gradient, torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]), **NEAR)
