"""The build of chapter 03: from files of text to batches of tokens, yours from an empty file. Three and a half hours.

    course check 03.build                all stages; course check 03.build.train: one
    course hint 03.build.train           three hints for each stage
    course reset 03.build                this file as it was; your text is kept

You design the rest: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay thin:
a few lines each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them. The stages `pack` and `loader` need none
of the stages before them.

You may use the standard library, torch, numpy, and `regex`, which has regular expressions with Unicode's classes. You need nothing of this
chapter's exercises, and may copy from them. `tokenizers`, `transformers`, `tiktoken` and the modules of `shared.data` may not be imported:
the checks compare with `tokenizers`.

Byte-level BPE, as everywhere in this file:
    words      a text is cut into words by GPT-2's pattern, WORDS below; a word is its bytes in UTF-8. Pairs never cross a word's border
    byte ids   ids 0 to 255 are single bytes: first those that are printable in Latin-1 (33 to 126, 161 to 172, 174 to 255), then the
               others (0 to 32, 127 to 160, 173), each group in ascending order
    training   joins the pair of neighbouring ids that is most frequent over all words, again and again; of equally frequent pairs the one
               with the smaller left id, then with the smaller right id. In a, a, a the pair (a, a) counts twice
    joining    from left to right, and a token that has been joined is used up: a, a, a becomes aa, a
    new ids    a joined token gets the next free id
    encoding   replays the merges in their order in each word
    special    special tokens have the ids behind all others, in the order in which they were given

A row is a dictionary of four tensors [width] int64; a batch is one of four tensors [rows, width]:
    input_ids  the tokens of a piece without its last one; 0 on padding
    targets    the token that follows each of them in its document; -100 on padding
    documents  0 for the first piece in a row, 1 for the second, ...; -1 on padding
    positions  0, 1, 2, ... in each piece; 0 on padding
Padding stands at the end of a row. Token ids of documents may be any from 0 on, so an id never says what is padding.

The stages
    1 words      a text as words, whose bytes are the text
    2 train      the merges that `tokenizers` learns, in the same order, with the same tokens
    3 encode     the ids that `tokenizers` gives a text; from ids the bytes, whatever they are
    4 fast       training and encoding in a budget of processor time (see `train` and `encode`)
    5 special    special tokens, which no text can make unless you say so
    6 files      tokenizer.json: `tokenizers` reads yours, and you read that of `tokenizers`
    7 pack       documents in rows: full, each prediction once, long documents cut (see `pack`)
    8 loader     batches for any number of ranks, which continue after a stop with the next token that is unseen
    9 bad_input  what cannot be right is refused with a ValueError that says what, or reported by name
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

Row = dict[str, Tensor]
Batch = dict[str, Tensor]

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def words(text: str) -> list[bytes]:
    """The words of a text, in order. Joined, they are its bytes in UTF-8."""
    raise NotImplementedError("03.build: words is not written yet")


def train(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> object:
    """A tokenizer, whatever you make it, with `vocab_size` ids in all: bytes, joined tokens and special ones.

    It has fewer where no pair is left to join. A special token that is written in a text is text like any other. No text at all is right,
    too, and texts may be a generator. Nothing changes a tokenizer after this.

    The budget of stage `fast`: a hundred merges cost much less than looking at every word a hundred times. Each different word is counted
    once in the beginning, however often it occurs, and after a merge only the words that hold the pair are counted again. For each merge
    it may go through the counts of all different pairs.

    Raises:
        ValueError: vocab_size leaves no room for the bytes and the special tokens (the message has vocab_size); a special token is
            empty, or given twice (its repr) (stage 9).
    """
    raise NotImplementedError("03.build: train is not written yet")


def merges(tokenizer: object) -> list[tuple[bytes, bytes]]:
    """The pairs that are joined, in order."""
    raise NotImplementedError("03.build: merges is not written yet")


def vocabulary(tokenizer: object) -> list[bytes]:
    """The bytes of each id; of a special token its text in UTF-8."""
    raise NotImplementedError("03.build: vocabulary is not written yet")


def encode(tokenizer: object, text: str) -> list[int]:
    """The ids of a text. No special token is among them, whatever the text says.

    The budget of stage `fast`: a word that occurs often is worked out once, a word costs nothing for the merges that it does not need,
    and a word of n bytes costs nearly n, and not n times n.
    """
    raise NotImplementedError("03.build: encode is not written yet")


def decode(tokenizer: object, ids: Iterable[int]) -> bytes:
    """The bytes of ids, also where they are no text in UTF-8. A special token gives its text.

    Raises:
        ValueError: there is no such id; the message has it (stage 9).
    """
    raise NotImplementedError("03.build: decode is not written yet")


def encode_special(tokenizer: object, text: str) -> list[int]:
    """The same for a text that is trusted: special tokens that are written in it become their ids, and what stands between two of them is
    a text by itself. Where several could begin at one place, the longest one is taken."""
    raise NotImplementedError("03.build: encode_special is not written yet")


def save(tokenizer: object, path: Path) -> None:
    """Write a file in the format of tokenizer.json. `tokenizers.Tokenizer.from_file` gives the same ids with it as `encode_special`, the
    same text for ids, and knows the special tokens as such."""
    raise NotImplementedError("03.build: save is not written yet")


def load(path: Path) -> object:
    """A tokenizer from a file that `save` or `tokenizers` wrote. It has the ids that the file says, which may come in any order: there the
    special tokens are the first, for example. Merges are lists of two texts there, or in older files one text with a space between them.

    Raises:
        ValueError: the file is no JSON, or no byte-level BPE; the message has the file's name (stage 9).
    """
    raise NotImplementedError("03.build: load is not written yet")


def pack(documents: Sequence[Sequence[int]], width: int) -> list[Row]:
    """Rows that hold every prediction of every document once. A document of n ids has n - 1 predictions.

    A document of more than `width` predictions is cut into as few pieces as can be; no other one is cut. A piece's last target is the
    next piece's first input. The rows are no more than best fit makes, decreasing: long documents are cut into pieces of `width`
    predictions and what is left; then, from the longest piece to the shortest, each goes into the fullest row that still has room for it,
    and into a new row if there is none. In which order rows come, and pieces in a row, is yours.

    Raises:
        ValueError: a document has fewer than two ids (its number, from 0), or width is below 1 (width) (stage 9).
    """
    raise NotImplementedError("03.build: pack is not written yet")


def start(documents: Sequence[Sequence[int]], width: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> object:
    """A loader, whatever you make it, which gives rank `rank` of `ranks` its part of each batch.

    Rows come in epochs. Each epoch has every prediction once, in as many rows as `pack` makes, in an order that follows from the seed and
    the number of the epoch alone, and is another one in each. Epochs follow each other without a gap: the rows of all of them are one
    endless sequence, and batch k takes the `batch_size` rows from k times batch_size on, whether an epoch ends between them or not.
    A batch's rows are the same for any number of ranks, which share them evenly: in which way is yours.
    Random numbers of your own: the global generators are neither used nor changed.

    Raises:
        ValueError: there are no documents; width or batch_size is below 1, or batch_size does not divide by ranks; there is no such rank.
            The message has the numbers, and names the argument (stage 9).
    """
    raise NotImplementedError("03.build: start is not written yet")


def next_batch(loader: object) -> Batch:
    """This rank's rows of the next batch: [batch_size / ranks, width]. Whatever is done to its tensors changes nothing that comes later."""
    raise NotImplementedError("03.build: next_batch is not written yet")


def state(loader: object) -> dict[str, Any]:
    """Where the loader stands: values that JSON can hold, at most 500 characters of it, whatever the documents are. Between two batches it
    is the same on all ranks. It stays as it is when the loader goes on."""
    raise NotImplementedError("03.build: state is not written yet")


def restore(loader: object, state: dict[str, Any]) -> None:
    """Go on where another loader stood, with the next row that no rank has given yet. That loader may have had other ranks or another
    batch_size, and may have been read from JSON; the documents, width and seed are the same.

    Raises:
        ValueError: they are not; the message says which: documents, width or seed. The loader stays where it was (stage 9).
    """
    raise NotImplementedError("03.build: restore is not written yet")


def read_texts(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of a folder's files, by name, and the reason for each file that has none. Each file is in one of the two. Subfolders are
    left out, and the names are in alphabetical order in both.

    A text is exactly what the file's bytes say in UTF-8. A file is refused for the first of these reasons that holds, and the reason has
    the word in quotes: it has no bytes, or nothing but white space ("empty"); a byte of it is 0 ("binary"); it is not in
    UTF-8 ("UTF-8", and the number of the first byte that is wrong, from 0).
    """
    raise NotImplementedError("03.build: read_texts is not written yet")
