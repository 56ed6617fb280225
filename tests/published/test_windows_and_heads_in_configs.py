"""config.json where two places say one thing: windows and layer types, head sizes, ties, end tokens; against transformers' own logits.

A combination is read as transformers reads it, or refused by name: where transformers fails, and where its prompt and cache would differ.
"""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_rope_configs import EXPERTS, TYPES
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from shared.model.hf.files import PretrainedError
from shared.model.hf.pretrained import load_pretrained, read_folder, save_pretrained
from shared.model.hf.registry import read_config
from shared.moe.builders import MIXTURE

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "initializer_range": 0.3, "tie_word_embeddings": False, "rope_theta": 1e4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.arange(3, 23)[None]
GONE = "gone"
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = [GONE, None, 4, 1000]
LAYERS = [GONE, [FULL] * 3, [SLIDING] * 3, [FULL, SLIDING, SLIDING]]
PLACES = {"sliding_window": WINDOWS, "layer_types": LAYERS, "max_window_layers": [GONE, 1], "use_sliding_window": [GONE, True]}
COMBINATIONS = [dict(zip(PLACES, said, strict=True)) for said in product(*PLACES.values())]
EQUAL = {"llama": 32, "olmoe": 32, "mistral": 56, "mixtral": 32, "qwen2": 44, "qwen3": 44, "qwen3_moe": 32, "dots1": 56}


def config_of(kind, **said):
    config = SIZES | EXPERTS.get(kind, {}) | {"model_type": kind, "architectures": [TYPES[kind]]} | said
    return {name: value for name, value in config.items() if value is not GONE}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A folder of each model type, made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write(made[kind], config_of(kind))
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made[kind])).save_pretrained(made[kind])
        return made[kind]

    return folder


def theirs(folder) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS, use_cache=False).logits


def mine(folder) -> torch.Tensor:
    with torch.no_grad():
        return load_pretrained(folder, builders=MIXTURE).eval()(IDS)


@pytest.mark.parametrize("kind", TYPES)
def test_windows_are_read_as_transformers_reads_them_or_refused(kind, folder_of):
    """Logits are computed once for each computation, as both read it."""
    folder, compared, equal = folder_of(kind), set(), 0
    for said in COMBINATIONS:
        write(folder, config_of(kind, **said))
        try:
            read = read_folder(folder)[1].resolved()
        except PretrainedError as error:
            assert "layer_types lists" in str(error), said
            continue
        equal += 1
        other = AutoConfig.from_pretrained(folder)
        key = str((read.sliding_window, read.layer_types, *(getattr(other, name, None) for name in ("sliding_window", "layer_types"))))
        if key in compared or (kind == "mistral" and said["sliding_window"] is None and said["layer_types"] == [FULL] * 3):
            continue  # for the last one transformers builds a mask of sliding attention that it does not need, and fails
        compared.add(key)
        torch.testing.assert_close(mine(folder), theirs(folder), rtol=1e-5, atol=1e-5, msg=lambda text, said=said: f"{said}: {text}")
    assert equal == EQUAL[kind] and len(COMBINATIONS) == 64


LENGTHS = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096, "qwen3_moe": 4096, "dots1": 4096}


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_window_that_the_file_leaves_out_is_that_of_the_class(kind, tmp_path):
    write(tmp_path, config_of(kind, use_sliding_window=True, max_window_layers=0))
    assert read_folder(tmp_path)[1].sliding_window == AutoConfig.from_pretrained(tmp_path).sliding_window == LENGTHS[kind]


@pytest.mark.parametrize("kind", TYPES)
def test_a_list_of_another_length_is_refused_as_transformers_refuses_it(kind, tmp_path):
    write(tmp_path, config_of(kind, layer_types=[FULL, FULL], sliding_window=4))
    with pytest.raises(Exception, match="num_hidden_layers"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(PretrainedError, match="layer_types is .*, and num_hidden_layers 3"):
        read_folder(tmp_path)


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "dots1"])
def test_a_window_of_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="sliding_window is 0: give at least 1, or null"):
        read_config(config_of(kind, sliding_window=0, use_sliding_window=True, max_window_layers=0))[1].resolved()


def test_a_mistral_with_windows_in_some_blocks_is_written_back_as_one(folder_of, tmp_path):
    write(folder_of("mistral"), config_of("mistral", sliding_window=4, layer_types=[FULL, SLIDING, SLIDING]))
    save_pretrained(load_pretrained(folder_of("mistral")), tmp_path)
    torch.testing.assert_close(theirs(tmp_path), theirs(folder_of("mistral")), rtol=1e-5, atol=1e-5)


HEADS = [GONE, None, 8, 16]


@pytest.mark.parametrize("kind", TYPES)
def test_head_sizes_are_read_as_transformers_reads_them_or_refused(kind, folder_of):
    """The folder has heads of hidden_size / num_attention_heads = 8. Qwen 3's class has 128 where the file says nothing."""
    folder, equal = folder_of(kind), []
    for said in HEADS:
        write(folder, config_of(kind, head_dim=said))
        try:
            found = mine(folder)
        except PretrainedError as error:
            assert "misshapen: " in str(error) or "share hidden_size" in str(error)
            continue
        equal.append(said)
        if said is not None or kind in ("llama", "mistral", "mixtral"):  # the others' classes fail with null
            torch.testing.assert_close(found, theirs(folder), rtol=1e-5, atol=1e-5)
    assert equal == [GONE, None, 8][kind == "qwen3" :]


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("kind", TYPES)
def test_a_tie_and_a_head_in_the_file_agree_or_are_refused(kind, folder_of, tmp_path):
    """Equal heads under a tie are read; with no tie the head of the file counts, and without one the model lacks it."""
    tensors = load_file(folder_of(kind) / "model.safetensors")
    heads = {"other": tensors[HEAD], "equal": tensors[EMBEDDING].clone(), "none": None}
    sentences = {("other", True): "ties the head to the embedding, but lm_head.weight in the file is another matrix"}
    sentences |= dict.fromkeys((("none", False), ("none", GONE)), "missing: lm_head.weight")
    for (name, head), tie in product(heads.items(), [True, False, GONE]):
        stored = {key: value for key, value in (tensors | {HEAD: head}).items() if value is not None}
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
        write(tmp_path, config_of(kind, tie_word_embeddings=tie))
        if (name, tie) in sentences:
            with pytest.raises(PretrainedError, match=sentences[name, tie]):
                load_pretrained(tmp_path, builders=MIXTURE)
        else:
            torch.testing.assert_close(mine(tmp_path), theirs(tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", TYPES)
def test_another_vocabulary_than_the_embeddings_rows_is_refused(kind, folder_of):
    for size in (60, 70):
        write(folder_of(kind), config_of(kind, vocab_size=size))
        with pytest.raises(PretrainedError, match=rf"misshapen: lm_head.weight is \[64, 32\], not \[{size}, 32\]"):
            load_pretrained(folder_of(kind), builders=MIXTURE)


@pytest.mark.parametrize("kind", TYPES)
def test_a_configuration_within_the_configuration_is_refused(kind):
    with pytest.raises(ValueError, match="text_config is .* only those with None"):
        read_config(config_of(kind, text_config={"tie_word_embeddings": True}))


def test_end_tokens_are_those_of_generation_config_where_it_says_them(folder_of):
    """As transformers generates. What generation_config.json does not say, config.json does; transformers would then never stop."""
    folder = folder_of("llama")
    for said, generation in product([None, 3, [3, 4]], ["no file", GONE, None, 5, [5, 6]]):
        write(folder, config_of("llama", eos_token_id=said))
        if generation == "no file":
            (folder / "generation_config.json").unlink(missing_ok=True)
        else:
            ids = {} if generation == GONE else {"eos_token_id": generation}
            (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1} | ids))
        found = read_folder(folder)[2]["eos_token_id"]
        wanted = said if generation == GONE else AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
        assert found == wanted, (said, generation)


def test_a_t5_whose_tie_is_null_is_tied_and_scaled_as_in_transformers(tmp_path):
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path, {key: value for key, value in raw.items() if key != "scale_decoder_outputs"} | {"tie_word_embeddings": None})
    with torch.no_grad():
        wanted = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()(IDS, decoder_input_ids=IDS).logits
        torch.testing.assert_close(load_pretrained(tmp_path).eval()(IDS, decoder_input_ids=IDS), wanted, rtol=1e-5, atol=1e-5)
