"""Settings of a whole run: three steps of a tiny model in each of its modes, without its report; and what the report shows of a model."""

import io
import json
import runpy
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import nn

from setting_effects import of_data
from setting_effects.effects import Differs, Effects, Shown
from shared.course import binding
from shared.course.extensions import Extension
from shared.course.paths import CHECKOUT
from shared.engine import defaults
from shared.engine.config import CheckpointConfig, EngineConfig
from shared.finetune.chat.datasets import ChatSource
from shared.finetune.chat.prepare import ChatConfig
from shared.finetune.config import AdapterConfig
from shared.model.hf.pretrained import save_pretrained
from shared.model.transformer import TransformerModel
from shared.moe.config import MixtureModelConfig
from shared.optim.config import OptimizerConfig, ScheduleConfig
from shared.parallel.config import ParallelConfig
from shared.preference.config import DPOConfig, MadeConfig, PreferenceConfig
from shared.preference.reward_model import RewardConfig
from shared.rl.config import TaskPolicyConfig
from shared.rl.tasks import MadeTasks, TasksConfig
from shared.totals import Batch, Objective, Totals
from shared.trainer import results, run
from shared.trainer.config import TrainerConfig
from shared.trainer.modes.pretrain import Pretraining
from shared.trainer.sections import DataConfig, InstructionConfig, PolicyConfig, ReportConfig

TINY = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 128,
    "initializer_range": 0.2,
}  # fmt: skip
CHATS = ChatConfig(sources=(ChatSource("chats.jsonl"),))
BASE = {
    "steps": 3, "precision": "float32", "schedule": ScheduleConfig("constant", warmup_steps=0),
    "data": DataConfig(of_data.SMALL, Path("prepared"), 64, 4, 2), "model": MixtureModelConfig(**TINY, vocab_size=400),
    "engine": EngineConfig(Path("run"), "cpu", log_every=3, trackers=[], checkpoint=CheckpointConfig(every=0)),
    "report": ReportConfig(export=False),
}  # fmt: skip


def doubled(model: nn.Module, batch: Batch, objective: Objective) -> Totals:
    """A loss of one's own."""
    totals = objective(model, batch)
    return totals._replace(loss_sum=2 * totals.loss_sum)


def no_peak(device: torch.device, dtype: torch.dtype) -> None:
    """In place of measuring, which takes half a second."""


def trained(config: TrainerConfig, fit: bool = True) -> list:
    with of_data.text_folder(), patch.object(defaults, "known_peak", no_peak):
        if config.start_from:
            for number, place in enumerate(("first", "second")):
                of_data.tokenizer().save_pretrained(Path(place), 128)
                model = TransformerModel(MixtureModelConfig(**TINY, vocab_size=of_data.tokenizer().vocab_size), seed=number)
                save_pretrained(model, Path(place), token_ids={"eos_token_id": of_data.tokenizer().end_id})
        torch.manual_seed(0)
        made = run.build(config, Console(file=io.StringIO()))
        if not fit:
            return [made.engine.model.state_dict(), of_mode(made.mode)]
        loader, held_out = made.mode.loaders(made.config, made.strategy)
        made.engine.fit(loader, held_out, steps=config.steps)
        logs = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
        files = sorted(str(path) for path in Path("run").rglob("*") if path.is_file())
        return [made.engine.model.state_dict(), [log["step"] for log in logs], files, repr(made.strategy.mesh.config), of_mode(made.mode)]


def of_mode(mode: Any) -> list:
    """What a mode has made of its section."""
    stored = [mode.text.training.fingerprint, mode.text.held_out.fingerprint] if hasattr(mode.text, "training") else []
    return [repr(getattr(mode.objective, "config", None)), repr(getattr(mode, "training", None)), stored]


def mode_of(config: TrainerConfig) -> list[str]:
    """Which mode is asked for."""
    asked: list[str] = []
    with patch.dict(run.MODES, {name: lambda *_, name=name: asked.append(name) for name in run.MODES}), suppress(AttributeError):
        trained(config)
    return asked


def bound(config: TrainerConfig) -> list[str]:
    """Whose exercises the trainer's script asks for."""
    script = runpy.run_path(str(CHECKOUT / "chapters" / "12_grpo" / "train.py"))
    with patch.object(binding, "choose", side_effect=InterruptedError) as choose, suppress(InterruptedError):
        script["main"]([f"impl={config.impl}"])
    return list(choose.call_args.args)


built = partial(trained, fit=False)


MODEL = MixtureModelConfig(**TINY, vocab_size=of_data.tokenizer().vocab_size)
STARTED = {"start_from": Path("first"), "model": MODEL}
SFT = STARTED | {"mode": "sft", "chats": CHATS, "instructions": InstructionConfig(tasks=0)}
PAIRS = STARTED | {"preferences": PreferenceConfig(sources=(ChatSource("pairs.jsonl"),))}
MADE = STARTED | {"mode": "reward", "preferences": PreferenceConfig(made=MadeConfig(40, 0)), "data": replace(BASE["data"], seq=128)}
SUMS = TasksConfig(made=MadeTasks(kinds=("sum",), training=4), held_out=2)
POLICY = {"prompts": 4, "new_tokens": 3, "minibatches": 1, "passes": 1}
INSTRUCTED = SFT | {"chats": ChatConfig(), "data": MADE["data"]}
PPO = PolicyConfig(**POLICY, reward="gold")
GRPO = TaskPolicyConfig(**POLICY | {"answers": 2}, tasks=SUMS, held_out_answers=0)
FIRST = "trainer/test_preference_starts.py::test_what_a_run_starts_from_is_trained_first_where_it_is_not_there"
CONTINUED = "trainer/test_continue_from.py::test_a_run_is_continued_whole_in_another_folder_and_the_first_stays_as_it_is"

TRAINER = Effects(TrainerConfig, observe=trained, base=BASE, rows={
    "mode": Differs("sft", "reward", by=mode_of, beside=STARTED),
    "start_from": Differs(Path("first"), Path("second"), by=built, beside=SFT),
    "start_config": Shown(FIRST),
    "continue_from": Shown(CONTINUED),
    "continue_with": Shown("trainer/test_retuning.py::test_only_what_is_named_is_taken"),
    "impl": Differs("reference", "mine", by=bound),
    "steps": Differs(3, 4),
    "seed": Differs(0, 1),
    "data": Differs(BASE["data"], replace(BASE["data"], batch_size=6)),
    "chats": Differs(CHATS, replace(CHATS, system="Be brief."), by=built, beside=SFT),
    "instructions": Differs(InstructionConfig(40, 2), InstructionConfig(40, 2, seed=1), by=built, beside=INSTRUCTED),
    "preferences": Differs(MADE["preferences"], PreferenceConfig(made=MadeConfig(40, 0, seed=1)), by=built, beside=MADE),
    "reward": Differs(RewardConfig(), RewardConfig(centering=0.1), by=built, beside=PAIRS | {"mode": "reward"}),
    "dpo": Differs(DPOConfig(), DPOConfig(beta=0.5), by=built, beside=PAIRS | {"mode": "dpo"}),
    "ppo": Differs(PPO, replace(PPO, clip=0.1), by=built, beside=MADE | {"mode": "ppo"}),
    "grpo": Differs(GRPO, replace(GRPO, clip_low=0.1), by=built, beside=STARTED | {"mode": "grpo"}),
    "adapter": Differs(None, AdapterConfig(rank=2), by=built, beside=SFT),
    "model": Differs(BASE["model"], replace(BASE["model"], hidden_act="gelu")),
    "objective": Differs(None, Extension(f"{__file__}:doubled"), beside={"max_grad_norm": None}),
    "optimizer": Differs(OptimizerConfig(), OptimizerConfig(lr=2e-3)),
    "schedule": Differs(BASE["schedule"], ScheduleConfig("linear", warmup_steps=0)),
    "precision": Differs("float32", "bfloat16"),
    "max_grad_norm": Differs(1.0, 0.01, beside={"optimizer": OptimizerConfig("sgd")}),
    "parallel": Differs(ParallelConfig(), ParallelConfig(activation_checkpointing="full")),
    "elastic": Differs(False, True),
    "engine": Differs(BASE["engine"], replace(BASE["engine"], log_every=1)),
    "report": Differs(ReportConfig(export=False), ReportConfig(prompts=[], export=False), by=lambda config: judged(config.report)),
})  # fmt: skip


# The report.


def judged(report: ReportConfig) -> list:
    config = TrainerConfig(**BASE | {"report": report})
    mode = Pretraining.__new__(Pretraining)
    mode.text, mode.tokenizer = of_data.text(), of_data.tokenizer()
    model = TransformerModel(MODEL, seed=3).eval()
    found = mode.judge(SimpleNamespace(config=config), model, Totals(torch.tensor(5.0), torch.tensor(2), {"correct": torch.tensor(1.0)}))
    return [found.summary, found.samples, found.completions]


def exported(report: ReportConfig) -> list:
    """Whether the model is written, in a run that ends there."""
    written: list = []
    config = TrainerConfig(**BASE | {"report": report})
    ended = SimpleNamespace(
        config=config, engine=SimpleNamespace(device=torch.device("cpu")), mode=SimpleNamespace(all_held_out=lambda *_: None),
        strategy=SimpleNamespace(rank=1, mesh=SimpleNamespace(world=SimpleNamespace(gather_objects=list))),
        costs=SimpleNamespace(peak_here=[1]),
    )  # fmt: skip
    with patch.object(results, "export", written.append), patch.object(results, "whole_model", lambda ended: None):
        results.evaluate_and_report(ended, Console(file=io.StringIO()))
    return [len(written)]


REPORT = Effects(ReportConfig, observe=judged, base={"new_tokens": 6, "completions": 2}, rows={
    "prompts": Differs(["def ", "class "], ["def "]),
    "completions": Differs(2, 1),
    "new_tokens": Differs(6, 5),
    "temperature": Differs(0.7, 3.0),
    "top_k": Differs(40, 1),
    "export": Differs(True, False, by=exported),
    "dtype": Shown("trainer/test_exports.py::test_a_run_is_exported_in_the_dtype_that_is_asked_for"),
    "held_out_rows": Differs(None, 1),
})  # fmt: skip

ALL = [TRAINER, REPORT]
