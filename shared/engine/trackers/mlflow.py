"""Chapter 04. Metrics for MLflow, in a database file: `mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db` shows them.

The course installs mlflow-skinny, which logs and has no page: `pip install mlflow`, in an environment of its own, brings `mlflow ui`.

Left out on purpose: its registry of models and its artifacts; checkpoints stay where the engine saves them.
"""

import logging
import os
import shlex
import time
from typing import Any

from shared.engine.callbacks import Callback, Metrics
from shared.engine.run_state import RunState
from shared.engine.trackers.external import Settings, require, say_how_to_see, settings_of

# MLflow's own switches for a server that does not answer. With its defaults the first call alone waits four minutes, and sixteen where
# nothing is refused.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MlflowTracker(Callback):
    """Logs to one MLflow run, whose id is saved with the checkpoints.

    Args:
        experiment: the MLflow experiment; made where it does not exist.
        name: of the run; None lets MLflow choose one.
        uri: the store; None for the SQLite database `mlflow.db` in the run's folder. A server's address works too.
        settings: what else than the engine's configuration is logged as parameters.

    MLflow cannot take a value back. So what a resumed run computes again, up to the last step that the store holds, is not
    logged a second time.
    """

    expendable = True

    def __init__(
        self,
        experiment: str = "train-language-models",
        name: str | None = None,
        uri: str | None = None,
        settings: Settings | None = None,
    ):
        self.experiment, self.name, self.uri, self.settings = experiment, name, uri, settings
        self.client: Any = None
        self.run_id: str | None = None
        self.status = "FAILED"

    def on_start(self, engine: RunState) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow's own switch: without it, it reports its use to its makers
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        require("sqlalchemy", "mlflow-skinny sqlalchemy alembic")
        mlflow = require("mlflow", "mlflow-skinny sqlalchemy alembic")
        self.entities = mlflow.entities
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # a new database is announced with a line for each of its tables
        engine.output.mkdir(parents=True, exist_ok=True)
        self.uri = self.uri or f"sqlite:///{(engine.output / 'mlflow.db').resolve()}"
        self.client = mlflow.MlflowClient(tracking_uri=self.uri)
        if self.run_id is None:
            self.run_id = self.client.create_run(self.find_experiment(engine), run_name=self.name).info.run_id
        else:
            self.client.update_run(self.run_id, status="RUNNING")
        self.log_settings(settings_of(engine, self.settings))
        self.logged_before = self.last_step()
        self.status = "FINISHED"

    def find_experiment(self, engine: RunState) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is not None:
            return experiment.experiment_id
        return self.client.create_experiment(self.experiment, artifact_location=(engine.output / "mlflow-artifacts").resolve().as_uri())

    def log_settings(self, settings: Settings) -> None:
        """As parameters, which cannot change: what a resumed run has otherwise, such as more steps, keeps its first value."""
        known = self.client.get_run(self.run_id).data.params
        new = [self.entities.Param(name, str(value)) for name, value in settings.items() if name not in known]
        self.client.log_batch(self.run_id, params=new)

    def last_step(self) -> int:
        """The last step that the store holds of this run; 0 for none."""
        names = self.client.get_run(self.run_id).data.metrics
        return max((metric.step for name in names for metric in self.client.get_metric_history(self.run_id, name)), default=0)

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        if engine.step <= self.logged_before:
            return
        now = int(time.time() * 1000)
        metrics = [self.entities.Metric(name, value, now, engine.step) for name, value in metrics.items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def on_error(self, engine: RunState, error: BaseException) -> None:
        self.status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"

    def on_end(self, engine: RunState) -> None:
        if self.client is not None and self.run_id is not None:
            asked_to_leave = engine.leaving and self.status == "FINISHED"  # by a signal; a run that stops early by itself has finished
            self.client.set_terminated(self.run_id, status="KILLED" if asked_to_leave else self.status)
            page = f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}    (`pip install mlflow` brings this page)"
            say_how_to_see(engine, "MLflow", self.uri if self.uri.startswith("http") else page)

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]
