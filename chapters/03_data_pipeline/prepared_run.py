"""A training run on prepared text: prepare it, show what cleaning did, train on packed rows, and fill some gaps.

Chapter 01's loop trains chapter 02's model; new is only where the batches come from. Tokens are no longer bytes, so losses are told
in bits per byte of text, which compares any two tokenizers. The reference is xz, a compressor that learns nothing beforehand.

Left out on purpose: checkpoints and resuming the training, which are chapter 04's. The loader's state is ready for them.
"""

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from torch import nn

from chapters.text_run import plot_losses, print_table, require_numbers, train_with_progress, write_results
from shared.course import binding
from shared.course.errors import CourseError
from shared.data.completion import Gap, fill_gap, find_gaps
from shared.data.fim import FillInMiddle, FimConfig
from shared.data.loader import EvaluationLoader, PackedLoader, require_full_step
from shared.model.chunked_loss import packed_next_token_objective
from shared.data.clean_shards import counted
from shared.data.prepare import PreparedText, prepare
from shared.data.shards import TokenStore
from shared.data.source import Source
from shared.data.tokenizer import TextTokenizer
from shared.devices import pick_device
from shared.output_files import require_writable
from shared.loop import evaluate, train
from shared.model.transformer import TransformerModel
from shared.sampling import require_drawing
from shared.totals import Batch, bits_per_byte

QUICK_ROWS = 64  # held-out rows of an evaluation during training; the last one takes all


def run_on_prepared(config: Any) -> None:
    """Prepare, train and show, as `config` says, and leave the results in `config.output`.

    Args:
        config: the fields of chapter 03's `RunConfig`.
    """
    console = Console(markup=False, emoji=False)
    fim = require_sensible(config)
    device = pick_device(config.device)
    require_writable(config.output)
    paths = [config.data] if isinstance(config.data, str) else config.data
    preparation = replace(config.prepare, sources=tuple(map(Source, paths))) if paths else config.prepare
    if any(source.weight is not None for source in preparation.sources):
        raise CourseError("prepare.sources has weights, and this run takes texts in their own proportions: the trainer mixes by weight.")
    say_what_is_taken_for_a_dataset(console, preparation.sources)
    prepared = prepare(preparation, config.output / "prepared", console)
    print_header(console, prepared)

    model = TransformerModel(replace(config.model, vocab_size=prepared.tokenizer.vocab_size), seed=config.seed).to(device)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, on {device}.\n{binding.summary()}", highlight=False)
    loader = loader_of(config, fim, prepared)
    require_full_step(loader)
    history = train_with_progress(
        config, losses_of(config, model, prepared, loader), lambda: bits_of(model, prepared, config, device, QUICK_ROWS), console
    )

    held_out = bits_of(model, prepared, config, device, limit=None)
    reference = xz_bits(prepared)
    gaps = [
        fill_gap(
            model, prepared.tokenizer, gap, config.middle_tokens, context=config.seq, temperature=config.temperature, top_k=config.top_k,
            generator=torch.Generator(device).manual_seed(config.seed),
        )
        for gap in find_gaps(prepared.held_out, prepared.tokenizer, config.gaps, config.seed)
    ]  # fmt: skip
    results = {
        "steps": len(history.training),
        "tokens seen": history.tokens,
        "tokens per second": history.tokens_per_second,
        "bytes per token, held out": f"{prepared.held_out.byte_counts.sum() / prepared.held_out.token_count:.2f}",
        "segments too long for their row once moved": loader.skipped,
        "held-out bits per byte": f"{held_out:.3f}",
        "held-out bits per byte, xz": f"{reference:.3f}",
    }
    show_gaps(console, gaps)
    print_table(console, results)
    plot_losses(history, reference, "xz, each held-out file alone", config.output / "loss.png", top=6)
    record = {"figures": results, "training": history.training, "held_out": history.held_out, "gaps": [gap._asdict() for gap in gaps]}
    write_results(config.output, model, record)
    console.print(f"Plot: {config.output / 'loss.png'}; of the cleaning: {prepared.folder / 'report.png'}.", highlight=False)


def require_sensible(config: Any) -> FimConfig:
    """Refuse, before any work, values that would only fail after it. The transform's settings come out."""
    require_numbers(config, ("steps", "seq", "batch_size", "micro_batch_size", "evaluate_every", "middle_tokens"))
    if config.gaps < 0:
        raise CourseError(f"gaps is {config.gaps}: give at least 0.")
    if config.seq > config.model.max_position_embeddings:
        longest = config.model.max_position_embeddings
        raise CourseError(f"seq is {config.seq} and model.max_position_embeddings only {longest}: make it as large.")
    if config.model.architecture != "decoder":
        raise CourseError(f"architecture is {config.model.architecture!r}: predicting the next token needs a decoder.")
    if not 0 <= config.slack < config.seq:
        raise CourseError(f"slack is {config.slack}: give at least 0 and less than seq, {config.seq}.")
    try:
        require_drawing(config.temperature, config.top_k)
        return FimConfig(config.fim_rate, config.fim_spm_share, config.fim_split)
    except ValueError as error:
        raise CourseError(str(error)) from None


def say_what_is_taken_for_a_dataset(console: Console, sources: Sequence[Source]) -> None:
    """A mistyped folder looks like the name of a dataset, and it takes half a minute until the hub has not been reached."""
    for source in sources:
        if source.kind == "auto" and source.resolved_kind() == "hub":
            said = f"There is no file or folder {source.path} here, so it is taken for a dataset of the Hugging Face hub."
            console.print(said, markup=False, highlight=False)


def loader_of(config: Any, fim: FimConfig, prepared: PreparedText) -> PackedLoader:
    """Packed rows of the training documents, some with their middle moved."""
    tokenizer = prepared.tokenizer
    transform = FillInMiddle(fim, tokenizer.encode, tokenizer.decode, tokenizer.fim_tokens) if fim.rate else None
    return PackedLoader(
        prepared.training, seq=config.seq, batch_size=config.batch_size, micro_batch_size=config.micro_batch_size,
        seed=config.seed, transform=transform, slack=config.slack if transform else 0,
    )  # fmt: skip


def print_header(console: Console, prepared: PreparedText) -> None:
    console.print(prepared.report.table())
    for side, store in (("to train on", prepared.training), ("held out", prepared.held_out)):
        megabytes = store.byte_counts.sum() / 1e6
        console.print(f"{counted(len(store))} {side}: {megabytes:.2f} MB, {store.token_count:,} tokens.", highlight=False)
    console.print(f"Vocabulary: {prepared.tokenizer.vocab_size:,} tokens. Prepared text: {prepared.folder}", highlight=False)


def losses_of(config: Any, model: nn.Module, prepared: PreparedText, loader: PackedLoader) -> Iterator[tuple[int, float, int]]:
    """Train: step, bits per byte and tokens of each step. Its bytes are those of text that its targets stand for."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    sizes = torch.from_numpy(prepared.tokenizer.byte_lengths)
    covered: list[int] = []  # bytes of text in each step

    def batches() -> Iterator[list[Batch]]:
        for step in loader:
            covered.append(sum(int(sizes[batch["targets"].clamp(min=0)][batch["targets"] >= 0].sum()) for batch in step))
            yield [{name: tensor.to(device) for name, tensor in batch.items()} for batch in step]

    for step, totals in train(model, optimizer, batches(), packed_next_token_objective, steps=config.steps):
        yield step, bits_per_byte(totals.loss_sum, covered[step - 1]), totals.token_count.item()


def bits_of(model: nn.Module, prepared: PreparedText, config: Any, device: torch.device, limit: int | None) -> float:
    """Bits per byte of the held-out documents. First tokens are given; end tokens cost bits and are no bytes."""
    loader = EvaluationLoader(prepared.held_out, seq=config.seq, batch_size=config.batch_size, limit=limit)
    batches = ({name: tensor.to(device) for name, tensor in batch.items()} for batch in loader)
    totals = evaluate(model, batches, packed_next_token_objective)
    return bits_per_byte(totals.loss_sum, loader.byte_count(prepared.tokenizer.byte_lengths))


def texts_of(store: TokenStore, tokenizer: TextTokenizer) -> Iterator[str]:
    return (tokenizer.decode(store.document(number)) for number in range(len(store)))


def xz_bits(prepared: PreparedText) -> float:
    """Bits per byte of xz, each held-out document by itself."""
    contents = [text.encode() for text in texts_of(prepared.held_out, prepared.tokenizer)]
    raw = {"format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2, "preset": 9}]}
    return 8 * sum(len(lzma.compress(content, **raw)) for content in contents) / sum(map(len, contents))


def show_gaps(console: Console, gaps: list[Gap]) -> None:
    for gap in gaps:
        console.rule(gap.name)
        shown_before, shown_after = ("".join(gap.prefix.splitlines(keepends=True)[-3:]), "".join(gap.suffix.splitlines(keepends=True)[:3]))
        console.print(f"{shown_before}⟦{gap.filled}⟧{shown_after.rstrip()}", markup=False, highlight=False)
        console.print(f"(the author wrote: {gap.middle})", markup=False, highlight=False, style="dim")
    console.rule()
