"""Chapter 10. Tokenizers in GGUF: byte-level BPE and its special tokens, as `tokenizer.json` and as metadata.

GGUF names the pre-tokenizer, the pattern by which text is cut into words before merges apply, and each reader has a table of the names.
A tokenizer whose pattern has no name cannot be expressed in GGUF, and a file whose name is not in this table is refused: cut otherwise,
the same text would have other tokens, and the model would be worse without a word.
"""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from shared.finetune.gguf.file import GgufFile
from shared.model.hf.files import KEYS, PretrainedError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens (tokenizer.ggml.token_type)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # transformers' -> GGUF's
IDS = {f"{role}_id": name for role, name in NAMES.items() if f"{role}_id" in KEYS}
TEMPLATE = "tokenizer.chat_template"


def by_pattern(pattern: str) -> PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def by_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])


KINDS = {  # tokenizer.ggml.pre -> its pre-tokenizer; the first of equal ones is written
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": by_digits(),
    "starcoder": by_digits(),
    "llama-bpe": by_pattern(LLAMA3),
    "llama3": by_pattern(LLAMA3),
    "llama-v3": by_pattern(LLAMA3),
    "qwen2": by_pattern(QWEN2),
    "deepseek-r1-qwen": by_pattern(QWEN2),
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is put into Unicode's NFC first
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a word that is a token stays one, whatever the merges say


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file.

    Raises:
        PretrainedError: it is no byte-level BPE, or its pre-tokenizer is unknown here.
    """
    said = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    if said.get("model") != "gpt2":
        raise PretrainedError(f"{file.path} has a tokenizer of the kind {said.get('model')!r}, and byte-level BPE (gpt2) is read here.")
    pre = said.get("pre")
    if pre not in KINDS:
        raise PretrainedError(f"{file.path} has the pre-tokenizer {pre!r}, which is not known here: {', '.join(KINDS)} are.")
    tokens, kinds = said["tokens"], said.get("token_type") or [NORMAL] * len(said["tokens"])
    merges = [tuple(merge.split(" ")) for merge in said.get("merges", [])]
    try:
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges, ignore_merges=pre in WHOLE_WORDS))
    except Exception as error:  # the library raises nothing narrower
        raise PretrainedError(f"{file.path} has merges that do not fit its tokens ({error}): copy it again.") from None
    tokenizer.pre_tokenizer, tokenizer.decoder = KINDS[pre], decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    named = {tokens[said[f"{name}_token_id"]] for name in NAMES.values() if said.get(f"{name}_token_id") is not None}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED) or token in named:
            special = kind != USER_DEFINED
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken(token, special=special, normalized=False)])
    if said.get("add_bos_token"):
        first = tokens[said["bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", f"{first} $A {first} $B", [(first, said["bos_token_id"])])
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: the names of special tokens, and the longest text."""
    tokens = file.metadata["tokenizer.ggml.tokens"]
    numbers = {name: file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in NAMES.items()}
    names = {name: tokens[number] for name, number in numbers.items() if number is not None}
    longest = {"model_max_length": file.of_model("context_length"), "clean_up_tokenization_spaces": False}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | names | longest


def token_ids(file: GgufFile) -> dict[str, int]:
    """Ids for config.json and generation_config.json."""
    return {name: file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in IDS.items()}


def templates(file: GgufFile) -> dict[str, str]:
    """Name -> chat template; the default one's name is empty."""
    given = {name: text for name, text in file.metadata.items() if name.startswith(TEMPLATE) and name != f"{TEMPLATE}s"}
    return {name[len(TEMPLATE) :].lstrip("."): text for name, text in given.items()}


def tokenizer_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Metadata of a tokenizer: model, pre, tokens, token_type, merges; keys without `tokenizer.ggml.`.

    Args:
        rows: of the model's embedding; ids without a token get a name of their own.

    Raises:
        PretrainedError: a tokenizer that GGUF's readers would apply otherwise.
    """
    said = json.loads(tokenizer.to_str())
    bpe, added = said["model"], tokenizer.get_added_tokens_decoder()
    name = next((name for name, kind in KINDS.items() if comparable(said["pre_tokenizer"]) == comparable(described(kind))), None)
    if bpe["type"] != "BPE" or name is None or bpe.get("dropout") or bpe.get("byte_fallback"):
        raise PretrainedError(
            "The tokenizer's kind or pre-tokenizer has no name in GGUF, so llama.cpp would cut text otherwise than the model has learnt: "
            f"byte-level BPE with the pre-tokenizers {', '.join(KINDS)} can be written."
        )
    if ((said["normalizer"] or {}).get("type") == "NFC") != (name in COMPOSED) or bpe.get("ignore_merges", False) != (name in WHOLE_WORDS):
        raise PretrainedError(f"The tokenizer cuts words as {name} does, and has another normalizer or merges: GGUF has no name for it.")
    vocabulary = {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [vocabulary.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [CONTROL if number in added and added[number].special else USER_DEFINED if number in added else
             NORMAL if number in vocabulary else UNUSED for number in range(rows)]  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": kinds, "merges": merges}


def described(kind: PreTokenizer) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = kind
    return json.loads(tokenizer.to_str())["pre_tokenizer"]


def comparable(said: dict[str, Any]) -> Any:
    """A pre-tokenizer without what changes no token."""
    if isinstance(said, dict):
        return {key: comparable(value) for key, value in said.items() if key not in ("trim_offsets", "invert")}
    return [comparable(each) for each in said] if isinstance(said, list) else said
