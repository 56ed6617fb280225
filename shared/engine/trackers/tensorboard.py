"""Chapter 04. Metrics for TensorBoard: `tensorboard --logdir RUN/tensorboard` draws them.

In 32 bits: the page shows no curve of what was written in 64.

Left out on purpose: histograms and images. Dumps (`shared.engine.debug.dump`) keep distributions in files that need no server.
"""

import shlex
from pathlib import Path

from shared.engine.callbacks import Callback, Metrics
from shared.engine.run_state import RunState
from shared.engine.trackers.external import Settings, require, say_how_to_see, settings_of


class TensorBoardTracker(Callback):
    """Writes event files.

    Args:
        folder: None for `tensorboard` in the run's folder.
        settings: what else than the engine's configuration is shown on the page's text tab.

    A resumed run writes a second file there, which begins by telling TensorBoard to drop what the first one holds of later steps.
    """

    expendable = True

    def __init__(self, folder: Path | str | None = None, settings: Settings | None = None):
        self.folder, self.settings = folder, settings
        self.writer = None

    def on_start(self, engine: RunState) -> None:
        require("tensorboard", "tensorboard")
        writers = require("torch.utils.tensorboard", "tensorboard")
        self.folder = self.folder or engine.output / "tensorboard"
        self.writer = writers.SummaryWriter(self.folder, purge_step=engine.step + 1)
        rows = [f"| {name} | {value} |" for name, value in settings_of(engine, self.settings).items()]
        self.writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), engine.step)

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, engine.step)
        self.writer.flush()

    def on_end(self, engine: RunState) -> None:
        if self.writer is not None:
            self.writer.close()
            say_how_to_see(engine, "TensorBoard", f"tensorboard --logdir {shlex.quote(str(self.folder))}")
