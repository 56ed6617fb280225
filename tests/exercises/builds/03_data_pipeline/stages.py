"""The stages of build 03: what byte-level BPE, its file, packing and a loader do, against Hugging Face's tokenizers and arithmetic."""

from .fast import FAST
from .filing import FILES
from .loading import LOADER
from .packing import PACK
from .pieces import stage
from .refusals import BAD_INPUT
from .tokenizing import ENCODE, SPECIAL, TRAIN, WORDS

STAGES = {
    check.exercise.rsplit(".", 1)[1]: check
    for check in (
        stage("words", ("words",), *WORDS),
        stage("train", ("train", "merges", "vocabulary"), *TRAIN),
        stage("encode", ("encode", "decode"), *ENCODE),
        stage("fast", ("train", "encode"), *FAST),
        stage("special", ("encode_special",), *SPECIAL),
        stage("files", ("save", "load"), *FILES),
        stage("pack", ("pack",), *PACK),
        stage("loader", ("start", "next_batch", "state", "restore"), *LOADER),
        stage("bad_input", ("read_texts",), *BAD_INPUT),
    )
}
