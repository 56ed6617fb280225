"""Train a language model as a YAML file says: `python chapters/12_grpo/train.py CONFIG.yaml [key=value ...]`, or under torchrun.

python chapters/12_grpo/train.py chapters/12_grpo/laptop.yaml                     the main job, on whatever hardware there is
python chapters/12_grpo/train.py chapters/12_grpo/laptop.yaml steps=200 optimizer.name=adamw
torchrun --nproc-per-node 2 chapters/12_grpo/train.py chapters/12_grpo/laptop.yaml parallel.fully_sharded=2       on two GPUs
python chapters/12_grpo/train.py --help                                           every key, with its meaning
"""

import errno
import os
import signal
import sys

from shared.course.launch import INTERRUPTED, end_quietly_on_interrupt, help_asked, let_segments_grow, print_help, refuse, tell_torchrun

end_quietly_on_interrupt()  # until all is imported

from rich.console import Console  # noqa: E402

from shared.course import binding  # noqa: E402
from shared.course.errors import CourseError  # noqa: E402
from shared.course.importing import all_stays  # noqa: E402

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(words: list[str]) -> None:
    let_segments_grow()
    # Settings are typed by classes of the core, so whose exercises it runs with is read from the words before it is imported.
    from shared.trainer.settings import implementation_asked

    try:
        binding.choose(implementation_asked(words))
    except CourseError as error:
        refuse(error)
    with all_stays():
        from shared.trainer.config import TrainerConfig
        from shared.trainer.settings import USAGE, parse_words

        if asked := help_asked(words):
            print_help(TrainerConfig, USAGE, asked)
        from shared.parallel.processes.torchrun import from_torchrun, leave_world
        from shared.trainer.costs import process_began
        from shared.trainer.launch.elastic import layout_for_those_there
        from shared.trainer.launch.start import with_start
        from shared.trainer.run import train_model

    signal.signal(signal.SIGINT, signal.default_int_handler)
    say = print if os.environ.get("RANK", "0") == "0" else lambda line: None  # torchrun's own variable
    config = parse_words(TrainerConfig, words if "LOCAL_RANK" in os.environ else with_start(words), say)
    config = layout_for_those_there(config) if config.elastic else config
    parallel = config.parallel
    world, _ = from_torchrun(parallel.heartbeat_timeout, config.engine.device, parallel.collective_timeout, parallel.init_timeout)
    train_model(config, Console(markup=False, emoji=False), world, process_began())
    leave_world(world, "has finished", whole=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        sys.exit(
            f"\nThe disk has no room for {error.filename or 'a file of the run'} ({error.strerror}): free space, then repeat the command."
        )
    except CourseError as error:
        tell_torchrun(str(error))
        told_by_another = error.on_all_ranks and os.environ.get("LOCAL_RANK", "0") != "0"  # torchrun's own variable
        sys.exit(1 if told_by_another else f"\n{error}")
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(INTERRUPTED)
