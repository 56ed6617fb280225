"""Settings of the optimizer, its schedule, float16's loss scale and adapters: weights after three steps, factors, scales."""

from dataclasses import replace

import torch

from setting_effects.effects import Differs, Effects, called_functions
from shared.course.extensions import Extension
from shared.finetune.config import AdapterConfig
from shared.loop import train
from shared.loss import next_token_objective
from shared.model.config import ModelConfig
from shared.model.transformer import TransformerModel
from shared.optim.build import build_optimizer
from shared.optim.config import OptimizerConfig, ScheduleConfig
from shared.optim.loss_scale import LossScaleConfig, LossScaler
from shared.optim.schedules import factor_at
from shared.trainer.models import with_adapter

SMALL = ModelConfig(vocab_size=31, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.2, attention_bias=True)


def batches(vocab_size: int = 31):
    generator = torch.Generator().manual_seed(2)
    while True:
        ids = torch.randint(vocab_size, (2, 9), generator=generator)
        yield [{"input_ids": ids[:, :-1], "targets": ids[:, 1:]}]


def updated(config: OptimizerConfig) -> list:
    model = TransformerModel(SMALL)
    optimizer = build_optimizer(model, config)
    for _ in train(model, optimizer, batches(), next_token_objective, steps=3):
        pass
    return [type(optimizer).__name__, model]


MUON = {"name": "muon", "newton_schulz_dtype": "float32"}
OWN = {"name": "torch.optim.Adagrad", "weight_decay": 0.0}

OPTIMIZER = Effects(OptimizerConfig, observe=updated, rows={
    "name": Differs("adamw", "lion"),
    "lr": Differs(1e-3, 1e-2),
    "weight_decay": Differs(0.1, 0.5),
    "betas": Differs(None, (0.5, 0.6)),
    "eps": Differs(1e-8, 1e-3),
    "momentum": Differs(0.95, 0.5, beside={"name": "sgd"}),
    "nesterov": Differs(True, False, beside=MUON),
    "scaling": Differs("match_rms_adamw", "original", beside=MUON | {"adamw_lr": 1e-3}),
    "newton_schulz_steps": Differs(5, 2, beside=MUON),
    "newton_schulz_dtype": Differs(None, "float64", beside={"name": "muon"}),
    "adamw_lr": Differs(None, 1e-2, beside=MUON),
    "fused": Differs(False, True, by=lambda config: called_functions(lambda: updated(config))),
    "no_decay": Differs([], ["*.q_proj.weight"]),
    "to_adamw": Differs([], ["*.q_proj.weight"], beside=MUON),
    "options": Differs({}, {"lr_decay": 0.5}, beside=OWN),
})  # fmt: skip

SCHEDULE = Effects(
    ScheduleConfig, observe=lambda config: [factor_at(config, step) for step in range(1, 12)],
    base={"name": "wsd", "steps": 9, "warmup_steps": 2, "decay_steps": 3},
    rows={
        "name": Differs("wsd", "linear"),
        "steps": Differs(9, 11),
        "warmup_steps": Differs(2, 3),
        "decay_steps": Differs(3, 4),
        "minimum": Differs(0.1, 0.2),
        "options": Differs({"power": 1}, {"power": 2}, beside={"name": f"{__file__}:own_schedule"}),
    },
)  # fmt: skip


def own_schedule(step: int, power: int) -> float:
    return 1 / step**power


EXTENSION = Effects(
    Extension, observe=lambda extension: extension.bound("schedule.name", "step")(3),
    base={"name": f"{__file__}:own_schedule", "options": {"power": 1}},
    rows={"name": Differs(f"{__file__}:own_schedule", f"{__file__}:other_schedule"), "options": Differs({"power": 1}, {"power": 2})},
)  # fmt: skip


def other_schedule(step: int, power: int) -> float:
    return 2 / step**power


def scales(config: LossScaleConfig) -> list:
    scaler, found = LossScaler(config), []
    for finite in (True, True, False, True, True, True):
        found.append(scaler.state)
        scaler.update(finite)
    return [*found, scaler.state]


LOSS_SCALE = Effects(LossScaleConfig, observe=scales, base={"interval": 2}, rows={
    "initial": Differs(2.0**10, 2.0**5), "growth": Differs(2.0, 3.0), "backoff": Differs(0.5, 0.25), "interval": Differs(2, 3),
})  # fmt: skip


def adapted(config: AdapterConfig) -> list:
    torch.manual_seed(3)
    model = with_adapter(TransformerModel(ADAPTED), config, seed=4)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = [totals.loss_sum for _, totals in train(model, optimizer, batches(), next_token_objective, steps=3)]
    return [losses, model]


ADAPTED = replace(SMALL, hidden_size=64, intermediate_size=64, attention_bias=False)

ADAPTER = Effects(AdapterConfig, observe=adapted, rows={
    "kind": Differs("lora", "prompt"),
    "rank": Differs(8, 4, beside={"rank_stabilized": True}),
    "alpha": Differs(16.0, 8.0),
    "dropout": Differs(0.0, 0.3),
    "targets": Differs(("q_proj", "v_proj"), ("q_proj",)),
    "rank_stabilized": Differs(False, True),
    "decomposed": Differs(False, True),
    "virtual_tokens": Differs(3, 2, beside={"kind": "prefix"}),
    "base": Differs("float", "nf4"),
})  # fmt: skip

ALL = [OPTIMIZER, SCHEDULE, EXTENSION, LOSS_SCALE, ADAPTER]
