"""Chapter 04. Trackers of services, whose records another program draws: TensorBoard, Weights & Biases, MLflow.

    TensorBoard     tensorboard --logdir RUN/tensorboard               event files, in 32 bits: its page shows no curve of 64
    W&B             wandb sync RUN/wandb/offline-run-*                 files, unless sending them was asked for
    MLflow          mlflow ui --backend-store-uri sqlite:///...        a database file; the page comes with `pip install mlflow`

Each opens its records, sends them metrics and closes them; `Service` has the rest. Packages are imported on demand.

Left out on purpose: histograms and images (`shared.engine.debug.dump` keeps distributions), artifacts and registries: checkpoints stay
where the engine saves them.
"""

import importlib
import logging
import os
import shlex
import time
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal

from shared.course.errors import CourseError
from shared.engine.callbacks import Callback, Metrics, RunState

Settings = dict[str, Any]

# MLflow's own switches for a server that does not answer. With its defaults the first call alone waits four minutes, and sixteen where
# nothing is refused. And for telemetry, which it would otherwise send.
MLFLOW_SWITCHES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_DISABLE_TELEMETRY": "true"}
MLFLOW_PACKAGES = "mlflow-skinny sqlalchemy alembic"


class Service(Callback):
    """A tracker of one service. Subclasses define `open`, `send` and `close`.

    A service cannot take a value back: the first value of a step stays. So what a resumed run computes again, up to `logged_before`, is
    not sent a second time.

    Attributes:
        client: the service's own object, which `open` sets as soon as there is something to close.
        run_id: the service's name for the run, where it has one; saved with the checkpoints, so that a resumed run continues there.
        logged_before: the last step that the service has from an earlier part of the run.
        error: what ended the run, or this tracker.
    """

    expendable = True
    name = ""

    def __init__(self, settings: Settings | None):
        self.settings, self.client, self.run_id, self.logged_before = settings, None, None, 0
        self.error: BaseException | None = None

    def open(self, engine: RunState, settings: Settings) -> None:
        """Open the records of the run, and put the settings there."""
        raise NotImplementedError

    def send(self, metrics: Metrics, step: int) -> None:
        """Log the metrics of a step."""
        raise NotImplementedError

    def close(self, client: Any, engine: RunState) -> str:
        """Complete the records. Returns the command or address that shows them."""
        raise NotImplementedError

    def on_start(self, engine: RunState) -> None:
        self.error = None
        engine.output.mkdir(parents=True, exist_ok=True)
        self.open(engine, settings_of(engine, self.settings))

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        if engine.step > self.logged_before:
            self.send(metrics, engine.step)

    def on_error(self, engine: RunState, error: BaseException) -> None:
        self.error = error

    def on_end(self, engine: RunState) -> None:
        client, self.client = self.client, None
        if client is not None and (shown := self.close(client, engine)):
            engine.console.print(f"{self.name}: {shown}", markup=False, highlight=False, soft_wrap=True)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.run_id is None else {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state.get("run_id")


class TensorBoardTracker(Service):
    """Writes event files.

    Args:
        folder: None for `tensorboard` in the run's folder.
        settings: what else than the engine's configuration is shown on the page's text tab.

    A resumed run writes a second file there, which begins by telling TensorBoard to drop what the first one holds of later steps.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path | str | None = None, settings: Settings | None = None):
        super().__init__(settings)
        self.folder = folder

    def open(self, engine: RunState, settings: Settings) -> None:
        require("tensorboard", "tensorboard")
        writers = require("torch.utils.tensorboard", "tensorboard")
        self.folder = self.folder or engine.output / "tensorboard"
        self.client = writers.SummaryWriter(self.folder, purge_step=engine.step + 1)
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        self.client.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), engine.step)

    def send(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self.client.add_scalar(name, value, step)
        self.client.flush()

    def close(self, client: Any, engine: RunState) -> str:
        client.close()
        return f"tensorboard --logdir {shlex.quote(str(self.folder))}"


class WandbTracker(Service):
    """Logs to one W&B run. Parts of a run that was resumed offline carry the same id and become one.

    Args:
        project: the W&B project.
        name: of the run; None lets W&B choose one.
        mode: offline (files only), online (sends; needs an account), disabled (a dry run).
        entity: the team or user; None for your own.
        settings: what else than the engine's configuration goes into the run's config.

    The last step that was logged is noted in the run's folder, because a run that is killed has logged more than its checkpoint knows.
    """

    name = "W&B"

    def __init__(
        self,
        project: str = "train-language-models",
        name: str | None = None,
        mode: Literal["offline", "online", "disabled"] = "offline",
        entity: str | None = None,
        settings: Settings | None = None,
    ):
        super().__init__(settings)
        self.mode, self.place = mode, {"project": project, "name": name, "mode": mode, "entity": entity}

    def open(self, engine: RunState, settings: Settings) -> None:
        # W&B's own switch for reports about itself, which it would otherwise send even from an offline run.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = require("wandb", "wandb")
        self.client = wandb.init(
            **self.place, id=self.run_id, resume="allow", dir=str(engine.output), config=settings, allow_val_change=True,
            # Its own copy of what is printed would tear a progress bar. Its helper process may take its time on a busy machine.
            settings=wandb.Settings(
                silent=True, console="off", x_service_wait=300.0, init_timeout=90.0 if self.mode == "online" else 300.0,
                finish_timeout=300.0, finish_timeout_raises=True,
            ),
        )  # fmt: skip
        self.run_id = self.client.id
        self.file, self.least_bytes = Path(self.client.settings.sync_file), 0  # what it must hold at the end
        self.note = engine.output / "wandb" / f"last-step-{self.run_id}"
        self.logged_before = int(self.note.read_text()) if self.note.exists() else 0

    def send(self, metrics: Metrics, step: int) -> None:
        self.client.log(metrics, step=step)
        self.least_bytes += sum(map(len, metrics))
        self.note.parent.mkdir(exist_ok=True)
        self.note.write_text(str(step))

    def close(self, client: Any, engine: RunState) -> str:
        client.finish(exit_code=int(self.error is not None))
        if self.mode == "disabled":
            return ""
        self.require_written()
        parts = f"{shlex.quote(str(self.note.parent))}/offline-run-*-{self.run_id}"
        return f"wandb sync {parts}" if self.mode == "offline" else client.url

    def require_written(self, patience: float = 30.0) -> None:
        """Its helper process writes the file, perhaps after `finish` has returned, and reports no error of the disk."""
        deadline = time.monotonic() + patience
        while (kept := self.file.stat().st_size) < self.least_bytes:
            if time.monotonic() > deadline:
                raise OSError(f"W&B wrote {kept} of at least {self.least_bytes} bytes into {self.file}: is the disk full?")
            time.sleep(0.1)


class MlflowTracker(Service):
    """Logs to one MLflow run.

    Args:
        experiment: the MLflow experiment; made where it does not exist.
        name: of the run; None lets MLflow choose one.
        uri: the store; None for the SQLite database `mlflow.db` in the run's folder. A server's address works too.
        settings: what else than the engine's configuration is logged as parameters.

    The course installs mlflow-skinny, which logs and has no page.
    """

    name = "MLflow"

    def __init__(
        self,
        experiment: str = "train-language-models",
        name: str | None = None,
        uri: str | None = None,
        settings: Settings | None = None,
    ):
        super().__init__(settings)
        self.experiment, self.run_name, self.uri, self.complete = experiment, name, uri, False

    def open(self, engine: RunState, settings: Settings) -> None:
        for name, value in MLFLOW_SWITCHES.items():
            os.environ.setdefault(name, value)
        require("sqlalchemy", MLFLOW_PACKAGES)
        mlflow = require("mlflow", MLFLOW_PACKAGES)
        self.entities = mlflow.entities
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # a new database is announced with a line for each of its tables
        self.uri = self.uri or f"sqlite:///{(engine.output / 'mlflow.db').resolve()}"
        self.client = mlflow.MlflowClient(tracking_uri=self.uri)
        if self.run_id is None:
            self.run_id = self.client.create_run(self.find_experiment(engine), run_name=self.run_name).info.run_id
        else:
            self.client.update_run(self.run_id, status="RUNNING")
        data = self.client.get_run(self.run_id).data
        # Parameters cannot change: what a resumed run has otherwise, such as more steps, keeps its first value.
        new = [self.entities.Param(name, str(value)) for name, value in settings.items() if name not in data.params]
        self.client.log_batch(self.run_id, params=new)
        history = (metric.step for name in data.metrics for metric in self.client.get_metric_history(self.run_id, name))
        self.logged_before, self.complete = max(history, default=0), True

    def find_experiment(self, engine: RunState) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is not None:
            return experiment.experiment_id
        return self.client.create_experiment(self.experiment, artifact_location=(engine.output / "mlflow-artifacts").resolve().as_uri())

    def send(self, metrics: Metrics, step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def close(self, client: Any, engine: RunState) -> str:
        if self.run_id is None:
            return ""
        client.set_terminated(self.run_id, status=self.status(engine))
        page = f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}    (`pip install mlflow` brings this page)"
        return self.uri if self.uri.startswith("http") else page

    def status(self, engine: RunState) -> str:
        """KILLED for a run that was asked to leave, by a signal or Ctrl-C; one that stops early by itself has finished."""
        if isinstance(self.error, KeyboardInterrupt) or (self.complete and self.error is None and engine.leaving):
            return "KILLED"
        return "FINISHED" if self.complete and self.error is None else "FAILED"


def require(module: str, package: str) -> Any:
    """Import `module`.

    Args:
        package: what to install where it is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CourseError(
            f"This tracker needs the package {package}, which is not installed ({error}): "
            "`make install GROUP=trackers`, or leave the tracker out."
        ) from None


def settings_of(engine: RunState, more: Settings | None) -> Settings:
    """The engine's configuration under `engine.`, and what else a run wants on record, such as the model's, in plain values."""
    found = flat({"engine": engine.config} | (more or {}))
    return {name: value if isinstance(value, bool | int | float | str | None) else str(value) for name, value in found.items()}


def flat(settings: Settings, prefix: str = "") -> Settings:
    """Nested dictionaries and dataclasses as one dictionary with dotted names.

    >>> flat({"model": {"hidden_size": 64}, "seed": 0})
    {'model.hidden_size': 64, 'seed': 0}
    """
    found: Settings = {}
    for name, value in settings.items():
        value = asdict(value) if is_dataclass(value) else value
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
