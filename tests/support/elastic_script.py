"""The trainer, whose ranks wait after each step for which the run's folder holds a file `gate-STEP`, until they are asked to leave.

A file `at-STEP` says that they do. With `ELASTIC_PAUSE` in the environment they rest for so many seconds after every step.
"""

import os
import runpy
import sys
import time

from trainer_runs import TRAIN

from shared.trainer import run
from shared.trainer.records.history import History


class Gated(History):
    def on_step(self, engine):
        time.sleep(float(os.environ.get("ELASTIC_PAUSE", 0)))
        gate = engine.output / f"gate-{engine.step}"
        if gate.exists():
            (engine.output / f"at-{engine.step}").touch()
        while gate.exists() and not engine.shutdown.reason:
            time.sleep(0.01)


if __name__ == "__main__":
    run.History = Gated
    sys.argv[0] = str(TRAIN)
    runpy.run_path(str(TRAIN), run_name="__main__")
