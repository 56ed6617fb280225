"""The build of chapter 10: adapters on any model, saved so that peft loads them, yours from an empty file. About four hours.

    course check 10.build                all stages; course check 10.build.targets: one
    course hint 10.build.targets         three hints for each stage
    course reset 10.build                this file as it was; your text is kept

You design the adapters: classes or functions, in this file, as you like. The checks see nothing but the functions at its end, which stay
thin: a line or two each that call what you wrote. Each stage has functions of its own, and is NOT ATTEMPTED while one of them still raises
NotImplementedError, so you can work from the first stage to the last and stop after any of them.

You may use everything of chapters 01 to 09. You need nothing of this chapter's exercises, and may copy from them. The modules of
`shared.finetune` may not be imported, nor may `peft` and `transformers`. Unless a stage says otherwise the checks run in float64, and
compare with one dense weight W + s B A for each adapted layer, to 1e-9.

The model is any nn.Module with nn.Linear layers, under any names. Adapt each nn.Linear that the config means:
    y = x W^T + b + s * (dropout(x) A^T) B^T       W [out, in] and b are frozen; A [r, in] and B [out, r] are trained
    s = lora_alpha / r, or lora_alpha / sqrt(r) where use_rslora is true
The factors are float32, or float64 where W is. The addition is computed in their dtype, and y has the dtype that it has without the
addition. A block that stands at several places of a model is one block: it has one pair of factors, under the first of its names.

A config is a dictionary with these five keys, which are peft's:
    r, lora_alpha, lora_dropout, use_rslora
    target_modules    a list of endings: a name is meant if it equals one of them, or ends in a dot and one of them;
                      or a string: a regular expression that must match the whole name

An adapter is all factors of one config, under a name such as "default". A model may have several adapters, and one or none is in use.

The stages
    1 targets    which linear layers a config means
    2 inject     a model with an adapter: its outputs, and the gradients of x and of the factors. Nothing but factors is trained. Neither
                 forward nor backward is a tensor as large as W made
    3 start      the initial values: A uniform between -1 / sqrt(in) and 1 / sqrt(in), B zero. The model begins with the outputs that it had
    4 train      a step: gradients over several micro-batches, with dropout on the addition's input, by any optimizer of PyTorch
    5 merge      the adapter in use goes into the weights, and out again. A merged weight is W + s B A, computed in the factors' dtype and
                 rounded once to W's. Merged, the model computes what it computed before, and costs what the model without adapters costs;
                 afterwards each weight is what it was, bit for bit. Another module that shares the weight (a tied embedding) does not see
                 the merge, and shares the weight again afterwards
    6 several    adapters by name on one model; the one in use is computed and trained, the others wait as they are
    7 save       peft's two files. adapter_model.safetensors has float tensors "base_model.model." + the layer's name + ".lora_A.weight" and
                 ".lora_B.weight", of this adapter alone; adapter_config.json has peft_type "LORA" and the config's five keys (and whatever
                 else of peft's keys you like, if it is true)
    8 load       peft's files. What was saved for another model, or needs what you do not have, is refused, and the model stays as it was
    9 ranks      a linear layer cut over ranks, with factors. The ranks' outputs and gradients are one process's, the layer makes no call of
                 a communicator but the one that it makes without factors, and gradients of parts are added up once for a step
    10 four_bits a linear layer whose weight exists as codes: it is made once forward, once backward if x needs a gradient, and never kept
    11 budgets   the numbers that would be trained, without making one. Without dropout a call of a layer keeps y, and at most two tensors
                 of the size of x A^T. A step multiplies each W twice (once if it is the first layer) and each factor three times, whatever
                 waits; after it the factors' gradients and the optimizer's state are left, and at most 512 bytes
    12 bad_input what cannot be right is refused with a ValueError that says which key, name or number; the model stays as it was
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from shared.parallel.comm.communicator import Communicator

Config = dict[str, Any]

# Options of peft that change what an adapter computes, and that this build does not have: one that is set is refused (stage 8). Not set is
# what is missing, None, False, "none", or empty.
REFUSED = (
    "alpha_pattern", "bias", "exclude_modules", "fan_in_fan_out", "layer_replication", "layers_to_transform", "lora_bias",
    "modules_to_save", "rank_pattern", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip


def targets(model: nn.Module, target_modules: Sequence[str] | str) -> list[str]:
    """The names of the nn.Linear layers that are meant, in the order of model.named_modules(). Other modules are never meant.

    Raises:
        ValueError: an ending, or the expression, means no linear layer; the message has it.
    """
    raise NotImplementedError("10.build: targets is not written yet")


def attach(model: nn.Module, name: str, config: Config, seed: int) -> object:
    """The model with an adapter, which is in use, whatever you make it. `model` may be changed in place. Initial values, which nothing is
    asked of before stage 3, follow from the seed alone, and differ between layers.

    Raises:
        ValueError: see `check_config` and `targets` (stage 12).
    """
    raise NotImplementedError("10.build: attach is not written yet")


def factors(adapted: object, name: str) -> dict[str, Tensor]:
    """The trained tensors of an adapter themselves, leaves: a layer's name + ".lora_A" -> A, and + ".lora_B" -> B."""
    raise NotImplementedError("10.build: factors is not written yet")


def run(adapted: object, *inputs: Tensor) -> Tensor:
    """What the model makes of `inputs`, in evaluation mode: without dropout. Gradients can be taken through it."""
    raise NotImplementedError("10.build: run is not written yet")


def weights(adapted: object) -> dict[str, Tensor]:
    """The weights and buffers with which the base computes, and no factors, under the names of model.state_dict() before `attach`, so
    that the model without adapters loads them. While an adapter is merged its layers have merged weights."""
    raise NotImplementedError("10.build: weights is not written yet")


def initial(in_features: int, out_features: int, r: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r], float32, before training. `attach` begins with such values."""
    raise NotImplementedError("10.build: initial is not written yet")


def step(
    adapted: object, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]], loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """A step in training mode: the sum over the micro-batches (x, targets) of loss(y, targets), divided once by len(targets) of them all.

    `optimizer` has the factors of the adapter in use. Their .grad stays after the step, until the next one.

    Returns:
        The loss, without a graph.

    Raises:
        ValueError: there are no micro-batches, or an adapter is merged (stage 12).
    """
    raise NotImplementedError("10.build: step is not written yet")


def merge(adapted: object) -> None:
    """Merge the adapter in use into the weights. Nothing happens if it is merged already, or none is in use."""
    raise NotImplementedError("10.build: merge is not written yet")


def unmerge(adapted: object) -> None:
    """Undo `merge`. Nothing happens if nothing is merged."""
    raise NotImplementedError("10.build: unmerge is not written yet")


def add(adapted: object, name: str, config: Config, seed: int) -> None:
    """Another adapter, of any config, which waits until it is used.

    Raises:
        ValueError: there is an adapter of this name (stage 12), and as `attach`.
    """
    raise NotImplementedError("10.build: add is not written yet")


def use(adapted: object, name: str | None) -> None:
    """From here on compute with the adapter `name`, or with the base alone. What was merged is unmerged first. Factors of the adapter in
    use require a gradient, and no others do.

    Raises:
        ValueError: there is no adapter of this name (stage 12).
    """
    raise NotImplementedError("10.build: use is not written yet")


def save(adapted: object, name: str, folder: Path) -> None:
    """Save an adapter, in use or not, in peft's format. The folder need not exist."""
    raise NotImplementedError("10.build: save is not written yet")


def load(model: nn.Module, name: str, folder: Path) -> object:
    """The model with an adapter from peft's files, as `attach` gives it. Of the config's keys, peft_type, the five and REFUSED are read;
    where one of the five is missing, peft takes r 8, lora_alpha 8, lora_dropout 0.0 and use_rslora false. The tensors may have any float
    dtype. Files of other kinds, such as adapter_model.bin, are not read. (peft adds a head's frozen weight to the file where the head is
    adapted, unless it saves with save_embedding_layers=False: refuse it like any other tensor that is not a factor.)

    Raises:
        ValueError: a file is missing (its name), the config's peft_type is not "LORA", an option of REFUSED is set (its name), or the
            tensors do not fit the layers that the config means in this model, by name and shape (the name of one at fault).
    """
    raise NotImplementedError("10.build: load is not written yet")


def cut(
    weight: Tensor, bias: Tensor | None, lora_A: Tensor, lora_B: Tensor, scaling: float, dimension: Literal[0, 1], group: Communicator
) -> object:
    """This rank's part of a linear layer with factors, whatever you make it. All tensors are whole; but for what is this rank's, they can
    be freed after.

    dimension: 0: rank i holds the i-th of group.size equal parts of the output features, 1: of the input features.
    """
    raise NotImplementedError("10.build: cut is not written yet")


def run_cut(part: object, x: Tensor) -> Tensor:
    """dimension 0: from x [..., in], the same on all ranks, this rank's output features [..., out / ranks]; in the backward pass x gets its
    whole gradient. dimension 1: from this rank's input features [..., in / ranks] the whole y [..., out], the same on all ranks, whose
    gradient is the same on all ranks as well. All ranks call it."""
    raise NotImplementedError("10.build: run_cut is not written yet")


def cut_gradients(part: object) -> dict[str, Tensor]:
    """The gradients of "lora_A" and "lora_B" by the backward passes since the last call of this: one process's, or this rank's slice of
    them where the factor is cut. All ranks call it, once for a step."""
    raise NotImplementedError("10.build: cut_gradients is not written yet")


def frozen_linear(x: Tensor, dequantize: Callable[[], Tensor], lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """x W^T + scaling * (x A^T) B^T in the dtype of x. Each call of dequantize() makes the frozen W [out, in] from its codes, in the dtype
    of x. The addition is computed in the factors' dtype. Gradients reach x, A and B."""
    raise NotImplementedError("10.build: frozen_linear is not written yet")


def count_trained(model: nn.Module, config: Config) -> int:
    """How many numbers an adapter would train, on a model of any size on any device, "meta" included. The model stays as it is."""
    raise NotImplementedError("10.build: count_trained is not written yet")


def check_config(config: Config) -> None:
    """Refuse a config that cannot be right; see the errors. `attach` and `add` refuse it as well, before they change anything.

    Raises:
        ValueError: a key is unknown or missing (the key); r is not an int of 1 or more, lora_alpha not a finite number above 0,
            lora_dropout not a number of at least 0 and below 1 (key and value); or target_modules is empty (the key).
    """
    raise NotImplementedError("10.build: check_config is not written yet")
