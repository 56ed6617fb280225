"""Stages 5 to 7 and 9 of build 02: logits, stretched RoPE, packed rows, half precision."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.course.checking import Case

from .pieces import (
    BIASED,
    EPSILON,
    GROUPED,
    LINEAR,
    LLAMA3,
    NAMED,
    NEAR,
    PLAIN,
    TEXT,
    THEIRS,
    THETA,
    TIED,
    WIDE,
    Config,
    Results,
    edited,
    folder_of,
    from_folder,
    ids_of,
    said,
    their_config,
    their_logits,
    their_packed,
    transformers,
)

# Stage 5: logits


def logits_case(title: str, config: Config, ids: Tensor) -> Case:
    expected = lambda **_: {"logits": their_logits(config, ids), "a graph": True}  # noqa: E731

    def observe(adapters: Any, **_: Any) -> Results:
        given = ids.clone()
        found = adapters.logits(adapters.load(folder_of(config)), given)
        changed = {} if torch.equal(given, ids) else {"ids": "changed"}
        return {"logits": found.detach().clone(), "a graph": found.requires_grad} | changed

    return Case("oracle", title, lambda: {"ids": list(ids.shape)} | said(config), expected, THEIRS, observe, **NEAR)


def same_case() -> Case:
    """Two calls of other lengths before, and another model beside: no state is left from one call to the next."""

    def observe(adapters: Any, **_: Any) -> Results:
        first, second = adapters.load(folder_of(PLAIN)), adapters.load(folder_of(THETA))
        with torch.no_grad():
            adapters.logits(second, ids_of(1, 3))
            adapters.logits(first, ids_of(3, 9))
            found = {"first": adapters.logits(first, ids_of(2, 5)), "second": adapters.logits(second, ids_of(2, 30))}
        return found | {"a graph without gradients": found["first"].requires_grad}

    def expected(**_: Any) -> Results:
        found = {"first": their_logits(PLAIN, ids_of(2, 5)), "second": their_logits(THETA, ids_of(2, 30))}
        return found | {"a graph without gradients": False}

    given = {"models": "two, called in turn", "columns": [3, 9, 5, 30]}
    return Case("property", "models do not mind each other", lambda: given, expected, THEIRS, observe, **NEAR)


def trained_case() -> Case:
    """The weights that count are those that the model has now."""

    def change(found: dict[str, Tensor]) -> None:
        for weight in found.values():
            weight.mul_(1.1)

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(TIED))
        with torch.no_grad():
            adapters.logits(model, ids_of(2, 5))
            for weight in model.parameters():
                weight.mul_(1.1)
            return {"logits": adapters.logits(model, ids_of(2, 5)), "state": adapters.state(model)["model.norm.weight"].clone()}

    def expected(**_: Any) -> Results:
        model = from_folder(edited(folder_of(TIED), change))
        with torch.no_grad():
            return {"logits": model(ids_of(2, 5)).logits, "state": model.model.norm.weight.detach().clone()}

    given = {"weights": "multiplied by 1.1 after a first call"} | said(TIED)
    return Case("property", "weights that have changed", lambda: given, expected, THEIRS, observe, **NEAR)


LOGITS = (
    logits_case("one token, one layer, one head", NAMED["one layer, one head"], ids_of(1, 1)),
    logits_case("two tokens, one layer, one head", NAMED["one layer, one head"], ids_of(1, 2)),
    *(logits_case(title, config, ids_of(3, 11, seed=2)) for title, config in NAMED.items()),
    logits_case("the same token everywhere", PLAIN, torch.full((1, 7), 5)),
    logits_case("tokens 0 and the last", PLAIN, torch.tensor([[0, 36, 0, 36, 1]])),
    logits_case("rows longer than max_position_embeddings", GROUPED, ids_of(1, 40)),
    logits_case("as many columns as heads", GROUPED, ids_of(2, 6)),
    logits_case("as many columns as a head has dimensions", WIDE, ids_of(4, 10)),
    logits_case("eight layers", PLAIN | {"num_hidden_layers": 8}, ids_of(1, 6)),
    same_case(),
    trained_case(),
)

# Stage 6: rope

LONG = PLAIN | {"head_dim": 24}


def rope_kind(rope: Config, **changes: Any) -> Config:
    return LONG | {"rope_parameters": rope} | changes


def frequencies_case(title: str, config: Config) -> Case:
    """Tolerance: float32 powers, and the blend in another order."""

    def expected(**_: Any) -> Results:
        rotary = transformers().models.llama.modeling_llama.LlamaRotaryEmbedding
        return {"frequencies": rotary(their_config(config)).inv_freq.clone()}

    observe = lambda adapters, **_: {"frequencies": adapters.frequencies(adapters.settings(dict(config))).clone()}  # noqa: E731
    given = {"rope_parameters": config["rope_parameters"], "head_dim": config["head_dim"]}
    return Case("oracle", title, lambda: given, expected, THEIRS, observe, rtol=1e-5)


REAL = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
OTHER = LLAMA3 | {"factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0, "original_max_position_embeddings": 100}
ROPE = (
    frequencies_case("no scaling", LONG),
    frequencies_case("another theta and size", rope_kind({"rope_type": "default", "rope_theta": 33.0}, head_dim=10)),
    frequencies_case("linear", rope_kind(LINEAR)),
    frequencies_case("llama3", rope_kind(LLAMA3)),
    frequencies_case("llama3, as in LLaMA 3.2", rope_kind(REAL, head_dim=64)),
    frequencies_case("llama3 with other factors", rope_kind(OTHER)),
    frequencies_case("llama3 with a range below 1", rope_kind(OTHER | {"low_freq_factor": 0.25, "high_freq_factor": 1.5})),
    logits_case("logits with linear", rope_kind(LINEAR), ids_of(2, 30)),
    logits_case("logits with llama3", rope_kind(LLAMA3), ids_of(2, 50)),
    logits_case("logits with llama3, tied", TIED | {"rope_parameters": OTHER}, ids_of(2, 50)),
)

# Stage 7: packed


def packed_case(title: str, documents: list[list[int]], config: Config = GROUPED) -> Case:
    numbers = torch.tensor(documents)
    ids = ids_of(*numbers.shape, config, seed=4)
    expected = lambda **_: {"logits": their_packed(config, ids, numbers)}  # noqa: E731

    def observe(adapters: Any, **_: Any) -> Results:
        given = numbers.clone()
        found = adapters.packed_logits(adapters.load(folder_of(config)), ids.clone(), given)
        return {"logits": found.detach().clone()} | ({} if torch.equal(given, numbers) else {"documents": "changed"})

    given = {"documents": documents} | said(config)
    return Case("oracle", title, lambda: given, expected, f"{THEIRS}, each document alone in a row", observe, **NEAR)


def alone_case() -> Case:
    """Another first document changes no logits of the second one, not by a bit."""
    documents = torch.tensor([[1] * 5 + [2] * 6])
    one, other = ids_of(1, 11, seed=5), ids_of(1, 11, seed=6)
    other[:, 5:] = one[:, 5:]

    def observe(adapters: Any, **_: Any) -> Results:
        model = adapters.load(folder_of(PLAIN))
        with torch.no_grad():
            left, right = (adapters.packed_logits(model, ids, documents) for ids in (one, other))
        change = left - right
        return {"largest change in document 2": change[:, 5:].abs().max().item(), "document 1 changed": bool(change[:, :5].any())}

    expected = lambda **_: {"largest change in document 2": 0.0, "document 1 changed": True}  # noqa: E731
    given = {"documents": documents.tolist(), "what": "another document 1"}
    return Case("property", "what stands before changes nothing", lambda: given, expected, TEXT.format(7), observe, rtol=0.0, atol=0.0)


PACKED = (
    packed_case("one document", [[0] * 7]),
    packed_case("two documents", [[0, 0, 0, 1, 1, 1, 1]]),
    packed_case("two documents of one token", [[4, 5]]),
    packed_case("rows with other borders", [[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 4], [0, 1, 2, 3, 4, 5, 6]]),
    packed_case("numbers in any order, below 0 and large", [[-1, -1, 7, 7, 7, -9, 2**40], [5, 5, 0, 0, 0, 3, 3]]),
    packed_case("numbers that end with the same byte", [[0, 0, 256, 256, -256, 2**40], [-1, 255, 255, 511, 65535, 65535]]),
    packed_case("the same number in two rows", [[8, 8, 8, 2, 2], [2, 2, 8, 8, 8]]),
    packed_case("llama3, tied", [[1] * 20 + [2] * 30], TIED | {"rope_parameters": OTHER}),
    packed_case("biases", [[1, 1, 1, 2, 2, 2]], BIASED),
    alone_case(),
)

# Stage 9: half


def half_case(title: str, dtype: torch.dtype, config: Config, ids: Tensor, convert: bool = False) -> Case:
    """How far logits are from those of the same weights in float32, against how far transformers' are. Rounding is chance: 1.5 times as
    far is no mistake, and the mistakes meant here are farther.

    convert: a model of float32 files is converted by `.to(dtype)`; its weights are numbers that the dtype has.
    """
    about = "root mean square of the differences to float32"

    def expected(**_: Any) -> Results:
        return {"dtype": str(dtype), about: "at most 1.5 times transformers'"}

    def exact(found: dict[str, Tensor]) -> None:
        for weight in found.values():
            weight.copy_(weight.to(dtype))

    @functools.cache
    def theirs() -> tuple[Path, Tensor, float]:
        folder = folder_of(config, dtype=dtype)
        with torch.no_grad():
            reference = from_folder(folder, dtype=torch.float32)(ids).logits
            limit = (from_folder(folder, dtype=dtype)(ids).logits.float() - reference).square().mean().sqrt().item()
        return edited(folder_of(config), exact) if convert else folder, reference, limit

    def observe(adapters: Any, **_: Any) -> Results:
        source, reference, limit = theirs()
        with torch.no_grad():
            found = adapters.logits(adapters.load(source).to(dtype), ids)
            error = (found.float() - reference).square().mean().sqrt().item()
        far = "at most 1.5 times transformers'" if error <= 1.5 * limit else f"{error / limit:.3g} times transformers'"
        return {"dtype": str(found.dtype), about: far}

    given = {"dtype": str(dtype), "ids": list(ids.shape)} | said(config)
    return Case("oracle", title, lambda: given, expected, THEIRS, observe)


def overflow_case(scale: float, dtype: torch.dtype) -> Case:
    """Embeddings so large, or so small, that squares leave float16's range. The norms bring them back."""

    def change(found: dict[str, Tensor]) -> None:
        found["model.embed_tokens.weight"].mul_(scale)

    folder = functools.cache(lambda: edited(folder_of(EXTREME), change))

    def expected(**_: Any) -> Results:
        with torch.no_grad():
            return {"logits": from_folder(folder(), dtype=torch.float32)(ids_of(2, 6)).logits}

    def observe(adapters: Any, **_: Any) -> Results:
        with torch.no_grad():
            found = adapters.logits(adapters.load(folder()).to(dtype), ids_of(2, 6))
        return {"logits": found.float()}

    given = {"embeddings": f"of size {scale:g}", "dtype": str(dtype)}
    title = f"embeddings of size {scale:g} in {str(dtype).removeprefix('torch.')}"
    return Case("oracle", title, lambda: given, expected, THEIRS, observe, rtol=0.05, atol=0.1)


EXTREME = PLAIN | {"rms_norm_eps": 1e-12}
FAR = PLAIN | {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}, "head_dim": 8}
HALF = (
    half_case("bfloat16", torch.bfloat16, GROUPED, ids_of(4, 24)),
    half_case("float16", torch.float16, GROUPED, ids_of(4, 24)),
    half_case("bfloat16, converted", torch.bfloat16, THETA, ids_of(4, 24), convert=True),
    half_case("float16, converted, tied and biased", torch.float16, BIASED | {"tie_word_embeddings": True}, ids_of(4, 24), convert=True),
    half_case("far positions in bfloat16", torch.bfloat16, FAR, ids_of(1, 600)),
    half_case("far positions in bfloat16, converted", torch.bfloat16, FAR, ids_of(1, 600), convert=True),
    half_case("far positions in float16", torch.float16, FAR, ids_of(1, 2500)),
    overflow_case(1000.0, torch.float16),
    half_case("an epsilon that is felt", torch.bfloat16, EPSILON, ids_of(4, 24)),
)
