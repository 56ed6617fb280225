"""Chapter 04. Metrics for Weights & Biases: kept in files beside the run unless sending them was asked for.

`wandb sync RUN/wandb/offline-run-*` sends an offline run later; parts of a run that was resumed offline carry the same id and become one.

Left out on purpose: artifacts (checkpoints stay where the engine saves them), code and console output.
"""

import os
import shlex
import time
from pathlib import Path
from typing import Any, Literal

from shared.engine.callbacks import Callback, Metrics
from shared.engine.run_state import RunState
from shared.engine.trackers.external import Settings, require, say_how_to_see, settings_of


class WandbTracker(Callback):
    """Logs to one W&B run, whose id is saved with the checkpoints.

    Args:
        project: the W&B project.
        name: of the run; None lets W&B choose one.
        mode: offline (files only), online (sends; needs an account), disabled (a dry run).
        entity: the team or user; None for your own.
        settings: what else than the engine's configuration goes into the run's config.

    W&B keeps the first value of a step. The last step that was logged is noted in the run's folder, because a run that is killed has
    logged more than its checkpoint knows; what a resumed run computes again, up to there, is not logged a second time.
    """

    expendable = True

    def __init__(
        self,
        project: str = "train-language-models",
        name: str | None = None,
        mode: Literal["offline", "online", "disabled"] = "offline",
        entity: str | None = None,
        settings: Settings | None = None,
    ):
        self.project, self.name, self.mode, self.entity, self.settings = project, name, mode, entity, settings
        self.run: Any = None
        self.run_id: str | None = None

    def on_start(self, engine: RunState) -> None:
        # W&B's own switch for reports about itself, which it would otherwise send even from an offline run.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb = require("wandb", "wandb")
        engine.output.mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=self.project, name=self.name, mode=self.mode, entity=self.entity, id=self.run_id, resume="allow",
            dir=str(engine.output), config=settings_of(engine, self.settings), allow_val_change=True,
            # Its own copy of what is printed would tear a progress bar. Its helper process may take its time on a busy machine.
            settings=wandb.Settings(
                silent=True, console="off", x_service_wait=300.0, init_timeout=90.0 if self.mode == "online" else 300.0,
                finish_timeout=300.0, finish_timeout_raises=True,
            ),
        )  # fmt: skip
        self.run_id = self.run.id
        self.file, self.least_bytes = Path(self.run.settings.sync_file), 0  # what it must hold at the end
        self.note = engine.output / "wandb" / f"last-step-{self.run_id}"
        self.logged_before = int(self.note.read_text()) if self.note.exists() else 0
        self.failed = False

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        if engine.step <= self.logged_before:
            return
        self.run.log(metrics, step=engine.step)
        self.least_bytes += sum(map(len, metrics))
        self.note.parent.mkdir(exist_ok=True)
        self.note.write_text(str(engine.step))

    def on_error(self, engine: RunState, error: BaseException) -> None:
        self.failed = True

    def on_end(self, engine: RunState) -> None:
        if self.run is not None:
            run, self.run = self.run, None
            run.finish(exit_code=int(self.failed))
            if self.mode == "disabled":
                return
            self.require_written()
            parts = f"{shlex.quote(str(self.note.parent))}/offline-run-*-{self.run_id}"
            say_how_to_see(engine, "W&B", f"wandb sync {parts}" if self.mode == "offline" else run.url)

    def require_written(self, patience: float = 30.0) -> None:
        """Its helper process writes the file, perhaps after `finish` has returned, and reports no error of the disk."""
        deadline = time.monotonic() + patience
        while (kept := self.file.stat().st_size) < self.least_bytes:
            if time.monotonic() > deadline:
                raise OSError(f"W&B wrote {kept} of at least {self.least_bytes} bytes into {self.file}: is the disk full?")
            time.sleep(0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]
