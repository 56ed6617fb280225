"""Chapter 03. A tokenizer for training: byte-level BPE from the `tokenizers` library, with special tokens that text cannot forge.

`shared.data.bpe` shows how byte-level BPE is trained and applied; this is the same in a fast library. A special token is one id
that stands for no text: the end of a document, the borders of a middle to fill in, a mask. Text that spells its name is encoded
as ordinary text. A tokenizer's identity is a hash of all that it is, so data can say which one made it.
"""

import hashlib
import json
import re
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.corpus import find
from shared.course.errors import CourseError
from shared.model.hf.files import PretrainedError, read_json

if TYPE_CHECKING:
    from shared.data.fim import FimTokens

END = "<|end|>"
FIM_TOKENS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
MASK = "<|mask|>"
CHAT_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>", "<|turn_end|>")  # for chapter 10
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # what others call the end of a document
ROLES = ("eos_token", "bos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")  # transformers' names
CONTROL = re.compile(r"<[|｜][\w▁-]+[|｜]>")  # how control tokens are spelt; some files do not say that theirs are special
BYTES = 256
LONGEST_WORD = 1000  # characters; the library's trainer takes the square of a word's length: 200,000 letters without a space, 90 seconds
PROBE = "def F(x):\n    return  x + 1\n"  # capitals, runs of spaces and lines, which tokenizers for search drop
DIFFERING = 0.1  # share of texts that may not round-trip, for instance because the vocabulary lacks a character


def special_names(sentinels: int) -> list[str]:
    """The special tokens of a tokenizer that we train, in the order of their ids, from 0."""
    return [END, *FIM_TOKENS, MASK, *CHAT_TOKENS, *(f"<|extra_{i}|>" for i in range(sentinels))]


class TokenizerError(CourseError):
    """A tokenizer that cannot be used; the message says which, why, and what to do."""


class TextTokenizer:
    """A tokenizer of the `tokenizers` library, for text alone: no template, no truncation, no padding.

    Args:
        tokenizer: taken over; its own special tokens stay, and its control tokens become special. Text never becomes one.
        end: the name of the token that ends a document; None to look for a usual one.
        names: what transformers calls other tokens, such as {"pad_token": "<pad>"}; kept for who reads the tokenizer next.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        end_id: the id that ends a document.
        identity: sha256 of the tokenizer, equal for equal ones.
    """

    def __init__(self, tokenizer: Tokenizer, end: str | None = None, names: Mapping[str, str] | None = None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        control = [token.content for token in added if CONTROL.fullmatch(token.content) or token.content == end]
        control += [end] * (end in vocabulary and end not in control)
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in control])  # of the same ids
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > 2 * len(vocabulary) + 1000:
            tokens = f"{len(vocabulary):,} tokens and ids up to {self.vocab_size - 1:,}"
            raise TokenizerError(f"The tokenizer has {tokens}: a model keeps a row for each id, so number the tokens without gaps.")
        self.identity = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()  # the library lists the ids one by one, gaps too
        tokenizer.encode_special_tokens = True
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids: dict[str, int] = {token.content: number for number, token in added if token.special}
        found = next((name for name in ([end] if end else ENDS) if name in self.special_ids), None)
        if found is None:
            wanted = repr(end) if end else "that ends a document"
            raise TokenizerError(f"The tokenizer has no special token {wanted}. It has: {', '.join(self.special_ids) or 'none'}.")
        self.names = {role: name for role, name in (names or {}).items() if name in vocabulary}
        self.end = found
        self.end_id = self.special_ids[found]

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, sentinels: int = 100) -> "TextTokenizer":
        """Train byte-level BPE (Sennrich et al. 2016; Radford et al. 2019, section 2.2), the same for the same texts.

        Args:
            texts: read once; the trainer holds their distinct words, not the texts.
            vocab_size: of the whole vocabulary: special tokens, 256 bytes, merges. Small text may give fewer merges.
            sentinels: how many tokens <|extra_0|>, <|extra_1|> ... T5's span corruption may use.
        """
        names = special_names(sentinels)
        if vocab_size < len(names) + BYTES:
            raise TokenizerError(f"vocab_size is {vocab_size}: {len(names)} special tokens and {BYTES} bytes need {len(names) + BYTES}.")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator((piece for text in texts for piece in without_long_words(text)), trainer)
        return cls(tokenizer, END)

    @classmethod
    def load(cls, path: Path, end: str | None = None) -> "TextTokenizer":
        """From a `tokenizer.json`, or a folder that holds one, ours or transformers'.

        Raises:
            TokenizerError: there is none, or it cannot be read or used.
        """
        path, mode = find(str(path))
        file = path / "tokenizer.json" if stat.S_ISDIR(mode) else path
        if not stat.S_ISREG(find(str(file))[1]):
            what = "is not a file" if file.exists() else "does not exist"
            raise TokenizerError(f"{file} {what}: give a tokenizer.json or the folder that holds it.")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            cure = "give the tokenizer.json of a model, or copy it again"
            raise TokenizerError(f"{file} is not a tokenizer of the tokenizers library ({str(error).rstrip('.')}): {cure}.") from None
        try:
            names = names_beside(file)
            return cls(tokenizer, end or names.pop("eos_token", None), names)
        except TokenizerError as error:
            raise TokenizerError(f"{file}: {error}") from None

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json` that tokenizers and transformers read."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def save_pretrained(self, folder: Path, longest: int) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, so that `AutoTokenizer.from_pretrained(folder)` gives the same ids.

        Args:
            longest: tokens that the model takes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.save(folder / "tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.names | {"eos_token": self.end, "model_max_length": longest}
        config["clean_up_tokenization_spaces"] = False
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    def with_special(self, names: Iterable[str]) -> "TextTokenizer":
        """This tokenizer with further special tokens, appended after its last id; itself where it has all of them."""
        missing = [name for name in names if name not in self.special_ids]
        if not missing:
            return self
        grown = Tokenizer.from_str(self.tokenizer.to_str())
        grown.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in missing])
        return TextTokenizer(grown, self.end, self.names)

    def to_json(self) -> str:
        return self.tokenizer.to_str(pretty=True)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without any special token. `decode` gives the text back."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch_fast(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores: [tokens] int32 each."""
        return [np.array(encoding.ids, dtype=np.int32) for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], keep_special: bool = False) -> str:
        """The text of ids. Special tokens are left out, or spelt by their names."""
        return self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=not keep_special)

    def require_lossless(self, texts: Sequence[str] = (PROBE,)) -> None:
        """Refuse a tokenizer that does not give text back: a model would learn other text, and bits per byte would divide by other bytes.

        Two differences are allowed: a space before the text, which Llama's and RoBERTa's add, and composed characters (Unicode NFC),
        as Qwen's makes them.

        Args:
            texts: to try it with; of many, DIFFERING may come back otherwise.
        """
        differing = []
        for text in texts:
            ids = self.encode(text)
            wanted, back = (unicodedata.normalize("NFC", each) for each in (text, self.decode(ids)))
            size = int(self.byte_lengths[ids].sum())
            if back not in (wanted, " " + wanted):
                differing.append(difference(wanted, back))
            elif wanted == text and size - len(text.encode()) not in (0, 1):
                differing.append(f"the tokens of {text[:20]!r} stand for {size} bytes, and it has {len(text.encode())}")
        if len(differing) > DIFFERING * len(texts):
            raise TokenizerError(
                f"The tokenizer does not give text back ({differing[0]}), so it is not for predicting the next token: "
                "give another in prepare.tokenizer, or null to train one."
            )

    @property
    def adds_space(self) -> bool:
        """Whether a text's first token brings a space that the text does not have."""
        return self.decode(self.encode("a") + self.encode("b")) != "ab"

    def special(self, name: str) -> int:
        """The id of a special token."""
        if name not in self.special_ids:
            raise TokenizerError(f"The tokenizer has no special token {name!r}: it has {', '.join(self.special_ids)}.")
        return self.special_ids[name]

    @property
    def fim_tokens(self) -> "FimTokens":
        """The ids that `shared.data.fim` needs, by our names for them."""
        # Imported here, for it holds an exercise: configurations are read before it is chosen whose exercises run.
        from shared.data.fim import FimTokens

        prefix, middle, suffix, _ = map(self.special, FIM_TOKENS)
        return FimTokens(prefix, suffix, middle, self.end_id)

    @property
    def sentinels(self) -> list[int]:
        """The ids of <|extra_0|>, <|extra_1|>, ..., as many as there are."""
        names = (f"<|extra_{i}|>" for i in range(len(self.special_ids)))
        return [self.special_ids[name] for name in names if name in self.special_ids]

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """[vocab_size] int64: the bytes of text that each id stands for; 0 for special tokens.

        Bits per byte needs it: the loss is a sum over tokens, and compares across tokenizers only by the bytes that they cover.
        """
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self.tokenizer.to_str())["decoder"])
        lengths, added = np.zeros(self.vocab_size, dtype=np.int64), self.tokenizer.get_added_tokens_decoder()
        for token, number in self.tokenizer.get_vocab(with_added_tokens=True).items():
            if number in self.special_ids.values():
                continue
            if number in added:
                lengths[number] = len(token.encode())  # a word as it is
            elif byte_level:
                lengths[number] = len(token)  # each character stands for one byte
            elif len(token) == 6 and token.startswith("<0x"):
                lengths[number] = 1
            else:
                lengths[number] = len(token.replace("▁", " ").encode())
        return lengths


def without_long_words(text: str) -> list[str]:
    """A text; in pieces of LONGEST_WORD characters, where it has longer words or longer runs of spaces."""
    half = LONGEST_WORD // 2  # a long run covers one of these pieces whole, and most texts have none such
    if not any(len(text[first : first + half].split()) < 2 for first in range(0, len(text) - half + 1, half)):
        return [text]
    if max(map(len, text.split()), default=0) <= LONGEST_WORD and not re.search(rf"\s{{{LONGEST_WORD + 1}}}", text):
        return [text]
    return [text[first : first + LONGEST_WORD] for first in range(0, len(text), LONGEST_WORD)]


def difference(wanted: str, back: str) -> str:
    """The first difference of two texts, as a message."""
    place = next((i for i, (one, other) in enumerate(zip(wanted, back, strict=False)) if one != other), min(len(wanted), len(back)))
    first = max(0, place - 8)
    return f"{wanted[first : place + 8]!r} comes back as {back[first : place + 8]!r}"


def names_beside(file: Path) -> dict[str, str]:
    """What the `tokenizer_config.json` beside the file, if there is one, calls its tokens: `eos_token`, `pad_token` ... -> a token."""
    config = file.with_name("tokenizer_config.json")
    if not config.exists():
        return {}
    try:
        said = {role: token for role, token in read_json(config).items() if role in ROLES and token is not None}
    except PretrainedError as error:
        raise TokenizerError(str(error)) from None
    names = {role: token.get("content") if isinstance(token, dict) else token for role, token in said.items()}
    for role, name in names.items():
        if not isinstance(name, str):
            raise TokenizerError(f"{config} gives the {role} {name!r}: give its name, or null.")
    return names
