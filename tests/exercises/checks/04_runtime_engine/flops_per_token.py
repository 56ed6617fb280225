"""Check of 04.flops_per_token. Oracle: torch.utils.flop_counter.FlopCounterMode, which watches chapter 02's models run forward and
backward and adds up their matrix products. Published totals stand beside it.

Tolerances: none. Counts are whole numbers, and the watched ones must be met to the last digit.
"""

import functools

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shared.course.checking import Case, Check
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel

CONTRACT = "the contract"
ORACLE = "torch.utils.flop_counter.FlopCounterMode around a forward and a backward pass"
BATCH = 3

SMALL = {
    "vocab_size": 13, "hidden_size": 10, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 7, "attention": "eager",
}
GPT3 = {
    "vocab_size": 50257, "hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96, "intermediate_size": 49152,
    "gated": False, "position": "learned", "norm": "layer_norm", "tie_word_embeddings": True, "max_position_embeddings": 2048,
}


def model(seq: int, **fields):
    return lambda: {"fields": SMALL | fields, "seq": seq}


def call(function, fields, seq):
    config = ModelConfig(**fields)
    flops = function(config, seq)
    return {"flops": flops} | ({} if config == ModelConfig(**fields) else {"changed the configuration": True})


def counted(fields, seq):
    return {"flops": watched_flops(ModelConfig(**fields), seq)}


@functools.cache
def watched_flops(config: ModelConfig, seq: int) -> int | float:
    """FLOPs of one step on BATCH sequences, by the tokens in them."""
    model = TransformerModel(config)
    ids = torch.arange(BATCH * seq).reshape(BATCH, seq) % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    flops, rest = divmod(counter.get_total_flops(), BATCH * seq)
    return flops if not rest else flops + rest / (BATCH * seq)


def answer(flops: int):
    return lambda **given: {"flops": flops}


def over_300_billion_tokens(function, fields, seq):
    return {"FLOPs of 300 billion tokens": f"{function(ModelConfig(**fields), seq) * 300_000_000_000:.2e}"}


def raised(**given):
    return {"raised": "ValueError"}


def watched(title: str, seq: int, **fields) -> Case:
    return Case("oracle", title, model(seq, **fields), counted, ORACLE, call)


ONE_LAYER = {"vocab_size": 5, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 7}

CHECK = Check(
    exercise="04.flops_per_token",
    outputs=("flops",),
    spoilt=("flops",),
    cases=[
        Case("shape and dtype", "a whole number", model(11), answer(0), CONTRACT, call),
        Case(
            "worked example", "one layer, D = 6, one head, inner width 7, vocabulary 5, a sequence of 11",
            model(11, **ONE_LAYER, gated=False), answer(2340),
            "arithmetic: 6 * (4 * 6 * 6 + 2 * 6 * 7 + 6 * 5) + 12 * 1 * 6 * 11 = 1548 + 792", call,
        ),
        Case(
            "worked example", "the same with a gate: a third matrix [6, 7]", model(11, **ONE_LAYER),
            answer(2592), "arithmetic: 2340 + 6 * 6 * 7", call,
        ),
        Case(
            "worked example", "the same with four layers", model(11, **ONE_LAYER | {"num_hidden_layers": 4}),
            answer(9828), "arithmetic: 6 * (4 * (4 * 6 * 6 + 3 * 6 * 7) + 6 * 5) + 12 * 4 * 6 * 11 = 6660 + 3168", call,
        ),
        Case(
            "property", "GPT-3 on its 300 billion tokens, without the scores (seq 1)", lambda: {"fields": GPT3, "seq": 1},
            lambda **given: {"FLOPs of 300 billion tokens": "3.14e+23"}, "Brown et al. 2020, table D.1: 3.14E+23",
            over_300_billion_tokens,
        ),
        Case(
            "property", "tying the head to the embedding changes nothing", model(11, tie_word_embeddings=True),
            lambda **given: counted(**model(11)()), f"{ORACLE}, of the untied model", call,
        ),
        Case("property", "an encoder-decoder is refused", model(11, architecture="encoder-decoder"), raised, CONTRACT, call),
        Case("property", "a sequence of 0 tokens is refused", model(0), raised, CONTRACT, call),
        Case("property", "a sequence of -3 tokens is refused", model(-3), raised, CONTRACT, call),
        watched("a small LLaMA", 11),
        watched(
            "grouped queries: 6 heads share 2, and 6 * 4 is not the width 10", 17,
            num_attention_heads=6, num_key_value_heads=2, head_dim=4,
        ),
        watched(
            "a small GPT-2: tied, no gate, biases", 7, gated=False, tie_word_embeddings=True, position="learned", norm="layer_norm",
            attention_bias=True, attention_output_bias=True, mlp_bias=True,
        ),
        watched("one key-value head, normalised queries and keys", 19, num_key_value_heads=1, qk_norm=True),
        watched("sizes left to their defaults: head size, inner width 64 and key-value heads", 5, intermediate_size=None),
        watched("a window of 3 tokens: all scores are computed, and counted", 23, sliding_window=3),
        watched(
            "a small BERT: an encoder with an mlm head, which has a matrix more", 13,
            architecture="encoder", head="mlm", position="learned", vocab_size=11, head_dim=4,
        ),
        watched("an encoder with two segments, and with the usual head", 17, architecture="encoder", position="learned", type_vocab_size=2),
        watched("a sequence longer than the model is made for", 19, max_position_embeddings=7),
    ],
)
