"""Chapter 04. The progress bar of a run in a terminal, and a line for each log everywhere else."""


from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.engine.callbacks import Callback, Metrics, RunState

# metric -> its format. A metric that a run does not measure is left out.
SHOWN = {
    "train/loss": "loss {:.3f}",
    "validation/loss": "held out {:.3f}",
    "norm/gradient": "gradient norm {:.2f}",
    "speed/tokens_per_second": "{:,.0f} tokens/s",
    "speed/mfu": "MFU {:.0%}",
}


class ConsoleTracker(Callback):
    """Loss, held-out loss, tokens per second and, in a terminal, the time that is left.

    Args:
        show: metric -> format, for more or other metrics than these.
    """

    expendable = True

    def __init__(self, show: dict[str, str] | None = None):
        self.show = show or SHOWN
        self.bar: Progress | None = None

    def on_start(self, engine: RunState) -> None:
        if not engine.console.is_terminal:
            return
        columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, TextColumn("{task.fields[values]}", markup=False), console=engine.console)
        self.task = self.bar.add_task("training", total=engine.steps, completed=engine.step, values="")
        self.bar.start()

    def on_step(self, engine: RunState) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=engine.step)

    def on_log(self, engine: RunState, metrics: Metrics) -> None:
        values = [form.format(metrics[name]) for name, form in self.show.items() if name in metrics]
        if self.bar is not None:
            self.bar.update(self.task, values=", ".join(values))
        else:
            step = f"step {engine.step:>{len(str(engine.steps))}} of {engine.steps}"
            engine.console.print("   ".join([step, *values]), markup=False, highlight=False, soft_wrap=True)

    def on_end(self, engine: RunState) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
