"""Floor 0. `course refresh`: run a notebook, run it again with other rounding and one thread, and store its outputs only if all agree.

    course refresh 01

A notebook always runs in a temporary workspace with untouched stubs, so a learner's progress never shows in it.
"""

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from shared.course import catalogue, stubs
from shared.course.errors import CourseError
from shared.course.paths import CHECKOUT
from shared.course.progress import replace_text

# Other ways of running that must print the same: another CPU's rounding, and one thread.
VARIANTS = {
    "AVX2 rounding": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "one thread": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


NBVAL = """
import sys
import pytest
from shared.course.refresh import reach_kernels_by_files
reach_kernels_by_files()
sys.exit(pytest.main(sys.argv[1:]))
"""

# Tags of cells: the figure that the first cell shows as what the reader will have made; imports and drawings, which are shown collapsed.
OPENING_FIGURE = "opening-figure"
IMPORTS, DRAWING = "imports", "drawing"
PICTURES = CHECKOUT / "chapters" / "pictures"  # those of some chapters, for the README
PICTURE = "opening.png"  # the first cell shows it as `![...](attachment:opening.png)`


@contextmanager
def workspace(notebook: nbformat.NotebookNode, name: str) -> Iterator[Path]:
    """A temporary folder with `notebooks/NAME` and every chapter's fresh stubs; gives the notebook's path."""
    with tempfile.TemporaryDirectory(prefix="course-notebook-") as folder:
        for chapter in catalogue.chapters().values():
            path = chapter.stub_file(Path(folder))
            path.parent.mkdir(parents=True)
            path.write_text(stubs.stub_file(chapter), encoding="utf-8")
        path = Path(folder, "notebooks", name)
        path.parent.mkdir()
        nbformat.write(notebook, path)
        yield path


def verify(notebook: nbformat.NotebookNode, name: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a notebook under nbval with `environment` on top of this process's, comparing every stored output."""
    list_fonts()
    with workspace(notebook, name) as path:
        environment = os.environ | nbval_environment(path) | environment
        command = [sys.executable, "-c", NBVAL, *nbval_words(path)]
        return subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)


def list_fonts() -> None:
    """matplotlib's first import lists the fonts, which a slow machine would report in a cell's output: it does so here."""
    import matplotlib.font_manager  # noqa: F401


def nbval_words(path: Path) -> list[str]:
    """pytest's command line for one notebook."""
    options = ["--nbval", "--nbval-kernel-startup-timeout=600", "-p", "no:cacheprovider"]
    return [*options, "--rootdir", str(path.parent), "-c", os.devnull, path.name]


def nbval_environment(path: Path) -> dict[str, str]:
    return {"JUPYTER_RUNTIME_DIR": str(path.parents[1] / "kernel")}


def reach_kernels_by_files() -> None:
    """Let nbval reach its kernel through files and not through ports of the machine: a port is found free, closed and opened again by the
    kernel, and another program may take it in between. The name of such a file must be short, and is not on every machine."""
    import nbval.kernel

    if len(os.environ["JUPYTER_RUNTIME_DIR"]) < 50:
        nbval.kernel.KernelManager = partial(nbval.kernel.KernelManager, transport="ipc")


def executed(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """The notebook with the outputs of a fresh kernel, and metadata that says nothing of where or when."""
    with workspace(notebook, name) as path:
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    for place, cell in enumerate(notebook.cells):
        cell["id"] = f"c{place:02}"
        tags = cell.metadata.get("tags", [])
        cell.metadata = ({"tags": tags} if tags else {}) | ({"jupyter": {"source_hidden": True}} if {IMPORTS, DRAWING} & set(tags) else {})
    open_with_figure(notebook)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def opening_figure(notebook: nbformat.NotebookNode) -> str | None:
    """The figure (PNG, base64) of the cell that is tagged so, as it was drawn last; None where no cell is."""
    for cell in notebook.cells:
        if OPENING_FIGURE in cell.metadata.get("tags", []):
            return next(output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    return None


def open_with_figure(notebook: nbformat.NotebookNode) -> None:
    """Attach the chapter's figure to the first cell, so that a reader sees at the beginning what the notebook ends with."""
    if figure := opening_figure(notebook):
        notebook.cells[0]["attachments"] = {PICTURE: {"image/png": figure}}


def refresh(chapter: catalogue.Chapter) -> None:
    """Execute a chapter's notebook and store it.

    Raises:
        CourseError: a variant printed something else; the stored notebook is as it was.
    """
    path = chapter.notebook
    notebook = executed(nbformat.read(path, as_version=4), path.name)
    for variant, environment in VARIANTS.items():
        done = verify(notebook, path.name, environment)
        if done.returncode:
            raise CourseError(f"{path.name} prints something else with {variant}; it is not stored. nbval says:\n{done.stdout[-6000:]}")
    replace_text(path, nbformat.writes(notebook) + "\n")
    if (picture := PICTURES / f"{chapter.number}.png").exists():
        picture.write_bytes(base64.b64decode(opening_figure(notebook)))

