"""Chapter 12. Extend and retune a run: what a resumed run may change by itself, and what only when it is asked to.

    by itself    what changes rounding, speed or what is watched: micro-batches, layout, backend, trackers; a line says so
    when asked   what changes the run: steps, rate, schedule, batch size, data, precision; `continue_with` names it
    never        what makes it another one: its mode, model, adapter and first weights

`continue_with` names the settings, where a plain "yes" would also allow what a mistyped word changes. It may stay in the command: a resumed
run that has the values already differs in nothing. Precision must be asked for: bfloat16 rounds 65,536 times as coarsely as float32, and
float16 skips steps.

A change is recorded when the run has taken its checkpoint, so that one that fails there leaves the run as it was.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from shared.course.errors import CourseError
from shared.course.typed import configured, keys_of
from shared.data.tokenizer import TextTokenizer
from shared.engine.callbacks import Callback, RunState
from shared.engine.checkpoint.folder import Checkpoints
from shared.engine.checkpoint.optimizer_state import LOADER, OF_THIS_RUN, OPTIMIZER
from shared.engine.trackers.services import flat
from shared.optim.config import ScheduleConfig
from shared.optim.schedules import factor_at
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.model_section import MAY_DIFFER, OF_EXPERTS, OF_ROPE
from shared.trainer.records.history import append, changes_of

OF_DATA = ("data", "seed", "chats", "instructions", "preferences", "ppo", "grpo")  # sections that decide what is learned from
UNSAID = ("engine.output", "continue_from", "continue_with", "schedule.steps")  # differ where a run is copied, or follow from another key
NEW_OPTIMIZER = ("optimizer.name", "optimizer.to_adamw")  # after which the saved state is that of other rules
SETTINGS = frozenset(keys_of(TrainerConfig))
DRAWS = ("data.micro_batch_size", "parallel", "engine.device")  # by which dropout draws other numbers


def unresolved(config: TrainerConfig) -> set[str]:
    """Settings that are resolved only when data and device are known."""
    return {"optimizer.newton_schulz_dtype", "model.vocab_size", "start", *(["precision"] if config.precision == "auto" else [])}


@dataclass(frozen=True)
class Changes:
    """Settings in which a resumed run differs from its folder's record.

    Args:
        free: key -> [before, after] of settings that change nothing but rounding.
        asked: the same for settings that change the run and are named in `continue_with`.
        since: keys that a killed process changed after the newest checkpoint.
        schedule: the previous one; None for a new run.
        code: import paths in the configuration whose file was edited.
    """

    free: dict[str, list[Any]] = field(default_factory=dict)
    asked: dict[str, list[Any]] = field(default_factory=dict)
    since: list[str] = field(default_factory=list)
    schedule: dict[str, Any] | None = None
    code: list[str] = field(default_factory=list)

    def for_engine(self, config: TrainerConfig, optimizer: Optimizer) -> set[str]:
        """State that `RuntimeEngine.fit` takes from this configuration, not from the checkpoint."""
        keys, words = {*self.asked, *self.since}, set[str]()
        if any(covers("optimizer", key) or key == "precision" for key in keys):
            words |= {key for group in optimizer.param_groups for key in group} - {*OF_THIS_RUN}
        if keys & {*NEW_OPTIMIZER}:
            words.add(OPTIMIZER)
        if any(key.split(".")[0] in OF_DATA for key in [*keys, *config.continue_with]):
            words.add(LOADER)
        return words

    def lines(self, config: TrainerConfig, step: int) -> list[str]:
        """The lines that a run resumed at a step prints about its changed settings, without the schedule's."""
        said, model = [], config.model
        if self.free:
            draws = (model.hidden_dropout or model.attention_dropout) and any(covers(name, key) for name in DRAWS for key in self.free)
            but = ", but for the numbers that dropout draws" if draws else ""
            said.append(f"Resumed with {now(self.free)}: rounding, speed or what is watched, not the run{but}.")
        if self.asked:
            said.append(f"Continued after step {step} with {now(self.asked)}.")
        return said

    def code_line(self, config: TrainerConfig, step: int) -> list[str]:
        """The line that a run resumed at a step prints where code named by import path was edited."""
        if not self.code or step >= config.steps:
            return []
        return [f"The code of {', '.join(self.code)} was edited since: it counts from step {step + 1} on."]

    def schedule_line(self, config: TrainerConfig, step: int) -> list[str]:
        """Where a run that goes on from a step stands in its schedule, if that is another one or the rate is."""
        moved = any(key in ("steps", "optimizer.lr") or covers("schedule", key) for key in self.asked)
        if not moved or not 0 < step < config.steps:
            return []
        peak = config.optimizer.lr
        before = factor_at(configured(ScheduleConfig, self.schedule), step) * self.asked.get("optimizer.lr", [peak])[0]
        after = factor_at(config.schedule, step + 1) * peak
        place = f"The schedule goes on at its step {step + 1} of {config.steps}"
        return [f"{place}, with the learning rate {after:.3g}; that of step {step} was {before:.3g}."]


def find_changes(
    config: TrainerConfig, start: str | None = None, tokenizer: TextTokenizer | None = None, leave_out: Collection[str] = ()
) -> Changes:
    """How a configuration differs from the run in its folder.

    Args:
        config: resolved, but for the keys that are left out.
        start: the fingerprint of the weights that the run starts from.
        tokenizer: this run's, where it is known.

    Raises:
        CourseError: something that changes the run differs and was not asked for, or can never change.
    """
    output = config.engine.output
    if not (output / "checkpoints").is_dir() or not (output / provenance.CONFIG).exists():
        return Changes()
    newest = max(Checkpoints(output / "checkpoints").steps(), default=0)
    record = provenance.read_record(output / provenance.CONFIG)
    before, after = record | {"start": provenance.saved_start(output)}, provenance.plain(config) | {"start": start}
    if tokenizer and (output / "tokenizer").is_dir() and TextTokenizer.load(output / "tokenizer").identity != tokenizer.identity:
        raise CourseError(
            f"{output} was trained with another tokenizer than the text now gives, and its weights belong to that: give "
            f"data.prepare.tokenizer={output / 'tokenizer'} continue_with=data."
        )
    different = require_allowed(before, after, output, config.continue_with, leave_out)
    if different and config.steps < newest + ({*different} != {"steps"}):
        raise CourseError(
            f"steps is {config.steps}, and {output} has trained {newest} steps, so {', '.join(different)} would change nothing: give more "
            "steps, or another engine.output."
        )
    free = {key: values for key, values in provenance.changed(before, after).items() if provenance.may_change(key) and key not in UNSAID}
    since = [key for change in changes_of(output) if change.step >= newest for key in change.settings]
    return Changes(free, different, since, record.get("schedule"), provenance.edited_code(output, after))


def require_allowed(
    before: dict[str, Any], after: dict[str, Any], run: Path, asked: Collection[str], leave_out: Collection[str] = ()
) -> dict[str, list[Any]]:
    """Differences that change a run, or an error for one that is not named in `continue_with` (asked) or can never change. A setting that
    the record does not have is of a newer trainer, whose default is what the run did without it."""
    known, defaults = flat(before), flat(provenance.plain(TrainerConfig()))
    newer = {key for key, value in flat(after).items() if key not in known and key in defaults and value == defaults[key]}
    different = {key: values for key, values in provenance.differences(before, after).items() if key not in {*leave_out, *newer}}
    if not (refused := not_asked_for(different, asked)):
        return different
    begins = f"{run} holds a run of another configuration: {provenance.in_words(refused)}. "
    fixed = [key for key in refused if not can_change(key)]
    if fixed == ["start"]:
        places = [("start_from", after.get("start_from")), ("ppo.reward_model", (after.get("ppo") or {}).get("reward_model"))]
        named = " or ".join(f"{key}={place}" for key, place in places if place) or "a run without start_from"
        raise CourseError(
            f"{run} began with other weights than {named} has now, and a run keeps its first weights. Where that run was extended since, "
            "its own command with `steps=N continue_from=ITS_FOLDER/checkpoints/step-N continue_with=steps engine.output=ANOTHER` writes "
            "the model of step N again: name that one. Else give another engine.output here, to begin a new run."
        )
    if fixed:
        raise CourseError(
            f"{begins}Within a run {', '.join(fixed)} cannot change: give the same to continue it, or another engine.output to begin a new "
            "one, which may start_from this one's weights."
        )
    raise CourseError(
        f"{begins}Give the same to continue it, {words_for(different)} to continue it with what is new here, or another engine.output to "
        "begin a new one."
    )


def not_asked_for(different: Mapping[str, list[Any]], asked: Collection[str]) -> dict[str, list[Any]]:
    """Differences that are not named in `continue_with`, or can never change."""
    named = lambda key: can_change(key) and any(covers(name, key) for name in asked)  # noqa: E731
    return {key: values for key, values in different.items() if not named(key)}


def words_for(different: Mapping[str, list[Any]]) -> str:
    return f"continue_with={','.join(key for key in different if can_change(key))}"


def can_change(key: str) -> bool:
    """Whether a run is still the same one with another value.

    >>> can_change("steps"), can_change("model.hidden_dropout"), can_change("model.hidden_size"), can_change("mode")
    (True, True, False, False)
    """
    section, _, name = key.partition(".")
    if key not in SETTINGS:
        return False  # of another version of the trainer
    if section == "model":
        return name.removeprefix("experts.") in {*MAY_DIFFER, *OF_ROPE, *OF_EXPERTS}
    return key == "adapter.dropout" if section == "adapter" else section != "mode"


def covers(name: str, key: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def now(found: Mapping[str, list[Any]]) -> str:
    return ", ".join(f"{key} {after} ({before} before)" for key, (before, after) in found.items())


class KeepChanges(Callback):
    """Prints and records the changed settings of a resumed run. leads: whether this rank writes in its folder."""

    every_rank = True

    def __init__(self, config: TrainerConfig, changes: Changes, leads: bool):
        self.config, self.changes, self.leads = config, changes, leads

    def on_start(self, engine: RunState) -> None:
        output = self.config.engine.output
        code, place = self.changes.code_line(self.config, engine.step), self.changes.schedule_line(self.config, engine.step)
        for line in [*self.changes.lines(self.config, engine.step), *code, *place]:
            engine.console.print(line, markup=False, highlight=False, soft_wrap=True)
        is_new = bool(engine.saver.retuned) and not self.changes.since  # other data in the same settings
        if self.leads and (self.changes.asked or is_new or code):
            event = {"event": "settings", "step": engine.step, "changed": self.changes.asked}
            append(output, event | {"remarks": [*engine.saver.retuned, *code, *place]})
            settings = provenance.plain(self.config)
            provenance.write_settings(settings, output)
            provenance.write_code(settings, output)
