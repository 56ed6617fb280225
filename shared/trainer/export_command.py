"""Chapter 12. Command `course export`: a run's model as a GGUF file, for llama.cpp and its like (`chapters/12_grpo/ELSEWHERE.md`)."""

from pathlib import Path

import click

from shared.course import terminal
from shared.course.click_group import TRAINER, CourseCommand, examples
from shared.course.errors import CourseError, SettingError
from shared.course.importing import all_stays
from shared.finetune.gguf.packaged import TYPES


@click.command(
    cls=CourseCommand,
    section=TRAINER,
    epilog=examples("course export runs/laptop_sft --gguf f16", "course export FOLDER --gguf q8_0 --output model.gguf"),
)
@click.argument("run", metavar="RUN")
@click.option("--gguf", "kind", type=click.Choice(TYPES), required=True, help="Write a GGUF file with matrices of this type.")
@click.option("--output", type=click.Path(path_type=Path), help="The file.  [default: NAME-TYPE.gguf in RUN]")
def export(run: str, kind: str, output: Path | None) -> None:
    """Write the model of a run, or of any Hugging Face folder, as a GGUF file for llama.cpp, Ollama and their like.

    An adapter is in the weights of a run's model already. Tokenizer, chat template and end tokens go into the file too.
    """
    with all_stays():
        from shared.finetune.gguf.modelfile import write_modelfile
        from shared.finetune.gguf.write import save_gguf
        from shared.model.hf.files import PretrainedError
        from shared.trainer.weights import find_initial_weights

    path = Path(run).expanduser()
    start = find_initial_weights(path, "RUN")
    if start.is_checkpoint:
        raise SettingError(f"{path} has checkpoints and no exported model yet: let the run end, which writes one.")
    name = (path if path.is_dir() else start.folder).resolve().name
    output = output or (path if path.is_dir() else start.folder) / f"{name}-{kind}.gguf"
    console = terminal.open_console()
    try:
        save_gguf(start.folder, output, kind, lambda line: terminal.say(console, line))
    except PretrainedError as error:
        raise CourseError(str(error)) from None
    terminal.say(console, f"{output}: {output.stat().st_size / 1e6:,.0f} MB")
    modelfile, said = write_modelfile(start.folder, output)
    terminal.say(console, f"{modelfile}: for Ollama, {said}")
