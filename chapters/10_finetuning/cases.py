"""Two cases of continued pretraining, one command each: a table over seeds, a plot, and what the seeds allow to be said.

    python chapters/10_finetuning/cases.py --experiment domain     a model of prose learns mathematics code: what replay keeps of the prose
    python chapters/10_finetuning/cases.py --experiment language   a model learns a second language, with its old tokens and with new ones

Everything is small and made here: prose are the docstrings of the embedded packages, mathematics code is sympy's, and the second language
is the prose in other letters, with other endings and another order of words. Interrupt it and start it again: it continues. For text of
your own, domain.yaml and language.yaml do the same with the trainer.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare
from shared.course.launch import launch

MODEL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.1,
    "intermediate_size": 192, "tie_word_embeddings": True,
}  # fmt: skip
LOOKS = 8  # points of a curve
REPLAY = (0.0, 0.1, 0.5)
CASES = {
    "domain": {
        f"{share:.0%} replay, rate {'again' if rewarmed == 1 else 'a tenth'}": {"replay": share, "rate": rewarmed}
        for rewarmed in (1.0, 0.1)
        for share in REPLAY
    },
    "language": {
        "old tokens": {"rows": "none"},
        "new tokens, random rows": {"rows": "random"},
        "new tokens, mean of all rows": {"rows": "mean"},
        "new tokens, mean of their parts": {"rows": "parts"},
    },
}
LETTERS = dict(zip("abcdefghijklmnopqrstuvwxyz", "юбцдяфгхуйклмнэпщрстижшъыз", strict=True))


@dataclass
class CaseConfig(ExperimentConfig):
    """Continue the training of a model on a new domain or in a new language, from several seeds.

    Args:
        first_steps: training steps of the model before.
        vocab_size: tokens of the model before, in the case of a language; a domain is read byte by byte.
        new_tokens: tokens that the tokenizer gets for the second language.
        characters: held-out characters of each text in an evaluation.
    """

    experiment: Literal["domain", "language"] = "domain"
    first_steps: int = 800
    steps: int = 400
    seq: int = 64
    batch_size: int = 16
    vocab_size: int = 800
    new_tokens: int = 600
    characters: int = 20_000
    output: Path = Path("runs/10_cases")


def second_language(text: str) -> str:
    """The same text in a language of its own: other letters, a suffix on longer words, and each line's words from the last to the first."""
    lines = []
    for line in text.split("\n"):
        words = [word + "en" if word.isalpha() and len(word) > 4 else word for word in line.split(" ")]
        spelled = " ".join(reversed(words)).lower()
        lines.append("".join(LETTERS.get(letter, letter) for letter in spelled))
    return "\n".join(lines)


@functools.cache
def texts_of(case: str) -> dict[str, tuple[str, str]]:
    """Name -> what is trained on, and what is held out."""
    from chapters.prose import prose_of
    from shared.corpus import EMBEDDED, embedded_corpus

    by_name = {package.name: package for package in EMBEDDED}
    prose = embedded_corpus([by_name["networkx"], by_name["jinja2"]])
    sides = ["".join(prose_of(documents)) for documents in (prose.training, prose.held_out)]
    if case == "language":
        return {"first language": tuple(sides), "second language": tuple(map(second_language, sides))}
    code = embedded_corpus([by_name["sympy"]])
    halves = [b"".join(document.content for document in documents).decode() for documents in (code.training[::4], code.held_out)]
    return {"prose": tuple(sides), "mathematics code": tuple(halves)}


def run(config: CaseConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable

    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    sizes = ("first_steps", "steps", "seq", "batch_size", "learning_rate", "vocab_size", "new_tokens", "characters")
    common = config.settings("experiment", *sizes)
    variants = {name: variant | common for name, variant in CASES[config.experiment].items()}

    def trial(settings: dict[str, Any], seed: int) -> dict[str, float]:
        figures, curve = continued(config, settings, seed)
        name = next(name for name, other in variants.items() if other == settings)
        curve_path(config, name, seed).write_text(json.dumps(curve), encoding="utf-8")
        return figures

    results = compare(config, variants, trial, console)
    learned = list(texts_of(config.experiment))[1]
    console.print(trials.verdict(results, f"{learned}, bits per character"), highlight=False)
    curves = {name: json.loads(curve_path(config, name, 0).read_text(encoding="utf-8")) for name in variants}
    draw_curves(config, curves, config.output / f"{config.experiment}.png")
    console.print(f"Plot: {config.output / f'{config.experiment}.png'}   the figures of every run beside it.", highlight=False)


def curve_path(config: CaseConfig, variant: str, seed: int) -> Path:
    return config.output / f"{config.experiment}-{''.join(c if c.isalnum() else '_' for c in variant)}-{seed}.json"


class Tokens:
    """How texts become ids: bytes, or a tokenizer's."""

    def __init__(self, tokenizer: Any = None):
        self.tokenizer, self.size = tokenizer, tokenizer.vocab_size if tokenizer else 256

    def encode(self, text: str) -> Any:
        import torch

        return torch.tensor(self.tokenizer.encode(text) if self.tokenizer else list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids) if self.tokenizer else bytes(ids).decode(errors="ignore")


@functools.cache
def first_tokens(case: str, vocab_size: int) -> Tokens:
    from shared.data.tokenizer import TextTokenizer

    if case == "domain":
        return Tokens()
    return Tokens(TextTokenizer.train([texts_of(case)["first language"][0]], vocab_size, sentinels=0))


@functools.cache
def stream(case: str, name: str, tokens: Tokens) -> Any:
    return tokens.encode(texts_of(case)[name][0])


def make_model(vocab_size: int, seed: int) -> Any:
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel

    return TransformerModel(ModelConfig(**MODEL, vocab_size=vocab_size), seed=seed)


def fit(model: Any, config: CaseConfig, shares: dict[str, float], tokens: Tokens, steps: int, rate: float, seed: int, look: Any) -> list:
    """Train on windows drawn from several texts by their shares, with a warm-up and a decay. Returns what `look` saw, `LOOKS` times."""
    import torch

    from shared.batches import batch_at
    from shared.loop import train
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    generator = torch.Generator().manual_seed(seed)
    streams = {name: stream(config.experiment, name, tokens) for name, share in shares.items() if share}

    def batch() -> dict[str, Any]:
        counts = torch.multinomial(torch.tensor([shares[name] for name in streams]), config.batch_size, True, generator=generator)
        rows = [
            batch_at(each, torch.randint(len(each) - config.seq, (int((counts == place).sum()),), generator=generator), config.seq)
            for place, each in enumerate(streams.values())
            if (counts == place).any()
        ]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=rate))
    attach_schedule(ScheduleConfig("cosine", steps, max(1, round(0.07 * steps))), optimizer)
    seen = [look(model)]
    data = ([batch()] for _ in range(steps))
    for step, _ in train(model, optimizer, data, packed_next_token_objective, steps=steps, updater=Update(max_norm=1.0)):
        if step % max(1, steps // LOOKS) == 0:
            seen.append(look(model))
    return seen


def bits_per_character(model: Any, config: CaseConfig, tokens: Tokens) -> dict[str, float]:
    """Of the held-out part of each text, in windows that do not overlap."""
    import torch

    from shared.batches import sequential_batches
    from shared.loop import evaluate
    from shared.model.chunked_loss import packed_next_token_objective

    found = {}
    for name, (_, held_out) in texts_of(config.experiment).items():
        ids = tokens.encode(held_out[: config.characters])
        windows = (len(ids) - 1) // config.seq
        read = tokens.decode(ids[1 : windows * config.seq + 1].tolist())  # what is predicted
        with torch.no_grad():
            totals = evaluate(model, sequential_batches(ids, config.seq, 64, windows), packed_next_token_objective)
        found[name] = float(totals.loss_sum) / math.log(2) / len(read)
    return found


@functools.cache
def first_weights(case: str, steps: int, batch_size: int, seq: int, rate: float, vocab_size: int, seed: int) -> dict[str, Any]:
    """The model before: trained on the first text alone."""
    config = CaseConfig(experiment=case, batch_size=batch_size, seq=seq)
    tokens = first_tokens(case, vocab_size)
    model = make_model(tokens.size, seed)
    fit(model, config, {list(texts_of(case))[0]: 1.0}, tokens, steps, rate, seed, lambda model: None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def continued(config: CaseConfig, settings: dict[str, Any], seed: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Continue the training of the model before. Returns the figures, and the curve of both texts."""
    import torch

    from shared.finetune.vocabulary import extend_tokenizer

    tokens = first_tokens(config.experiment, config.vocab_size)
    model = make_model(tokens.size, seed)
    model.load_state_dict(
        first_weights(config.experiment, config.first_steps, config.batch_size, config.seq, config.learning_rate, config.vocab_size, seed)
    )
    old, new = texts_of(config.experiment)
    before = bits_per_character(model, config, tokens)
    kept = settings.get("replay", 0.5)
    held_out = texts_of(config.experiment)[new][1][: config.characters]
    if settings.get("rows", "none") != "none":
        extended = extend_tokenizer(tokens.tokenizer, [texts_of(config.experiment)[new][0]], config.new_tokens)
        tokens, model = Tokens(extended.tokenizer), with_rows(model, extended, settings["rows"], seed)
    torch.manual_seed(seed)
    look = lambda model: bits_per_character(model, config, tokens)  # noqa: E731
    rate = settings.get("rate", 1.0) * config.learning_rate
    curve = fit(model, config, {old: kept, new: 1 - kept}, tokens, config.steps, rate, seed + 1000, look)
    figures = {f"{new}, bits per character": curve[-1][new], f"{new}, before": before[new]}
    figures |= {f"{old}, bits per character": curve[-1][old], f"{old}, before": before[old]}
    if config.experiment == "language":
        figures |= {"tokens per character": len(tokens.encode(held_out)) / len(held_out)}
    return figures, curve


def with_rows(model: Any, extended: Any, rows: str, seed: int) -> Any:
    """The model with a row for each new token: the mean of all rows, of its parts' rows, or random as in a new model."""
    import torch

    from shared.finetune.vocabulary import resized
    from shared.model.config import ModelConfig
    from shared.model.init import materialize

    old = model.config.vocab_size
    larger = resized(model, ModelConfig(**MODEL, vocab_size=extended.tokenizer.vocab_size))
    materialize(larger, "cpu", seed)
    table = larger.embedding.tokens.weight
    with torch.no_grad():
        if rows == "random":
            table[old:] = make_model(extended.tokenizer.vocab_size, seed + 1).embedding.tokens.weight[old:]
        for new, pair in extended.parts.items() if rows == "parts" else ():
            table[new] = table[list(pair)].mean(dim=0)
    return larger


def draw_curves(config: CaseConfig, curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """What is gained on the new text against what is lost on the old one: a line for each variant of the second training."""
    from matplotlib.figure import Figure

    from shared.course import figures

    figures.use_style()
    old, new = texts_of(config.experiment)
    drawing = Figure(figsize=(7.0, 4.6))
    axes = drawing.subplots()
    for name, curve in curves.items():
        axes.plot([point[old] for point in curve], [point[new] for point in curve], marker="o", markersize=3, label=name)
    axes.set(xlabel=f"{old}: held-out bits per character (forgetting: to the right)", ylabel=f"{new}: held-out bits per character")
    axes.legend(fontsize=8)
    drawing.savefig(path)


if __name__ == "__main__":
    launch(run, CaseConfig, Path(__file__).with_name("cases.yaml"))
