"""Quantize the model that a run exported, or any folder of LLaMA's family, and say what it cost: error by layer, perplexity, size on disk.

    python chapters/10_finetuning/quantize.py --model runs/main/model --method gptq --bits 4
    python chapters/10_finetuning/quantize.py --model runs/main/model --method awq --bits 4 --group 128 --symmetric false

Layers are calibrated on training text of the embedded corpus, or of --data, in the model's own tokens; perplexity is that of held-out text.
The corpus is cleaned by the rules for code. Text of --data is only repaired (encoding, line ends): no document of it is dropped.
The result is written in the layout of GPTQ's or AWQ's files, with the tokenizer and the chat template: `course chat runs/10_quantize` talks
to it, and `start_from=runs/10_quantize adapter.base=packed` trains an adapter over it.
"""

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shared.course.launch import launch

if TYPE_CHECKING:
    from rich.console import Console

    from shared.data.prepare import PreparedText
    from shared.model.transformer import TransformerModel


@dataclass
class QuantizeConfig:
    """Quantize a model.

    Args:
        model: folder of the model, with its tokenizer: the folder `model` of a run; or a GGUF file, or smollm2.
        impl: whose exercises run: the solutions, yours, or yours where their check passed.
        method: nearest rounds each weight by itself; gptq and awq look at what the weights are multiplied by.
        bits: of a weight: 2, 3, 4 or 8.
        group: weights of a row that share a scale; null for whole rows.
        symmetric: whether the zero point is the middle of the codes; AWQ's files are asymmetric as a rule.
        act_order: GPTQ quantizes the inputs with the largest values first.
        damping: GPTQ adds this share of the Hessian's mean diagonal to its diagonal.
        layout: of the files; null for the method's own, GPTQ's for rounding to nearest.
        data: a text file or folder, or a list of them, used without cleaning; none for the embedded corpus.
        rows: of calibration text.
        seq: tokens in a row.
        held_out_rows: rows of held-out text for the perplexity.
        seed: of the choice of rows.
        output: folder of the quantized model.
    """

    model: Path
    impl: Literal["reference", "mine", "mixed"] = "reference"
    method: Literal["nearest", "gptq", "awq"] = "gptq"
    bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    act_order: bool = False
    damping: float = 0.01
    layout: Literal["gptq", "awq"] | None = None
    data: Path | list[Path] = field(default_factory=list)
    rows: int = 64
    seq: int = 256
    held_out_rows: int = 64
    seed: int = 0
    output: Path = Path("runs/10_quantize")


def run(config: QuantizeConfig) -> None:
    # The core is imported here, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from shared.course.errors import CourseError
    from shared.data.loader import PackedLoader
    from shared.finetune.chat.template import FILE, ChatTemplate
    from shared.finetune.gguf.packaged import is_gguf
    from shared.finetune.gguf.unpack import unpacked
    from shared.finetune.quantization.methods import layers_of, quantize_model, require_sizes
    from shared.finetune.quantization.packed_files import require_outputs, save_quantized
    from shared.model.hf.files import PretrainedError
    from shared.model.hf.pretrained import load_pretrained, open_pretrained
    from shared.output_files import remove_left_over, require_writable, writing

    console = Console(markup=False, emoji=False)
    for name in ("rows", "seq", "held_out_rows"):
        if getattr(config, name) < 1:
            raise CourseError(f"{name} is {getattr(config, name)}: give at least 1.")
    try:
        method, layout = method_of(config), layout_of(config)
        config = replace(config, model=unpacked(config.model)) if is_gguf(config.model) else config
        require_sizes(open_pretrained(config.model), rounding_of(config))  # before the weights are read
        model = load_pretrained(config.model)
        total = layers_of(model)
        require_outputs(model, config.bits)
    except (PretrainedError, ValueError) as error:
        raise CourseError(str(error)) from None
    require_room(config, model)
    if config.output.resolve() == config.model.resolve():
        raise CourseError(f"output is {config.output}, where the model is: give another folder.")
    require_writable(config.output)
    text = prepared_text(config, model, console)
    for line in calibration_lines(config):
        console.print(line, highlight=False, soft_wrap=True)
    before = perplexity(model, text, config)
    loader = PackedLoader(text.training, seq=config.seq, batch_size=min(8, config.rows), seed=config.seed, prefetch=0)
    began = time.perf_counter()
    try:
        reports = with_progress(quantize_model(model, calibration(loader, config.rows), method), total, len(model.stack.blocks), console)
    except ValueError as error:
        raise CourseError(str(error)) from None
    seconds = time.perf_counter() - began
    after = perplexity(model, text, config)
    folder = config.output / "model"
    remove_left_over(folder)
    try:
        with writing(folder):
            save_quantized(model, folder, layout=layout)
            text.tokenizer.save_pretrained(folder, model.config.max_position_embeddings)
            if (config.model / FILE).is_file():
                ChatTemplate.load(config.model).save(folder)
    except ValueError as error:
        raise CourseError(str(error)) from None
    show(console, reports, config)
    sizes = [sum(file.stat().st_size for file in each.glob("*.safetensors")) / 1e6 for each in (config.model, folder)]
    rows = f"{config.held_out_rows} rows of held-out text"
    console.print(f"Perplexity of a token: {before:.3f} before, {after:.3f} after ({rows}).", highlight=False)
    console.print(f"Size on disk: {sizes[0]:.2f} MB before, {sizes[1]:.2f} MB after. {total} layers in {seconds:.0f} s.", highlight=False)
    console.print(f"Written in the {layout} layout: {folder}", highlight=False)


def require_room(config: QuantizeConfig, model: "TransformerModel") -> None:
    """Refuse rows that the model cannot read, and more of them than memory holds as the inputs of a block."""
    import psutil

    from shared.course.errors import CourseError

    longest, free = model.config.max_position_embeddings, psutil.virtual_memory().available
    if config.seq > longest:
        raise CourseError(f"seq is {config.seq} and the model reads {longest} positions: give at most so many.")
    if (need := 4 * config.rows * config.seq * model.config.hidden_size) > free:
        raise CourseError(
            f"{config.rows:,} rows of {config.seq:,} tokens are {need / 1e9:,.1f} GB as the inputs of a block, and {free / 1e9:,.1f} GB of "
            "memory are free: give fewer rows."
        )


def rounding_of(config: QuantizeConfig) -> Any:
    from shared.finetune.quantization.rounding import Rounding

    return Rounding(config.bits, config.group, config.symmetric)


def method_of(config: QuantizeConfig) -> Any:
    from shared.finetune.quantization.awq import AWQ
    from shared.finetune.quantization.gptq import GPTQ

    rounding = rounding_of(config)
    if config.method == "gptq":
        return GPTQ(rounding, damping=config.damping, act_order=config.act_order)
    return AWQ(rounding) if config.method == "awq" else rounding


def layout_of(config: QuantizeConfig) -> str:
    """The files' layout, refused here where it does not fit rather than after the work."""
    from shared.finetune.quantization.packed_settings import file_settings

    layout = config.layout or ("awq" if config.method == "awq" and config.bits == 4 else "gptq")
    file_settings(rounding_of(config), layout)
    return layout


def prepared_text(config: QuantizeConfig, model: "TransformerModel", console: "Console") -> "PreparedText":
    """Training and held-out text in the model's own tokens."""
    from shared.course.errors import CourseError
    from shared.data.cleaning.cleaner import CleaningConfig
    from shared.data.prepare import PrepareConfig, prepare
    from shared.data.source import Source

    paths = config.data if isinstance(config.data, list) else [config.data]
    sources = tuple(Source(str(path)) for path in paths) or PrepareConfig().sources
    cleaning = CleaningConfig(stages=("repair",)) if paths else CleaningConfig()  # rules for code would drop prose that was given
    text = prepare(PrepareConfig(sources, cleaning, tokenizer=config.model), config.output / "prepared", console)
    if text.tokenizer.vocab_size > model.config.vocab_size:
        raise CourseError(
            f"The tokenizer in {config.model} has {text.tokenizer.vocab_size:,} tokens and the model {model.config.vocab_size:,}: they do "
            "not belong together."
        )
    return text


def calibration_lines(config: QuantizeConfig) -> list[str]:
    """Which text the layers are calibrated on, and a warning where it is the course's and the model is another's."""
    paths = config.data if isinstance(config.data, list) else [config.data]
    text = ", ".join(map(str, paths)) or "the embedded corpus, Python source"
    lines = [f"Calibration text: {config.rows} rows of {config.seq} tokens of {text}; held out: {config.held_out_rows} rows of the same."]
    if not paths and not is_trained_here(config.model):
        lines.append("The model is not the course's, and GPTQ and AWQ fit it to that corpus: give --data with text like what it will read.")
    return lines


def is_trained_here(model: Path) -> bool:
    """Whether a run trained the model from random weights, or continued such a run."""
    from shared.course.strict_yaml import read_yaml

    record = model.parent / "config.yaml"
    start = read_yaml(record).get("start_from") if record.is_file() else str(model)
    return start is None or (record.is_file() and is_trained_here(Path(start) / "model"))


def calibration(loader: Any, rows: int) -> Any:
    """Batches of about `rows` rows."""
    batches = iter(loader)
    for _ in range(-(-rows // loader.batch_size)):
        for batch in next(batches):
            yield batch


def perplexity(model: "TransformerModel", text: "PreparedText", config: QuantizeConfig) -> float:
    from shared.data.loader import EvaluationLoader
    from shared.loop import evaluate
    from shared.model.chunked_loss import packed_next_token_objective

    loader = EvaluationLoader(text.held_out, seq=config.seq, batch_size=8, limit=config.held_out_rows)
    return math.exp(evaluate(model, loader, packed_next_token_objective).mean_loss)


def with_progress(reports: Any, total: int, blocks: int, console: "Console") -> list[Any]:
    """All reports, under a progress bar where there is a terminal, and with a line for each block."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: list[Any] = []

    def say_block() -> None:
        block = found[-1].name.split(".")[2]
        lost = [report.error for report in found if report.name.split(".")[2] == block]
        console.print(f"Block {int(block) + 1} of {blocks}: its layers lose up to {max(lost):.5f} of their outputs.", highlight=False)

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("quantizing", total=total)
        for report in reports:
            if found and found[-1].name.split(".")[2] != report.name.split(".")[2]:
                say_block()
            found.append(report)
            bar.update(task, advance=1, description=report.name.removeprefix("stack."))
        say_block()
    return found


def show(console: "Console", reports: list[Any], config: QuantizeConfig) -> None:
    from rich.table import Table

    table = Table("layer", title=f"Share of each layer's outputs that is lost on calibration text, {config.bits} bits")
    table.add_column(config.method, justify="right")
    if config.method != "nearest":
        table.add_column("to nearest", justify="right")
    for report in reports:
        shares = [report.error, report.rounded] if config.method != "nearest" else [report.error]
        table.add_row(report.name, *(f"{share:.5f}" for share in shares))
    console.print(table)
    if config.method == "gptq" and (worse := [report.name for report in reports if report.error >= report.rounded > 0]):
        advice = "give more calibration text, --rows"
        console.print(f"GPTQ is no better than rounding to nearest at {', '.join(worse)}: {advice}.", highlight=False)


if __name__ == "__main__":
    launch(run, QuantizeConfig, Path(__file__).with_name("quantize.yaml"))
