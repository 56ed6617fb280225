"""Chapter 12. Initial weights from a pretrained model or a checkpoint: the setting `start_from`.

    start_from: a Hugging Face folder    config.json, model.safetensors or several files; runs/NAME/model is one; also in NF4, or in
                                         GPTQ's or AWQ's layout, as the frozen base of an adapter
                a run, runs/NAME         its exported model, or its newest checkpoint where it has not ended
                a checkpoint             runs/NAME/checkpoints/step-00000200, of any layout
                a GGUF file, or smollm2  unpacked into a folder first (`shared.finetune.gguf.unpack`)

The folder decides the model, so the section `model` need not be given, and may change only what no weight depends on
(`shared.trainer.model_section`).
Weights are read where they are needed: on the meta device each parameter knows its place in the files (`shared.model.hf.pretrained`).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.course.errors import CourseError, SettingError
from shared.course.typed import configured
from shared.data.prepare import DIGESTS
from shared.data.sources import Digests
from shared.data.tokenizer import TextTokenizer
from shared.engine.checkpoint.folder import FOLDER, MANIFEST, STATE, Checkpoints, require_intact
from shared.finetune.gguf.packaged import is_gguf
from shared.finetune.gguf.unpack import unpacked
from shared.finetune.quantization.frozen import FrozenFolder, with_frozen_layers
from shared.finetune.quantization.nf4_files import Nf4Folder
from shared.finetune.quantization.packed_files import PackedFolder
from shared.finetune.quantization.packed_settings import KEYS
from shared.finetune.vocabulary import resized
from shared.model.config import ModelConfig
from shared.model.hf.files import PretrainedError, read_json
from shared.model.hf.pretrained import logical_parameters, open_pretrained
from shared.model.init import forget_files, materialize
from shared.model.sharding import Region
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureModelConfig
from shared.engine.checkpoint.files import files_of, read_region, shards_in, wrong_shards
from shared.preference.reward_model import open_reward_model
from shared.preference.value_head import VALUE
from shared.trainer import provenance

TRIES = 5  # checkpoints of a run that trains, each removed while it was read
Result = TypeVar("Result")


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of a run, on disk.

    Args:
        folder: in Hugging Face's format, or a checkpoint.
        model: their architecture; resolved.
        tokenizer: the folder with the tokenizer.json that belongs to them, if any.
    """

    folder: Path
    model: MixtureModelConfig
    tokenizer: Path | None

    @property
    def is_checkpoint(self) -> bool:
        return (self.folder / STATE).is_file()

    def open(self, config: ModelConfig | None = None, apart: bool = False) -> TransformerModel:
        """The model on the meta device, each parameter with a function `stored` that reads a slice of it. config: with a larger vocabulary,
        or other settings of training; None for the folder's own. apart: of new rows, as for `resized`."""
        if self.is_checkpoint:
            with torch.device("meta"):
                model = TransformerModel(self.model, MIXTURE)
            shapes = {name: tuple(parameter.shape) for name, parameter in logical_parameters(model).items()}
            require_weights(self.folder, shapes)
            for name, parameter in logical_parameters(model).items():
                parameter.stored = partial(read_checkpoint, self.folder, name, shapes[name])
            return resized(model, config or self.model, MIXTURE, apart)
        files = frozen_files(self.folder)
        model = resized(open_pretrained(self.folder, builders=MIXTURE, files=files), config or self.model, MIXTURE, apart)
        return with_frozen_layers(model, files) if files else model

    def load(
        self, config: ModelConfig | None = None, device: torch.device | str = "cpu", apart: bool = False
    ) -> TransformerModel:
        """The whole model in this process."""
        model = self.open(config, apart)
        materialize(model, device, seed=0)
        forget_files(model)
        return model

    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer that the weights were trained with."""
        return TextTokenizer.load(self.tokenizer_folder())

    def tokenizer_folder(self) -> Path:
        if self.tokenizer is None:
            raise CourseError(
                f"{self.folder} has no tokenizer.json: copy it there, or give data.prepare.tokenizer (chats.tokenizer with mode sft)."
            )
        return self.tokenizer

    def require_extended(self, tokenizer: TextTokenizer) -> None:
        """Refuse another vocabulary: each id of the weights' tokenizer must mean the same token; ids may have been added."""
        if self.tokenizer is None:
            return
        mine, theirs = (each.tokenizer.get_vocab(with_added_tokens=True) for each in (tokenizer, self.text_tokenizer()))
        for token, number in sorted(theirs.items(), key=lambda entry: entry[1]):
            if mine.get(token) != number:
                here = f"id {mine[token]}" if token in mine else "not there"
                raise SettingError(
                    f"The tokenizer has another vocabulary than the model in start_from, {self.folder}: {token!r} is id {number} there and "
                    f"{here} in the one that was given. Leave it out, or give one that only adds tokens."
                )

    def fingerprint(self, digests: Digests) -> str:
        """A hash of the content of all files that decide the weights."""
        files = [self.folder / MANIFEST] if self.is_checkpoint else [*self.folder.glob("config.json"), *self.folder.glob("*.safetensors")]
        found = {path.name: digests.of(path) for path in sorted(files) if path.is_file()}
        if not found:
            raise SettingError(f"{self.folder} is gone, which this run starts from: put it back, and give the same command again.")
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def fingerprint_of(weights: Sequence[InitialWeights], digests: Digests) -> str:
    """A hash of all weights that a run begins with or learns from."""
    first, *more = [each.fingerprint(digests) for each in weights]
    return hashlib.sha256(json.dumps([first, *more]).encode()).hexdigest() if more else first


def require_unchanged(weights: Sequence[InitialWeights], prepared: Path, output: Path) -> None:
    """Refuse weights that somebody has removed or replaced since the record in the run's folder was made, which says what they were.

    Args:
        prepared: the folder with the files' digests.
    """
    if fingerprint_of(weights, Digests(prepared / DIGESTS)) != provenance.saved_start(output):
        folders = " or ".join(str(each.folder) for each in weights)
        raise SettingError(
            f"{folders} has changed since this run began to read it: put back what was there and give the same command again, or give "
            "another engine.output."
        )


@contextmanager
def weights_named(weights: Sequence[InitialWeights]) -> Iterator[None]:
    """A context in which weights that cannot be read, or not any more, are an error message. Another file that is missing is none of it."""
    try:
        yield
    except (PretrainedError, FileNotFoundError, SafetensorError) as error:
        if isinstance(error, FileNotFoundError) and not any(str(each.folder) in str(error) for each in weights):
            raise
        raise SettingError(f"start_from: {error}") from error


def find_initial_weights(path: Path, setting: str = "start_from") -> InitialWeights:
    """Find the weights that `start_from`, or another setting, names: a model, a run or a checkpoint."""
    try:
        path = unpacked(Path(path)) if is_gguf(path) else Path(path)
    except PretrainedError as error:
        raise SettingError(f"{setting}: {error}") from None
    run = path.parent.parent if FOLDER.fullmatch(path.name) else path.parent if path.name == "checkpoints" else path
    try:
        for folder in (path, path / "model"):  # of a run, or as chapter 10's quantize.py leaves it
            if (folder / "config.json").is_file():
                return of_pretrained(folder)
        if (path / STATE).is_file() and (run / provenance.CONFIG).is_file():
            return of_checkpoint(path, run)
        if (run / provenance.CONFIG).is_file() and not FOLDER.fullmatch(path.name):
            if steps := Checkpoints(run / "checkpoints").steps():
                return of_checkpoint(Checkpoints(run / "checkpoints").path(steps[-1]), run)
            raise SettingError(f"{setting} is {path}, a run without a model or a checkpoint: let it train first.")
    except (PretrainedError, OSError, SafetensorError) as error:
        raise SettingError(f"{setting}: {error}") from None
    if not path.exists():
        raise SettingError(f"{setting} is {path}, which does not exist: give a folder with a model, or train one first.")
    raise SettingError(
        f"{setting} is {path}, which is not a model: give a folder with a config.json and safetensors, a run's folder, or a checkpoint."
    )


def read_weights(path: Path, setting: str, read: Callable[[InitialWeights], Result]) -> Result:
    """`read` of the weights that `path` names. A run that trains removes its old checkpoints: where the chosen one is gone before it is
    read, the newest is chosen again.

    Raises:
        CourseError: as `find_initial_weights` and `read`; or each checkpoint was gone.
    """
    for _ in range(TRIES):
        weights = find_initial_weights(path, setting)
        try:
            return read(weights)
        except (CourseError, OSError, SafetensorError):
            if weights.folder.exists():
                raise
    raise CourseError(
        f"{path} trains, and removed {TRIES} checkpoints while they were read: wait until it ends, or let it keep more "
        "(engine.checkpoint.keep_last)."
    )


def find_reward_model(path: Path, setting: str) -> InitialWeights:
    """Find a reward model: a run with mode reward, or a folder of transformers' sequence classification. setting: that names it."""
    folder = path / "model" if (path / "model" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        raise SettingError(f"{setting} is {path}, which holds no model: give the folder of a run with mode reward that has ended.")
    try:
        if not is_reward_model(folder):
            raise SettingError(f"{setting} is {path}, which is a language model: give a reward model, as mode reward makes them.")
        model = open_reward_model(folder, builders=MIXTURE).config
    except (PretrainedError, OSError, SafetensorError) as error:
        raise SettingError(f"{setting}: {error}") from None
    return InitialWeights(folder, model, folder if (folder / "tokenizer.json").is_file() else None)


def is_reward_model(folder: Path) -> bool:
    named = read_json(folder / "config.json").get("architectures") or ()
    return any("ForSequenceClassification" in str(name) for name in (named if isinstance(named, list) else (named,)))


def of_pretrained(folder: Path) -> InitialWeights:
    if is_reward_model(folder):
        raise PretrainedError(f"{folder} is a reward model, which writes no text: give a language model.")
    config = open_pretrained(folder, builders=MIXTURE, files=frozen_files(folder)).config
    model = config if isinstance(config, MixtureModelConfig) else MixtureModelConfig(**vars(config))
    return InitialWeights(folder, model.resolved(), folder if (folder / "tokenizer.json").is_file() else None)


def frozen_files(folder: Path) -> FrozenFolder | None:
    """Reader of a folder with quantized linear layers: NF4 as bitsandbytes stores it, or the layout of GPTQ's or AWQ's files; None if
    nothing is quantized.

    Raises:
        PretrainedError: another quantization, or files that do not fit together.
    """
    settings = read_json(folder / "config.json").get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if isinstance(method, str) and method in KEYS and isinstance(settings, dict):
        return PackedFolder(folder)
    if method != "bitsandbytes" or not isinstance(settings, dict) or not settings.get("load_in_4bit"):
        raise PretrainedError(
            f"{folder} is quantized ({method!r} in its quantization_config), and training starts from plain weights, bitsandbytes' 4 bits, "
            "or GPTQ's or AWQ's files: give the model that it was made from, and adapter.base nf4 for a small base."
        )
    return Nf4Folder(folder)


def of_checkpoint(folder: Path, run: Path) -> InitialWeights:
    """Weights of a checkpoint, whose architecture is in the record of its run."""
    record = provenance.read_record(run / provenance.CONFIG)
    if record.get("mode") == "reward":
        raise PretrainedError(f"{folder} is a checkpoint of a reward model, which writes no text: give a language model.")
    model = configured(MixtureModelConfig, record.get("model", {}), "model").resolved()
    kept = [place for place in (run / "tokenizer", run / "model") if (place / "tokenizer.json").is_file()]
    return InitialWeights(folder, model, kept[0] if kept else None)


def require_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a checkpoint that is damaged, or that does not hold just the weights of its run's model, before any is read. A value head,
    which PPO trains beside the model, may be there."""
    require_intact(folder)
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    held = {name: tuple(shape) for name, (_, shape) in state["contents"]["tensors"]["weights"].items() if name != f"{VALUE}.weight"}
    odd = [name for name in sorted(shapes.keys() | held.keys()) if shapes.get(name) != held.get(name)]
    if odd:
        raise SettingError(
            f"start_from: the checkpoint {folder} does not hold the weights of a whole model ({odd[0]} differs from its config.yaml), as "
            "where an adapter alone is saved: give the run's exported model."
        )


def read_checkpoint(folder: Path, name: str, shape: tuple[int, ...], offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A slice of a weight, from the files of however many ranks wrote it."""
    region = Region(shape, tuple(offsets), tuple(sizes), 0, torch.Size(sizes).numel())
    with ExitStack() as files:
        found = [shards_in(files.enter_context(safe_open(path, "pt"))).get(name, []) for path in files_of(folder, "weights")]
        shards = [shard for of_file in found for shard in of_file]
        if wrong := wrong_shards({name: shards}) if shards else f"none of its files has {name}":
            raise CourseError(f"The checkpoint {folder} is damaged: {wrong}.")
        return read_region(folder, name, shards, region)
