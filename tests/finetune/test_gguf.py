"""GGUF written and read: logits and ids are llama.cpp's own, for every family; a round trip gives the model back."""

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoModelForCausalLM

import shared.moe.hf  # noqa: F401 (adds the mixtures)
from llama_cpp import answers_of
from shared.course.errors import SettingError
from shared.finetune.gguf import write
from shared.finetune.gguf.file import GgufFile
from shared.finetune.gguf.packaged import TYPES
from shared.finetune.gguf.tokenizer import COMPOSED, KINDS, WHOLE_WORDS
from shared.finetune.gguf.unpack import unpack, unpacked
from shared.finetune.gguf.write import plain_template, save_gguf
from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained
from shared.moe.builders import MIXTURE

ROWS = 320
SIZES = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
FAMILIES = {  # name -> transformers' class, and what its configuration has beside SIZES
    "llama": ("Llama", {}),
    "llama with biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                                                  "original_max_position_embeddings": 64}}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 16} | EXPERTS),
}  # fmt: skip
IDS = random.Random(0).choices(range(ROWS), k=24)
ALPHABET = "abc DEF123  \n\t.,'s’ée\u0301日本語🙂한국\u00a0\u2028-_()<|>ßñ१२"


def random_texts(count: int) -> list[str]:
    chance = random.Random(1)
    return ["".join(chance.choices(ALPHABET, k=chance.randint(1, 40))) for _ in range(count)]


def make_tokenizer(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer, tokenizer.decoder = KINDS[pre], decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    names = [AddedToken(name, special=True, normalized=False) for name in ("<|begin|>", "<|end|>")]
    trainer = trainers.BpeTrainer(vocab_size=ROWS - 10, special_tokens=names, initial_alphabet=sorted(_bytes()), show_progress=False)
    tokenizer.train_from_iterator(random_texts(300), trainer)
    return tokenizer


def _bytes() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def make_folder(folder: Path, kind: str, settings: dict, pre: str = "gpt-2") -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    make_tokenizer(pre).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text("{%- generation -%}{{ messages[0].content }}{%- endgeneration %}")
    return folder


def next_of(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1) for prompt in prompts]


PROMPTS = [IDS[:length] for length in range(3, 25, 3)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict]]:
    """Folder and llama.cpp's answers of each family in float32."""
    places = {name: tmp_path_factory.mktemp("family") for name in FAMILIES}
    for name, place in places.items():
        save_gguf(make_folder(place / "made", *FAMILIES[name]), place / "model.gguf", "f32")
    asked = [{"model": str(place / "model.gguf"), "prompts": PROMPTS, "vocabulary": ROWS} for place in places.values()]
    answers = dict(zip(places, answers_of(asked), strict=True))
    return lambda name: (places[name], answers[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_predicts_what_transformers_predicts(written, name):
    place, answers = written(name)
    pairs = [pair for pair in zip(answers["next"], next_of(place / "made", PROMPTS), strict=True) if pair[0] is not None]
    assert len(pairs) >= 3  # the others' likeliest token is half a character
    for theirs, wanted in pairs:
        assert (torch.tensor(theirs) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_trip_gives_the_weights_back_and_the_same_model(written, name, tmp_path):
    place, _ = written(name)
    unpack(GgufFile(place / "model.gguf"), tmp_path / "read")
    before, after = (load_file(folder / "model.safetensors") for folder in (place / "made", tmp_path / "read"))
    tied = set(before) ^ set(after)
    assert tied <= {"lm_head.weight"} and all(torch.equal(before[key], after[key]) for key in set(before) & set(after))
    ours = load_pretrained(tmp_path / "read", builders=MIXTURE).eval()
    assert ours.config.norm_eps == load_pretrained(place / "made", builders=MIXTURE).config.norm_eps  # four bytes in the file
    with torch.no_grad():
        for prompt, wanted in zip(PROMPTS[:2], next_of(place / "made", PROMPTS[:2]), strict=True):
            assert (torch.log_softmax(ours(torch.tensor([prompt]))[0, -1], -1) - wanted).abs().max() < 1e-5


def test_transformers_reads_each_type_as_this_does(tmp_path):
    folder = make_folder(tmp_path / "made", "Llama", {})
    for kind in TYPES:
        save_gguf(folder, tmp_path / f"{kind}.gguf", kind)
        unpack(GgufFile(tmp_path / f"{kind}.gguf"), tmp_path / kind)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{kind}.gguf", dtype=torch.float32).eval()
        ours = load_pretrained(tmp_path / kind).eval()
        with torch.no_grad():
            assert torch.allclose(theirs(torch.tensor([IDS])).logits, ours(torch.tensor([IDS])), atol=1e-5)
        types = {tensor.name: tensor.tensor_type.name.lower() for tensor in GGUFReader(tmp_path / f"{kind}.gguf").tensors}
        assert types["blk.0.ffn_down.weight"] == kind and types["output_norm.weight"] == "f32"
        assert types["token_embd.weight"] == ("q8_0" if kind[0] == "q" else kind)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Pre-tokenizer -> the folder unpacked from its file, and llama.cpp's ids of random texts."""
    places = {pre: tmp_path_factory.mktemp("tokenizer") for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")}
    for pre, place in places.items():
        save_gguf(make_folder(place / "made", "Llama", {"num_hidden_layers": 1}, pre), place / "model.gguf", "f16")
        unpack(GgufFile(place / "model.gguf"), place / "read")
    found = answers_of([{"model": str(place / "model.gguf"), "texts": random_texts(300)} for place in places.values()])
    return {pre: (place, answer["ids"]) for (pre, place), answer in zip(places.items(), found, strict=True)}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_ids_are_llama_cpps_and_those_of_the_tokenizer_that_was_written(tokenizers, pre):
    place, theirs = tokenizers[pre]
    assert GgufFile(place / "model.gguf").metadata["tokenizer.ggml.pre"] == pre
    made, read = (Tokenizer.from_file(str(place / name / "tokenizer.json")) for name in ("made", "read"))
    wanted = [made.encode(text).ids for text in random_texts(300)]
    assert [read.encode(text).ids for text in random_texts(300)] == wanted
    assert json.loads(read.to_str())["model"]["ignore_merges"] == (pre == "llama-bpe")
    composed = [made.normalizer.normalize_str(text) if made.normalizer else text for text in random_texts(300)]
    assert [ids for ids, text, same in zip(theirs, random_texts(300), composed, strict=True) if text == same] == [
        ids for ids, text, same in zip(wanted, random_texts(300), composed, strict=True) if text == same
    ]


def test_the_folder_has_the_template_the_names_and_the_ids(tokenizers):
    folder = tokenizers["gpt-2"][0] / "read"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


def test_a_template_loses_the_tag_that_only_transformers_knows():
    assert plain_template("a {%- generation -%} b {% endgeneration %} c") == "a {%- if true -%} b {% endif %} c"


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding_window"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("Llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "divisors"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("Qwen3Moe", {"head_dim": 16} | EXPERTS | {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_a_model_that_gguf_cannot_describe_is_refused_before_a_byte_is_written(tmp_path, kind, settings, said):
    folder = make_folder(tmp_path / "made", kind, settings)
    with pytest.raises((SettingError, ValueError), match=said):
        save_gguf(folder, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_routers_stay_in_float32(tmp_path):
    save_gguf(make_folder(tmp_path / "made", *FAMILIES["mixtral"]), tmp_path / "model.gguf", "q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.1.ffn_gate_inp.weight"] == "F32" and types["blk.1.ffn_gate_exps.weight"] == "Q8_0"


def test_two_end_tokens_and_a_beginning_that_the_tokenizer_adds_are_kept(tmp_path):
    folder, said = make_folder(tmp_path / "made", "Llama", {"eos_token_id": [1, 7, 9]}), []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", "<|begin|> $A <|begin|> $B", [("<|begin|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    save_gguf(folder, tmp_path / "model.gguf", "f32", said.append)
    known = GgufFile(tmp_path / "model.gguf").metadata
    assert [known[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "eot")] == [0, 1, 7] and "first two" in said[0]
    assert known["tokenizer.ggml.add_bos_token"] is True
    unpack(GgufFile(tmp_path / "model.gguf"), tmp_path / "read")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "read")("abc")["input_ids"]
    [found] = answers_of([{"model": str(tmp_path / "model.gguf"), "texts": ["abc"]}])
    assert ids == found["ids"][0] == tokenizer.encode("abc").ids and ids[0] == 0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.scale", 0.5, "attention.scale is 0.5, which is not understood here"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count is 8 beside heads of 16"),
        ("llama.block_count", None, "llama.block_count is None, and a model needs one number there"),
        ("llama.rope.scaling.type", "longrope", "rope.scaling.type is 'longrope'"),
        ("general.architecture", "gemma", "holds a model of the kind gemma"),
        ("tokenizer.ggml.model", "llama", "has a tokenizer of the kind 'llama'"),
        ("tokenizer.ggml.pre", "tekken", "has the pre-tokenizer 'tekken'"),
    ],
)
def test_metadata_that_are_not_understood_are_refused_before_a_byte_is_written(tmp_path, key, value, said):
    save_gguf(make_folder(tmp_path / "made", "Llama", {"num_hidden_layers": 1}), tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    file.metadata[key] = value
    file.architecture = file.metadata["general.architecture"]
    with pytest.raises(PretrainedError, match=re.escape(said)):
        unpack(file, tmp_path / "read")
    assert not (tmp_path / "read").exists()


def test_a_tensor_too_many_and_a_part_of_a_model_are_refused(tmp_path, monkeypatch):
    save_gguf(make_folder(tmp_path / "made", "Llama", {"num_hidden_layers": 1}), tmp_path / "model.gguf")
    file = GgufFile(tmp_path / "model.gguf")
    file.shapes["blk.0.attn_sinks.weight"] = (4,)
    with pytest.raises(PretrainedError, match="extra: blk.0.attn_sinks.weight"):
        unpack(file, tmp_path / "read")
    del file.shapes["blk.0.ffn_up.weight"]
    with pytest.raises(PretrainedError, match="missing: blk.0.ffn_up.weight"):
        unpack(file, tmp_path / "read")
    written = write.metadata_of_tokenizer
    monkeypatch.setattr(write, "metadata_of_tokenizer", lambda *words: written(*words) | {"split.count": 3})
    save_gguf(tmp_path / "made", tmp_path / "part.gguf")
    with pytest.raises(PretrainedError, match="one of 3 parts of a model"):
        GgufFile(tmp_path / "part.gguf")


def test_other_kinds_of_files_are_refused_by_name(tmp_path):
    folder = make_folder(tmp_path / "made", "Llama", {})
    tokenizer = make_tokenizer("gpt-2")
    tokenizer.pre_tokenizer = None
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(PretrainedError, match="pre-tokenizer has no name"):
        save_gguf(folder, tmp_path / "model.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 50)
    with pytest.raises(PretrainedError, match="copy it again"):
        GgufFile(tmp_path / "broken.gguf")
    with pytest.raises(SettingError, match=r"none\.gguf does not exist"):
        unpacked(tmp_path / "none.gguf")


def test_a_file_is_unpacked_once_and_again_where_it_has_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, said = make_folder(tmp_path / "made", "Llama", {"num_hidden_layers": 1}), []
    save_gguf(folder, tmp_path / "model.gguf", "f32")
    first = unpacked(tmp_path / "model.gguf", said.append)
    assert unpacked(tmp_path / "model.gguf", said.append) == first == Path("runs/pretrained/model") and len(said) == 1
    save_gguf(folder, tmp_path / "model.gguf", "q8_0")
    before = (first / "model.safetensors").read_bytes()
    assert unpacked(tmp_path / "model.gguf", said.append) == first and len(said) == 2
    assert (first / "model.safetensors").read_bytes() != before and not [*first.parent.glob("*.partial")]


def test_what_killed_processes_left_is_removed_when_the_file_is_written_or_unpacked_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "made", "Llama", {"num_hidden_layers": 1})
    gone, running = 2**22 + 1, os.getppid()  # above the largest number that Linux gives
    for name in (f"model.gguf.{gone}", f"model.gguf.{running}", f"others.gguf.{gone}"):
        (tmp_path / f"{name}.partial").write_bytes(b"half")
    save_gguf(folder, tmp_path / "model.gguf", "q8_0")
    assert {path.name for path in tmp_path.glob("*.partial")} == {f"model.gguf.{running}.partial", f"others.gguf.{gone}.partial"}
    unfinished = tmp_path / "runs" / "pretrained" / f"other.{gone}.partial"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    unpacked(tmp_path / "model.gguf", lambda line: None)
    assert [path.name for path in unfinished.parent.iterdir() if path.is_dir()] == ["model"]
