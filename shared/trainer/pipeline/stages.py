"""Chapter 12. Stages of a training pipeline from a YAML file, all checked before the first one starts.

    output: runs/mine                    each stage gets a folder in it
    stages:
      - name: pretrain
        config: ../laptop.yaml           a configuration of the trainer, beside this file or with its path
        words: {steps: 500}              settings over that file, dotted as on the command line
        layout: dp2                      if it is to run on several processes

A stage starts from the model of the nearest stage before it that is no reward model; PPO asks the nearest reward model before it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.course.errors import CourseError, SettingError
from shared.course.paths import CHECKOUT
from shared.course.typed import configured, with_words
from shared.data.sources import Digests
from shared.data.prepare import DIGESTS
from shared.finetune.gguf.packaged import is_gguf
from shared.trainer import provenance
from shared.trainer.config import TrainerConfig
from shared.trainer.launch.start import TRAIN, command_of
from shared.trainer.records.changes import not_asked_for, words_for
from shared.trainer.settings import from_settings, merged, read_settings, with_shorter_schedule
from shared.trainer.weights import InitialWeights, find_initial_weights, find_reward_model, fingerprint_of

FOLDER = CHECKOUT / "chapters" / "12_grpo" / "pipelines"  # of the course's own
RECORD = "stage.json"  # in the folder of a finished stage: its settings, and the fingerprint of the weights that it started from
GIVEN = ("engine.output", "start_from", "start_config", "ppo.reward_model", "ppo.reward_config")  # by the pipeline
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")


@dataclass(frozen=True)
class StageEntry:
    """A stage in the pipeline's file. layout: such as dp2; null for the command line's, or one process."""

    name: str
    config: Path
    layout: str | None = None


@dataclass(frozen=True)
class PipelineEntry:
    """A pipeline's file, without the stages' overrides."""

    output: Path
    stages: tuple[StageEntry, ...] = ()


@dataclass(frozen=True)
class Stage:
    """A stage that can be run.

    Args:
        file, words: what the trainer is started with.
        config: what they mean, as far as it is known before the model that it starts from is there.
        start: the stage whose model it starts from; None for what its configuration names.
        judge: the stage whose reward model it asks, if any.
    """

    name: str
    file: Path
    words: list[str]
    layout: str | None
    config: TrainerConfig
    start: "Stage | None" = None
    judge: "Stage | None" = None

    @property
    def folder(self) -> Path:
        return self.config.engine.output

    @property
    def digests(self) -> Digests:
        return Digests(self.config.data.prepared / DIGESTS)

    @property
    def trained(self) -> InitialWeights:
        """The trained model of this stage."""
        return find_initial_weights(self.folder)

    def initial_weights(self) -> InitialWeights | None:
        """The model that it starts from; None for random weights."""
        path = self.start.folder if self.start else self.config.start_from
        return find_initial_weights(path) if path else None

    def start_fingerprint(self) -> str | None:
        """A hash of all weights that it starts from or learns from."""
        if (start := self.initial_weights()) is None:
            return None
        judge = [find_reward_model(self.judge.folder, "ppo.reward_model")] if self.judge else []
        return fingerprint_of([start, *judge], self.digests)

    def is_finished(self) -> bool:
        """Whether it was trained to its end, with these settings and from the current weights of its start.

        Raises:
            CourseError: it was trained with other settings, or from other weights.
        """
        record = read_record(self.folder / RECORD)
        if record is None or not (self.folder / "results.json").is_file():
            return False
        remedy = f"delete {self.folder} to train this stage and what follows from the beginning, or give another output."
        if changed := provenance.differences(record["settings"], provenance.plain(self.config)):
            if not (refused := not_asked_for(changed, self.config.continue_with)):
                return False  # the run is continued with them
            raise CourseError(
                f"Stage {self.name} was trained with other settings: {provenance.in_words(refused)}. Give the same again, give "
                f"stages.{self.name}.{words_for(changed)} to continue it with what is new, {remedy}"
            )
        if self.start and record["start"] != self.start_fingerprint():
            raise CourseError(f"Stage {self.name} was trained from other weights than stage {self.start.name} has now: {remedy}")
        return True

    def record(self) -> dict[str, Any]:
        """What `is_finished` compares later."""
        return {"settings": provenance.plain(self.config), "start": self.start_fingerprint() if self.start else None}


@dataclass(frozen=True)
class Pipeline:
    """Stages in their order. output: the folder that holds theirs. file: what they were read from."""

    file: Path
    output: Path
    stages: list[Stage] = field(default_factory=list)


def read_record(path: Path) -> dict[str, Any] | None:
    """The kept `Stage.record`; None if the file is missing or damaged."""
    found, _ = provenance.read_object(path)
    return found if isinstance(found.get("settings"), dict) and "start" in found else None


def read_pipeline(path: Path, words: Sequence[str] = ()) -> Pipeline:
    """The stages of a file, with the overrides of a command line: output=FOLDER and layout=LAYOUT are the pipeline's,
    stages.NAME.KEY=VALUE is for one stage, and any other for all.
    """
    entry, asked = read_entry(path)
    own, for_all = shared_out(words, asked)
    layout = own.get("layout")
    output = Path(own["output"]).expanduser() if "output" in own else entry.output.with_name(f"{entry.output.name}-{layout}") if layout \
        else entry.output  # fmt: skip
    pipeline = Pipeline(path, output)
    for each in entry.stages:
        try:
            pipeline.stages.append(planned(each, asked[each.name] | for_all, layout, path, pipeline))
        except (CourseError, ValueError) as error:
            raise SettingError(f"{path.name}, stage {each.name}: {error}") from error
    return pipeline


def read_entry(path: Path) -> tuple[PipelineEntry, dict[str, dict[str, str]]]:
    """The content of a pipeline's file, and the overrides of each stage."""
    if not path.is_file() and path.parent.resolve() == FOLDER:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.yaml")))
        raise SettingError(f"There is no pipeline {path.stem}: give one of {known}, or the path of a file of your own.")
    settings = read_settings(path)
    stages = settings.get("stages")
    asked = []
    if isinstance(stages, list) and all(isinstance(each, Mapping) for each in stages):
        settings["stages"] = [{key: value for key, value in each.items() if key != "words"} for each in stages]
        asked = [each.get("words") or {} for each in stages]
    try:
        entry = configured(PipelineEntry, settings)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error
    names = [each.name for each in entry.stages]
    if not names:
        raise SettingError(f"{path} has no stages: give a list of them, each with a name and a config.")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"{path} has two stages of the name {twice[0]}, and each has a folder of its own: give each another name.")
    for name, some in zip(names, asked, strict=True):
        if not NAME.fullmatch(name):
            raise SettingError(f"{path}: a stage is named {name!r}, and its name is a folder's: give letters, digits, - and _.")
        if not isinstance(some, Mapping):
            raise SettingError(f"{path}, stage {name}: words is {some!r}: give a section of settings, such as steps: 100.")
    texts = [{str(key): value if isinstance(value, str) else json.dumps(value) for key, value in some.items()} for some in asked]
    return entry, dict(zip(names, texts, strict=True))


def shared_out(words: Sequence[str], asked: dict[str, dict[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """The overrides of a command line for the pipeline, and for all stages; those for one stage go into `asked`."""
    own, for_all = {}, {}
    for word in words:
        key, given, value = word.removeprefix("--").partition("=")
        if not given:
            raise SettingError(f"{word!r} is not a setting: write key=value.")
        if key in ("output", "layout"):
            own[key] = value
        elif key.startswith("stages."):
            _, name, *rest = key.split(".")
            if name not in asked or not rest:
                raise SettingError(f"{key}: write stages.NAME.KEY=VALUE with a stage's name, one of {', '.join(asked)}.")
            asked[name][".".join(rest)] = value
        else:
            for_all[key] = value
    return own, for_all


def planned(entry: StageEntry, asked: dict[str, str], layout: str | None, path: Path, pipeline: Pipeline) -> Stage:
    """A stage with its start, its folder and its settings."""
    if given := [key for key in GIVEN if key in asked and pipeline.stages or key == "engine.output" and key in asked]:
        raise SettingError(f"{given[0]} is given, which the pipeline decides: leave it out, or run this stage alone with make run.")
    file = entry.config if entry.config.is_absolute() else path.parent / entry.config
    layout = asked.pop("layout", None) or entry.layout or layout
    settings = read_settings(file, TrainerConfig)
    models = [stage for stage in pipeline.stages if stage.config.mode != "reward"]
    start = models[-1] if models else None
    if pipeline.stages and start is None:
        raise SettingError("it starts from nothing, because only reward models come before it: put a stage with a language model first.")
    if start and start.config.virtual_tokens:
        raise SettingError(f"stage {start.name} trains virtual tokens, which no weights hold to start from: give adapter.kind lora there.")
    words = asked | {"engine.output": str(pipeline.output / entry.name)} | ({"start_from": str(start.folder)} if start else {})
    judge = next((stage for stage in reversed(pipeline.stages) if stage.config.mode == "reward"), None)
    judge = judge if asked.get("mode", settings.get("mode")) == "ppo" else None
    words |= {"ppo.reward_model": str(judge.folder)} if judge else {}
    command = [f"{key}={value}" for key, value in words.items()]
    if layout:
        found, _ = command_of(layout, [str(file), *command])
        words = dict(word.split("=", 1) for word in found[found.index(str(TRAIN)) + 2 :])
    known = with_shorter_schedule(TrainerConfig, settings, with_words(TrainerConfig, settings, words), asked)
    if start:
        known["model"] = merged(provenance.plain(start.config.model), known.get("model") or {})
    given = known.get("start_from")
    exists = start is None and isinstance(given, str) and (Path(given).is_dir() or is_gguf(given))
    config = from_settings(TrainerConfig, known, complete=exists)
    return Stage(entry.name, file, command, layout, config, start, judge)
