"""Chapter 05. Configuration of the optimizer and of the learning-rate schedule, typed and validated before anything is built.

It is apart from the optimizers so that a script can read its options before the core is bound to the exercises' implementation.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from shared.course.bounds import BelowOne, Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat, checked
from shared.course.extensions import ImportPath, is_import_path

Precision = Literal["float32", "bfloat16", "float16"]
Scaling = Literal["original", "match_rms_adamw"]
USED_BY = {  # options that are refused where the chosen optimizer does not read them
    "betas": ("adamw", "lion", "muon"),
    "adamw_lr": ("muon",),
    "to_adamw": ("muon",),
    "fused": ("adamw", "muon"),
}
FOR_ALL = ("name", "options", "lr", "weight_decay", "no_decay")  # of these fields, what an optimizer by import path reads too


@dataclass
@checked
class OptimizerConfig:
    """Which optimizer updates the weights, and its hyperparameters.

    Args:
        name: the optimizer; with muon, embeddings, head, norms and biases are updated by adamw. Or the import path of a
            torch.optim.Optimizer, such as my_module.MyOptimizer or torch.optim.Adafactor.
        lr: the peak learning rate.
        weight_decay: decoupled weight decay, for matrices and embeddings.
        betas: for adamw (also muon's) and lion; null for the defaults, (0.9, 0.95) with adamw and (0.9, 0.99) with lion.
        eps: for adamw.
        momentum: for muon and sgd.
        nesterov: for muon.
        scaling: how muon scales its updates. match_rms_adamw lets muon and adamw share a learning rate; original needs an adamw_lr.
        newton_schulz_steps: for muon.
        newton_schulz_dtype: the dtype in which muon orthogonalises; null for bfloat16, which is precise enough.
        adamw_lr: the learning rate of the parameters that muon leaves to adamw; null for lr.
        fused: run adamw's step by PyTorch's fused kernel in place of `adamw_update`: the same numbers, several times as fast.
        no_decay: patterns of names of parameters without weight decay, in addition to norms and biases.
        to_adamw: patterns of names of matrices that muon leaves to adamw.
        options: keyword arguments of an optimizer by import path.
    """

    name: Literal["adamw", "lion", "muon", "sgd"] | ImportPath = "adamw"
    lr: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[float, float] | None = None
    eps: NonNegativeFloat = 1e-8
    momentum: BelowOne = 0.95
    nesterov: bool = True
    scaling: Scaling = "match_rms_adamw"
    newton_schulz_steps: Annotated[int, Bounds(ge=1, le=100)] = 5
    newton_schulz_dtype: Literal["bfloat16", "float32", "float64"] | None = None
    adamw_lr: PositiveFloat | None = None
    fused: bool = False
    no_decay: list[str] = field(default_factory=list)
    to_adamw: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_extension:
            plain = OptimizerConfig()
            for option in [each.name for each in fields(self) if each.name not in FOR_ALL]:
                if getattr(self, option) != getattr(plain, option):
                    raise ValueError(f"{option} is for the optimizers of the core: give {self.name} its arguments in options.")
        elif self.options:
            raise ValueError(f"options are for an optimizer by import path, and name is {self.name}: give its settings by their names.")
        for option, rules in USED_BY.items():
            if getattr(self, option) and self.name not in rules:
                given = getattr(self, option)
                raise ValueError(f"{option} is {given!r} and {self.name} does not use it: it is for {' and '.join(rules)}.")
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            raise ValueError(f"betas are {self.betas}: give each at least 0 and below 1.")
        if self.name == "muon" and self.scaling == "original" and self.adamw_lr is None:
            raise ValueError("muon with the original scaling needs about ten times adamw's learning rate: give adamw_lr for adamw's share.")

    @property
    def is_extension(self) -> bool:
        """Whether it is an optimizer by import path."""
        return is_import_path(self.name)


@dataclass
@checked
class ScheduleConfig:
    """The learning-rate schedule of a run.

    Args:
        name: constant, linear, cosine, or wsd (warm-up, stable, decay). All of them begin with a warm-up. Or the import path of a function
            of a step's number, from 1, that returns the factor of the learning rate; it gets steps, warmup_steps, decay_steps and
            minimum where its signature names them.
        steps: the length of the whole run; in the trainer it is always the setting `steps`.
        warmup_steps: steps until the peak learning rate is reached; 0 for no warm-up.
        decay_steps: steps of wsd's decay at the end.
        minimum: the learning rate at the end of a decay, as a fraction of the peak.
        options: further keyword arguments of a schedule by import path.
    """

    name: Literal["constant", "linear", "cosine", "wsd"] | ImportPath = "cosine"
    steps: PositiveInt = 1000
    warmup_steps: NonNegativeInt = 50
    decay_steps: NonNegativeInt = 200
    minimum: UnitFloat = 0.1
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.options and not is_import_path(self.name):
            raise ValueError(f"options are for a schedule by import path, and name is {self.name}: leave them out.")
        if self.name not in ("constant", "linear", "cosine", "wsd") and not is_import_path(self.name):
            raise ValueError(f"There is no schedule {self.name!r}: choose constant, linear, cosine or wsd.")
        needed = {"constant": 0, "wsd": self.warmup_steps + self.decay_steps}.get(self.name, self.warmup_steps + 1)
        needed = 0 if is_import_path(self.name) else needed
        if needed > self.steps:
            raise ValueError(
                f"{self.name}: warm-up and decay need {needed} steps and the run has {self.steps}. Lower warmup_steps or decay_steps, "
                "or train for longer."
            )
