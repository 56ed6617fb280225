"""An exported model ends its text at its own end token in transformers, and at no other that happens to be its class's default.

Each family learns one row by heart: a prompt, ordinary tokens with the ids 1, 2 and 3 among them, the end token, and more after it. The end
token's id is 265, where the classes of transformers say 1, 2, 50256 or nothing.
"""

import json

import pytest
import torch
import transformers
from families import BERT, FAMILIES, GPT2, LLAMA, T5, make_oracle
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.data.tokenizer import TextTokenizer
from shared.loss import cross_entropy
from shared.model.config import ModelConfig
from shared.model.hf.files import every_id
from shared.model.hf.pretrained import load_pretrained, save_pretrained
from shared.model.hf.registry import FORMATS, read_config
from shared.moe.hf import MIXTURES
from shared.model.transformer import TransformerModel

NAMES = ("<|mask|>", "<|pad|>", "<|start|>", "<|end|>")
PROMPT, ANSWER, AFTER = [40, 41], [50, 1, 2, 3, 0, 51], [7, 7, 7, 7]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Bytes, one id each from 0, and after them the special tokens: every default of transformers is an ordinary token here."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_tokens([f"word{number}" for number in range(6)])
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    return TextTokenizer(inner, "<|end|>")


def learnt(config: dict, tokenizer: TextTokenizer, loss, steps: int = 150) -> TransformerModel:
    """A model of this `config.json`, trained until `loss(model)` is small."""
    torch.manual_seed(0)
    raw = config | {"vocab_size": tokenizer.vocab_size}
    model = TransformerModel(read_config(raw)[1]).train(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        value = loss(model)
        if value < 0.05:
            return model
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    raise AssertionError(f"the row was not learnt: {value}")


SMALL = {"num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "num_decoder_layers": 2}
DECODERS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA | {"sliding_window": None},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_size": 48, "seq_length": 64},
}


def test_every_family_is_here():
    assert DECODERS.keys() | {"t5", "bert"} == FORMATS.keys() - MIXTURES.keys()  # those of chapter 09 have tests of their own


@pytest.mark.parametrize("family", DECODERS)
def test_the_pipeline_ends_a_text_by_the_models_own_end_token(family, tokenizer, tmp_path):
    row = torch.tensor([PROMPT + ANSWER + [tokenizer.end_id] + AFTER])
    config = {"model_type": family} | DECODERS[family] | {key: 2 for key in SMALL if key in DECODERS[family]}
    model = learnt(config, tokenizer, lambda model: cross_entropy(model(row[:, :-1]), row[:, 1:])[0] / (row.shape[1] - 1))
    save_pretrained(model, tmp_path, model_type=family, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(tmp_path, model.config.max_position_embeddings)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert (pipe.tokenizer.eos_token_id, pipe.tokenizer.model_max_length) == (tokenizer.end_id, 64)
    prompt = tokenizer.decode(PROMPT)
    [found] = pipe(prompt, do_sample=False, return_tensors=True)
    assert list(found["generated_token_ids"]) == PROMPT + ANSWER + [tokenizer.end_id]
    [found] = pipe(prompt, do_sample=False, return_full_text=False)
    assert found["generated_text"] == tokenizer.decode(ANSWER)
    longest = pipe.model.generate(torch.tensor([PROMPT]), do_sample=False, eos_token_id=None, pad_token_id=0)
    assert longest.shape == (1, model.config.max_position_embeddings), "without an end, a text is as long as the model takes"
    for name in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / name).read_text())
        assert {key: said[key] for key in ("eos_token_id", "bos_token_id", "pad_token_id")} == {
            "eos_token_id": tokenizer.end_id, "bos_token_id": None, "pad_token_id": None,
        }  # fmt: skip


def test_a_t5_ends_by_its_own_end_token(tokenizer, tmp_path):
    start = tokenizer.special_ids["<|pad|>"]
    written = torch.tensor([ANSWER + [tokenizer.end_id] + AFTER])
    late = torch.cat([torch.tensor([[start]]), written[:, :-1]], dim=1)
    read = torch.tensor([PROMPT])
    config = {"model_type": "t5"} | T5 | {"num_layers": 2, "num_decoder_layers": 2, "n_positions": 64}
    model = learnt(config, tokenizer, lambda model: cross_entropy(model(read, decoder_input_ids=late), written)[0] / written.numel(), 400)
    save_pretrained(model, tmp_path, token_ids={"eos_token_id": tokenizer.end_id, "pad_token_id": start})
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert theirs.generate(read, do_sample=False).tolist() == [[start, *ANSWER, tokenizer.end_id]]
    assert theirs.generation_config.max_length == 64 and theirs.generation_config.decoder_start_token_id == start


def test_a_bert_fills_its_own_mask_and_generates_nothing(tokenizer, tmp_path):
    mask, pad = tokenizer.special_ids["<|mask|>"], tokenizer.special_ids["<|pad|>"]
    row, target = torch.tensor([[*PROMPT, mask, 50]]), torch.tensor([[-100, -100, 3, -100]])
    model = learnt({"model_type": "bert"} | BERT | {"num_hidden_layers": 2}, tokenizer, lambda model: cross_entropy(model(row), target)[0])
    (tmp_path / "generation_config.json").write_text("{}")  # of another model
    save_pretrained(model, tmp_path, token_ids={"pad_token_id": pad})
    tokenizer.save_pretrained(tmp_path, 64)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"mask_token": "<|mask|>", "pad_token": "<|pad|>"}))
    pipe = transformers.pipeline("fill-mask", model=str(tmp_path), device="cpu")
    best = pipe(tokenizer.decode(PROMPT) + "<|mask|>" + tokenizer.decode([50]))[0]
    assert best["token"] == 3 and pipe.model.config.pad_token_id == pad and not (tmp_path / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA 2 (GQA)", "T5, first", "BLOOM", "BERT"])
def test_an_import_keeps_what_the_files_say(name, tmp_path):
    name = next(known for known in FAMILIES if known.startswith(name.split(",")[0]))
    oracle = make_oracle(FAMILIES[name])
    said = {"eos_token_id": 5, "bos_token_id": 6, "pad_token_id": 7}
    for key, value in said.items():
        setattr(oracle.config, key, value)
        if oracle.can_generate():
            setattr(oracle.generation_config, key, value)
    oracle.save_pretrained(tmp_path / "theirs")
    save_pretrained(load_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {key: written[key] for key in said} == said


def test_an_end_in_several_tokens_is_kept_from_the_generation_file(tmp_path):
    """As in LLaMA 3's folders, whose config.json may know fewer of them."""
    oracle = make_oracle(FAMILIES["LLaMA 2 (GQA)"])
    oracle.config.eos_token_id, oracle.generation_config.eos_token_id = 5, [5, 8]
    oracle.save_pretrained(tmp_path / "theirs")
    save_pretrained(load_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == [5, 8]


@pytest.mark.parametrize("family", [*DECODERS, "t5", "bert"])
def test_what_a_file_leaves_out_is_what_transformers_takes(family):
    default = transformers.AutoConfig.for_model(family)
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert FORMATS[family].token_ids.get(key) == getattr(default, key, None), key


def test_ids_that_the_model_does_not_have_are_refused(tmp_path):
    model = TransformerModel(read_config({"model_type": "llama"} | LLAMA)[1])
    with pytest.raises(ValueError, match="eos_token_id is 97, and the model's ids are 0 to 96"):
        save_pretrained(model, tmp_path, token_ids={"eos_token_id": 97})
    for wrong in (-1, [5, 97]):
        with pytest.raises(ValueError, match="pad_token_id is .*, and the model's ids are 0 to 96"):
            save_pretrained(model, tmp_path, token_ids={"pad_token_id": wrong})
    with pytest.raises(ValueError, match="token_ids has 'eos'"):
        save_pretrained(model, tmp_path, token_ids={"eos": 5})
    assert not (tmp_path / "config.json").exists()


def test_a_start_token_that_is_given_is_kept_and_padding_is_the_start_of_others():
    t5, ids = ModelConfig(architecture="encoder-decoder", position="relative"), {"pad_token_id": 3}
    assert every_id(ids, t5)["decoder_start_token_id"] == 3
    assert every_id(ids | {"decoder_start_token_id": 7}, t5)["decoder_start_token_id"] == 7
