"""Full fine-tuning beside adapters: quality against trained parameters, memory and time, from several seeds: a table and two plots.

    python chapters/10_finetuning/experiments.py                 full, LoRA of several ranks, DoRA, QLoRA, prompt and prefix tuning
    python chapters/10_finetuning/experiments.py --seeds 1 --steps 20        ends within two minutes and shows only that it runs

A small base is trained on the embedded corpus, and then on conversations that code makes: arithmetic, formats, small Python functions.
Held-out tasks are answered greedily, and each answer is checked. Interrupt it and start it again: it continues.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chapters.experiment_run import ExperimentConfig, compare
from shared.course.launch import launch

RIGHT, LOSS = "held-out tasks right, %", "held-out loss on answers"
TRAINED, HELD = "trained parameters", "MB of weights, gradients and state"
COMPUTED = "CPU ms a step"  # of all threads: what else the machine does shows little in it
MODEL = {
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384,
    "max_position_embeddings": 160, "tie_word_embeddings": True, "initializer_range": 0.06,
}  # fmt: skip
ALL = {"targets": ["all-linear"]}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"adapter": None, "rate": 0.002},
    "LoRA, rank 1": {"adapter": ALL | {"rank": 1, "alpha": 2.0}, "rate": 0.01},
    "LoRA, rank 4": {"adapter": ALL | {"rank": 4, "alpha": 8.0}, "rate": 0.01},
    "LoRA, rank 16": {"adapter": ALL | {"rank": 16, "alpha": 32.0}, "rate": 0.005},
    "LoRA, rank 16, queries and values": {"adapter": {"rank": 16, "alpha": 32.0}, "rate": 0.01},
    "DoRA, rank 4": {"adapter": ALL | {"rank": 4, "alpha": 8.0, "decomposed": True}, "rate": 0.01},
    "QLoRA, rank 16": {"adapter": ALL | {"rank": 16, "alpha": 32.0, "base": "nf4"}, "rate": 0.005},
    "prompt, 16": {"adapter": {"kind": "prompt", "virtual_tokens": 16}, "rate": 0.05},
    "prefix, 16": {"adapter": {"kind": "prefix", "virtual_tokens": 16}, "rate": 0.05},
}


@dataclass
class AdapterExperimentConfig(ExperimentConfig):
    """Fine-tune a small model in several ways, each from several seeds.

    Args:
        base_steps: training steps of the base, on the embedded corpus.
        vocab_size: of the base's tokenizer.
        conversations: that are made to train on.
        tasks: held-out tasks that are answered.
    """

    experiment: Literal["adapters"] = "adapters"
    base_steps: int = 400
    steps: int = 250
    seq: int = 128
    batch_size: int = 8
    vocab_size: int = 1200
    conversations: int = 4000
    tasks: int = 60
    output: Path = Path("runs/10_experiments")


def run(config: AdapterExperimentConfig) -> None:
    # The core is imported within the functions, after `launch` has chosen whose exercises it runs with.
    from rich.console import Console

    from chapters import trials
    from shared.devices import keep_freed_memory
    from shared.output_files import require_writable

    require_writable(config.output)
    keep_freed_memory()
    console = Console(markup=False, emoji=False)
    common = config.settings("steps", "seq", "batch_size", "base_steps", "vocab_size", "conversations", "tasks")
    variants = {name: variant | common for name, variant in VARIANTS.items()}
    results = compare(config, variants, lambda settings, seed: trial(config, settings, seed), console)
    console.print(trials.verdict(results, LOSS), highlight=False)
    plots = {"adapters.png": LOSS, "adapters_right.png": RIGHT}
    groups = {"full": ["full"], "LoRA, all linear layers": [f"LoRA, rank {rank}" for rank in (1, 4, 16)]}
    groups |= {"QLoRA, rank 16": ["QLoRA, rank 16"], "prompt, 16": ["prompt, 16"]}
    for name, figure in plots.items():
        trials.plot_against(results, groups, TRAINED, figure, config.output / name)
    console.print(f"Plots: {', '.join(str(config.output / name) for name in plots)}", highlight=False)


@functools.cache
def tokenizer_of(vocab_size: int) -> Any:
    from shared.corpus import EMBEDDED, embedded_corpus
    from shared.data.tokenizer import TextTokenizer

    documents = embedded_corpus(EMBEDDED[1:]).training
    return TextTokenizer.train([document.content.decode() for document in documents], vocab_size, sentinels=0)


@functools.cache
def base_stream(vocab_size: int) -> Any:
    import torch

    from shared.corpus import EMBEDDED, embedded_corpus

    tokenizer = tokenizer_of(vocab_size)
    encoded = tokenizer.encode_batch_fast([document.content.decode() for document in embedded_corpus(EMBEDDED[1:]).training])
    return torch.cat([torch.tensor([*ids, tokenizer.end_id]) for ids in encoded])


@functools.cache
def base_weights(steps: int, vocab_size: int, seq: int, batch_size: int, seed: int) -> dict[str, Any]:
    """The base, trained on code with the tokens that chats need later in its vocabulary already."""
    import torch

    from shared.batches import random_batches
    from shared.loss import next_token_objective

    model, stream = make_model(vocab_size, seed), base_stream(vocab_size)
    batches = random_batches(stream, batch_size, seq, torch.Generator().manual_seed(seed))
    fit(model, ([batch] for batch in batches), next_token_objective, steps, 0.003)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_model(vocab_size: int, seed: int) -> Any:
    from shared.model.config import ModelConfig
    from shared.model.transformer import TransformerModel

    return TransformerModel(ModelConfig(**MODEL, vocab_size=vocab_size), seed=seed)


def fit(model: Any, data: Any, objective: Any, steps: int, rate: float) -> Any:
    """Train what is not frozen with AdamW, a warm-up and a decay. Returns the optimizer."""
    from shared.loop import train
    from shared.optim.build import build_optimizer
    from shared.optim.config import OptimizerConfig, ScheduleConfig
    from shared.optim.schedules import attach_schedule
    from shared.optim.updater import Update

    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", lr=rate))
    attach_schedule(ScheduleConfig("cosine", steps, max(1, round(0.07 * steps))), optimizer)
    for _ in train(model, optimizer, data, objective, steps=steps, updater=Update(max_norm=1.0)):
        pass
    return optimizer


def prepared_chats(config: AdapterExperimentConfig) -> tuple[Any, list[Any]]:
    """The conversations, tokenized with the base's tokenizer, and the held-out tasks. Made once."""
    from shared.finetune.chat.datasets import ChatSource
    from shared.finetune.chat.prepare import ChatConfig, prepare_chats
    from shared.finetune.instructions import read_tasks, write_instructions

    folder = config.output / f"text-{config.vocab_size}"
    if not (folder / "tokenizer").exists():
        tokenizer_of(config.vocab_size).save_pretrained(folder / "tokenizer", config.seq)
    file, tasks = write_instructions(folder, config.conversations, config.tasks)
    chats = ChatConfig(sources=(ChatSource(str(file)),), tokenizer=folder / "tokenizer", held_out_share=0.1)
    return prepare_chats(chats, folder, config.seq - 16), read_tasks(tasks)[: config.tasks]


def trial(config: AdapterExperimentConfig, settings: dict[str, Any], seed: int) -> dict[str, float | None]:
    """Fine-tune the base in one way. Returns quality, trained parameters, what is held in memory, and the time of a step."""
    import torch

    from shared.finetune.adapters import attach_adapter
    from shared.finetune.chat.rows import chat_loaders
    from shared.finetune.config import AdapterConfig
    from shared.finetune.quantization.nf4_linear import quantize_base
    from shared.finetune.soft_prompts import virtual_ids
    from shared.finetune.vocabulary import resized
    from shared.loop import evaluate
    from shared.model.chunked_loss import packed_next_token_objective
    from shared.model.config import ModelConfig
    from shared.model.init import materialize

    chats, tasks = prepared_chats(config)
    base = make_model(config.vocab_size, seed)
    base.load_state_dict(base_weights(config.base_steps, config.vocab_size, config.seq, config.batch_size, seed))
    larger = ModelConfig(**MODEL, vocab_size=chats.tokenizer.vocab_size)
    model = resized(base, larger, apart=settings["adapter"] is not None)  # rows that stay frozen must differ
    materialize(model, "cpu", seed)
    if settings["adapter"] is not None:
        adapter = AdapterConfig(**settings["adapter"] | {"targets": tuple(settings["adapter"].get("targets", ("q_proj", "v_proj")))})
        if adapter.base == "nf4":
            quantize_base(model)
        attach_adapter(model, adapter, seed=seed)
    torch.manual_seed(seed)
    sizes = {"seq": config.seq, "batch_size": config.batch_size, "micro_batch_size": config.batch_size}
    training, held_out = chat_loaders(chats, **sizes, seed=seed, virtual_ids=virtual_ids(model))
    began = time.process_time()
    optimizer = fit(model, training, packed_next_token_objective, config.steps, settings["rate"])
    computed = time.process_time() - began
    model.eval()
    with torch.no_grad():
        totals = evaluate(model, held_out, packed_next_token_objective)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held = sum(p.nbytes for p in {*model.parameters()}) + sum(p.nbytes for p in trained)
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    return {
        RIGHT: 100 * share_right(model, chats, tasks, config.seq),
        LOSS: totals.mean_loss,
        TRAINED: sum(parameter.numel() for parameter in trained),
        HELD: held / 1e6,
        COMPUTED: 1000 * computed / config.steps,
    }


def share_right(model: Any, chats: Any, tasks: list[Any], seq: int) -> float:
    from shared.finetune.answering import answer_all
    from shared.finetune.chat.encoding import ChatEncoder

    encoder = ChatEncoder(chats.tokenizer)
    prompts = [encoder.prompt(chats.template, [{"role": "user", "content": task.prompt}]) for task in tasks]
    stops = {chats.tokenizer.special(name) for name in chats.report.stops}
    answers = answer_all(model, prompts, 32, context=seq, stops=stops)
    right = sum(task.solved_by(chats.tokenizer.decode(ids)) for task, ids in zip(tasks, answers, strict=True))
    return right / len(tasks)


if __name__ == "__main__":
    launch(run, AdapterExperimentConfig, Path(__file__).with_name("experiments.yaml"))
