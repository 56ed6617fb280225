"""Chapter 12. Scaled-down twin of a configuration: a dry run of the very same file, on processes of this machine's CPU.

    course twin chapters/12_grpo/two_3090s_qlora.yaml          two ranks, FSDP, NF4, LoRA, bfloat16, recomputed blocks, in a minute

What decides which code runs is kept: mode, layout, adapter, quantization, optimizer, schedule, precision, recomputation, the loss and the
architecture. What decides how much is computed shrinks by rule (`small_model`, `twin_of`), and what lies elsewhere is made on the spot:
text from the embedded corpus, conversations, pairs and tasks by code, and for `start_from` random weights in Hugging Face's format.

Left out on purpose: whether the full size fits and how long it takes (`course plan`), compiling, and what only a GPU does (NCCL).
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import yaml
from rich.console import Console
from rich.table import Table

from shared.course.errors import CourseError
from shared.course.typed import configured, with_words
from shared.data.cleaning.cleaner import CleaningConfig
from shared.data.tokenizer import TextTokenizer
from shared.engine.trackers.services import flat
from shared.engine.trackers.jsonl import read_damaged
from shared.finetune.chat.template import ChatTemplate
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.builders import MIXTURE
from shared.moe.config import MixtureModelConfig
from shared.output_files import write_atomically
from shared.parallel.config import ParallelConfig, layout_name
from shared.preference.reward_model import as_reward_model
from shared.preference.rollout import RolloutConfig
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.planner.opening import start_shape, with_degrees
from shared.trainer.settings import from_settings, read_settings

FILE, SEQ, WIDTH, VOCABULARY, NEW_TOKENS = "twin.yaml", 256, 64, 512, 8
SHOWN = (  # settings whose change is printed
    "model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads", "model.num_key_value_heads", "model.intermediate_size",
    "data.seq", "data.batch_size", "data.micro_batch_size", "adapter.rank", "adapter.alpha", "grpo.prompts",
    "grpo.answers", "ppo.prompts", "steps",
)  # fmt: skip


def small_model(model: MixtureModelConfig, parallel: ParallelConfig) -> MixtureModelConfig:
    """The same architecture with few and narrow layers, which every axis of the layout divides: two blocks in each pipeline stage, and for
    each tensor-parallel rank a width of 64, which NF4's blocks of 64 divide, and 4 heads, as many of which share keys as before."""
    full, ranks = model.resolved(), parallel.tensor_parallel
    layers = 2 * parallel.pipeline_parallel * parallel.pipeline_chunks
    changes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH * ranks,
        "intermediate_size": 2 * WIDTH * ranks,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 * ranks,
        "num_key_value_heads": ranks * max(1, 4 * full.num_key_value_heads // full.num_attention_heads),
        "head_dim": WIDTH // 4,
        "layer_types": full.layer_types[:layers],
    }
    if full.attention_scale == full.head_dim**-0.5:
        changes["attention_scale"] = None
    if full.logit_scale != 1:
        changes["logit_scale"] = changes["hidden_size"] ** -0.5
    if full.sliding_window:
        changes["sliding_window"] = min(full.sliding_window, SEQ // 2)
    if full.num_encoder_layers:
        changes["num_encoder_layers"] = layers
    if full.experts:
        changes["experts"] = replace(full.experts, moe_intermediate_size=WIDTH * ranks, first_k_dense=min(full.experts.first_k_dense, 1))
    return replace(full, **changes).resolved()


def twin_of(config: TrainerConfig, folder: Path, steps: int) -> TrainerConfig:
    """The scaled-down configuration of a run in `folder`. config: as read, but for a `start_from` that `small_start` made."""
    data, parallel, ranks = config.data, config.parallel, config.parallel.data_ranks
    stages = parallel.pipeline_parallel * parallel.pipeline_chunks
    if not isinstance(parallel.pipeline_layers, str):
        parallel = replace(parallel, pipeline_layers=(2,) * stages)
    share = data.batch_size // ranks
    rows = min(data.micro_batch_size, share, 2)
    microbatches = min(share // min(data.micro_batch_size, share), 2 * stages)
    cuts = 2 * parallel.context_parallel * parallel.tensor_parallel
    seq = -(-min(data.seq, SEQ) // cuts) * cuts
    sources = [replace(each, path="embedded", kind="auto", config=None, split="train", revision=None, limit=60 + number)
               for number, each in enumerate(data.prepare.sources)]  # fmt: skip
    prepare = replace(
        data.prepare, sources=tuple(sources), cleaning=CleaningConfig(), vocab_size=VOCABULARY, sentinels=4, held_out_share=0.2, workers=0,
        part_bytes=2**20,
    )  # fmt: skip
    held_out = config.data.held_out_rows if config.mode in ("ppo", "grpo") else 2 * ranks
    model = config.model if config.start_from else small_model(config.model, parallel)

    def rollouts(section: RolloutConfig) -> dict[str, int]:
        return {"prompts": 2 * ranks * section.minibatches, "answers": min(section.answers, 4), "new_tokens": NEW_TOKENS}

    own: dict[str, Any] = {}
    if config.mode == "sft":
        own = {"chats": replace(config.chats, sources=(), tokenizer=None),
               "instructions": replace(config.instructions, examples=200, tasks=min(2, config.instructions.tasks), file=None)}  # fmt: skip
    if config.mode in ("reward", "dpo", "ppo"):
        made = replace(config.preferences.made, pairs=80, prompts=2, file=None)
        own = {"preferences": replace(config.preferences, sources=(), tokenizer=None, made=made)}
    if config.mode == "ppo":
        own["ppo"] = replace(config.ppo, **rollouts(config.ppo))
    if config.mode == "grpo":
        tasks = replace(config.grpo.tasks, sources=(), held_out=2, made=replace(config.grpo.tasks.made, training=40))
        rewards = [replace(part, folder=folder / "reward") if part.folder else part for part in config.grpo.rewards]
        overlong = min(config.grpo.overlong_tokens, NEW_TOKENS)
        own["grpo"] = replace(
            config.grpo, **rollouts(config.grpo), overlong_tokens=overlong, tasks=tasks, rewards=tuple(rewards), held_out_answers=2,
        )  # fmt: skip
    adapter = config.adapter
    if adapter and (rank := min(adapter.rank, WIDTH // 4)) < adapter.rank:
        adapter = replace(adapter, rank=rank, alpha=adapter.alpha * rank / adapter.rank)
    engine = replace(
        config.engine, output=folder / "run", device="cpu", compile=False, log_every=1, trackers=["console", "jsonl"],
        evaluate_every=min(config.engine.evaluate_every, steps), early_stopping=0,
        checkpoint=replace(config.engine.checkpoint, every=steps),
    )  # fmt: skip
    warmup, decay = (min(getattr(config.schedule, name), 1) for name in ("warmup_steps", "decay_steps"))
    return replace(
        config,
        start_config=None,
        steps=steps,
        adapter=adapter,
        model=replace(model, max_position_embeddings=max(seq, model.max_position_embeddings if config.start_from else 0)),
        data=replace(data, prepare=prepare, prepared=folder.parent / "prepared", seq=seq, batch_size=ranks * rows * microbatches,
                     micro_batch_size=rows, epochs=None, held_out_rows=held_out),
        schedule=replace(config.schedule, warmup_steps=warmup, decay_steps=decay, steps=steps),
        parallel=replace(parallel, collective_timeout=ParallelConfig.collective_timeout),
        engine=engine,
        report=replace(config.report, prompts=config.report.prompts[:1], completions=0, new_tokens=NEW_TOKENS),
        **own,
    )  # fmt: skip


def small_start(model: MixtureModelConfig, folder: Path, reward: bool = False) -> None:
    """Random weights in Hugging Face's format, with a tokenizer of the pinned jinja2's source and ChatML as template. reward: of a reward
    model, which has a scalar head."""
    template = ChatTemplate.load("chatml")
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(jinja2.__file__).parent.glob("*.py"))]
    tokenizer = TextTokenizer.train(texts, VOCABULARY, sentinels=4).with_special(template.special_names)
    made = TransformerModel(replace(model, vocab_size=tokenizer.vocab_size), MIXTURE, seed=0)
    save_pretrained(as_reward_model(made) if reward else made, folder, token_ids={"eos_token_id": tokenizer.end_id})
    tokenizer.save_pretrained(folder, model.max_position_embeddings)
    template.save(folder)


def make_twin(file: Path, words: Mapping[str, str], folder: Path, steps: int, layout: str = "") -> tuple[TrainerConfig, TrainerConfig]:
    """Write the twin and what it starts from into `folder`. Returns the file's own configuration, which has the small model as its start
    where it has one, and the twin. layout: a word such as dp2_tp2, in place of the file's.

    Raises:
        CourseError: the file, the words or the layout cannot be.
    """
    settings = with_words(TrainerConfig, read_settings(file, TrainerConfig), words)
    if layout:
        settings["parallel"] = with_degrees(settings.get("parallel") or {}, layout)
    parallel = configured(ParallelConfig, settings.get("parallel") or {}, "parallel")
    if folder.exists() and not (folder / FILE).is_file():
        raise CourseError(f"{folder} is there and holds no twin: give another --output.")
    shutil.rmtree(folder, ignore_errors=True)
    if settings.get("start_from"):
        small = small_model(start_shape(settings, file), parallel)
        small_start(small, folder / "start")
        settings |= {"start_from": str(folder / "start"), "start_config": None}
        rewards, scored = (settings.get("grpo") or {}).get("rewards", ()), (settings.get("ppo") or {}).get("reward_model")
        if scored or any("folder" in part for part in rewards):
            small_start(small, folder / "reward", reward=True)
        if scored:
            settings["ppo"] |= {"reward_model": str(folder / "reward"), "reward_config": None}
    config = from_settings(TrainerConfig, settings)
    twin = twin_of(config, folder, steps)
    write_atomically(folder / FILE, yaml.safe_dump(provenance.plain(twin), sort_keys=False).encode())
    return config, twin


def run_twin(file: Path, words: Mapping[str, str], folder: Path, steps: int, layout: str, console: Console) -> int:
    """Make the twin of a configuration and train it in as many processes as its layout has ranks. Returns the run's exit code."""
    config, twin = make_twin(file, words, folder, steps, layout)
    before, after = (flat(provenance.plain(each)) for each in (config, twin))
    table = Table("setting", "in the file", "in the twin", box=None)
    for name in SHOWN:
        if before.get(name) != after.get(name):
            table.add_row(name, str(before[name]), str(after[name]))
    console.print(table)
    word = layout_name(twin.parallel)
    console.print(f"{config.mode}, layout {word}, {twin.parallel.ranks} ranks; everything lands in {folder}.\n", soft_wrap=True)
    command = [sys.executable, "-m", "shared.trainer.launch.start", word, str(folder / FILE), f"engine.output={twin.engine.output}"]
    if code := subprocess.run(command, check=False).returncode:
        console.print(f"\nThe twin of {file} ended with exit code {code}: what it says would stop the full run too.", soft_wrap=True)
        return code
    metrics, _ = read_damaged(twin.engine.output / "metrics.jsonl")
    losses = [f"{entry['train/loss']:.3f}" for entry in metrics.values() if "train/loss" in entry]
    console.print(f"\nThe twin of {file} ran: {len(losses)} steps in layout {word}, losses {', '.join(losses)}.", soft_wrap=True)
    return 0
