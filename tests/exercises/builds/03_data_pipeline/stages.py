"""The stages of build 03: what byte-level BPE, its file, packing and a loader do, against Hugging Face's tokenizers and arithmetic."""

from .common import stages
from .fast import FAST
from .filing import FILES
from .loading import LOADER
from .packing import PACK
from .refusals import BAD_INPUT
from .tokenizing import ENCODE, SPECIAL, TRAIN, WORDS

STAGES = stages(
    "03.build",
    words=(("words",), WORDS),
    train=(("train", "merges", "vocabulary"), TRAIN),
    encode=(("encode", "decode"), ENCODE),
    fast=(("train", "encode"), FAST),
    special=(("encode_special",), SPECIAL),
    files=(("save", "load"), FILES),
    pack=(("pack",), PACK),
    loader=(("start", "next_batch", "state", "restore"), LOADER),
    bad_input=(("read_texts",), BAD_INPUT),
)
