"""The notebooks hold what they say: every stored output is printed again, in a workspace with untouched stubs."""

import base64
import re
import subprocess

import nbformat
import pytest
from notebook_runs import verified
from scripts import run_script

from shared.course import catalogue, refresh
from shared.course.paths import CHECKOUT

CHAPTERS = list(catalogue.chapters().values())
by_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.slug)


def read(chapter) -> nbformat.NotebookNode:
    return nbformat.read(chapter.notebook, as_version=4)


def code_cells(chapter) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(chapter).cells if cell.cell_type == "code"]


def outputs(chapter) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(chapter) for output in cell.outputs]


def assert_all_cells_pass(chapter, done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert re.search(rf"\b{len(code_cells(chapter))} passed", done.stdout), done.stdout[-500:]


@pytest.mark.parametrize(
    "chapter", [pytest.param(each, id=each.slug, marks=[pytest.mark.check] if each.number == "01" else ()) for each in CHAPTERS]
)
def test_every_output_is_printed_again(chapter):
    assert_all_cells_pass(chapter, verified(read(chapter), chapter.notebook.name))


@pytest.mark.slow
@by_chapter
@pytest.mark.parametrize("variant", refresh.VARIANTS)
def test_every_output_is_printed_again_on_other_machines(chapter, variant):
    assert_all_cells_pass(chapter, refresh.verify(read(chapter), chapter.notebook.name, refresh.VARIANTS[variant]))


@pytest.mark.parametrize("run", [verified, lambda notebook, name: refresh.verify(notebook, name, {})], ids=["forked", "fresh"])
def test_a_changed_output_is_noticed(run):
    """The negative control of the tests above."""
    cell = nbformat.v4.new_code_cell("print(1 + 1)", outputs=[nbformat.v4.new_output("stream", name="stdout", text="3\n")])
    cell.execution_count = 1
    done = run(nbformat.v4.new_notebook(cells=[cell]), "wrong.ipynb")
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_a_forked_kernel_that_dies_is_named_and_replaced(tmp_path):
    """nbval alone would wait for its answer, for the cell's whole time."""
    seen = tmp_path / "seen"
    source = f"import os, pathlib\nseen = pathlib.Path({str(seen)!r})\nif not seen.exists():\n    seen.touch(), os.abort()\nprint(1)"
    cell = nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output("stream", name="stdout", text="1\n")], execution_count=1)
    with pytest.warns(UserWarning, match=r"Fatal Python error: Aborted(.|\n)*the kernel ended with exit code -6"):
        done = verified(nbformat.v4.new_notebook(cells=[cell]), "dies.ipynb")
    assert done.returncode == 0 and "1 passed" in done.stdout
    seen.unlink()
    cell.outputs[0].text = "2\n"
    with pytest.warns(UserWarning, match="exit code -6"):
        assert verified(nbformat.v4.new_notebook(cells=[cell]), "dies.ipynb").returncode == 1


def test_a_forked_kernel_that_hangs_is_replaced(tmp_path):
    seen = tmp_path / "seen"
    source = f"import pathlib, time\nseen = pathlib.Path({str(seen)!r})\nif not seen.exists():\n    seen.touch(), time.sleep(500)\nprint(1)"
    cell = nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output("stream", name="stdout", text="1\n")], execution_count=1)
    with pytest.warns(UserWarning, match=r"died or hung(.|\n)*Timeout of 3 seconds"):
        assert verified(nbformat.v4.new_notebook(cells=[cell]), "hangs.ipynb", cell_seconds=3.0).returncode == 0


def test_the_process_that_forks_has_one_thread(tmp_path):
    """A child has none of its parent's other threads, and what these held stays locked in it."""
    (tmp_path / "count.py").write_text("import os, psutil\nprint(psutil.Process(os.getppid()).num_threads())\n")
    assert run_script(tmp_path / "count.py", cwd=tmp_path).stdout == "1\n"


@by_chapter
def test_the_workspace_of_a_notebook_has_untouched_stubs(chapter):
    with refresh.workspace(nbformat.v4.new_notebook(), "n.ipynb") as path:
        from shared.course.stubs import BodyFile

        file = BodyFile.read(chapter.stub_file(path.parents[1]))
        assert not any(file.attempted(exercise) for exercise in chapter.exercises)


@by_chapter
def test_the_size_is_what_a_reader_can_take(chapter):
    words = sum(len(cell.source.split()) for cell in read(chapter).cells if cell.cell_type == "markdown")
    assert 1500 <= words <= 3000
    assert 25 <= len(code_cells(chapter)) <= 45
    assert len(code_cells(chapter)[0].source.splitlines()) <= 4


@by_chapter
def test_figures_are_pictures_from_the_run(chapter):
    pictures = [output.data["image/png"] for output in outputs(chapter) if "image/png" in output.get("data", {})]
    assert len(pictures) >= 3
    assert all(len(base64.b64decode(picture)) > 5000 for picture in pictures)


@by_chapter
def test_the_first_cell_shows_the_question_and_the_figure_that_the_reader_will_have_made(chapter):
    notebook = read(chapter)
    first, figure = notebook.cells[0], refresh.opening_figure(notebook)
    assert figure and first.attachments == {refresh.PICTURE: {"image/png": figure}}
    assert f"](attachment:{refresh.PICTURE})" in first.source and "?" in first.source


def test_the_readmes_pictures_are_figures_of_the_notebooks():
    shown = re.findall(r"chapters/pictures/(\d\d)\.png", (CHECKOUT / "README.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.stem for path in refresh.PICTURES.glob("[0-9]*.png")) and len(shown) >= 2
    for chapter in (chapter for chapter in CHAPTERS if chapter.number in shown):
        picture = (refresh.PICTURES / f"{chapter.number}.png").read_bytes()
        assert picture == base64.b64decode(refresh.opening_figure(read(chapter))), f"`course refresh {chapter.number}` renews it"


@by_chapter
def test_a_long_list_of_imports_is_collapsed(chapter):
    """JupyterLab shows a bar in its place, which opens with a click."""
    for cell in code_cells(chapter):
        if sum(bool(re.match(r"(import|from) ", line)) for line in cell.source.splitlines()) > 6:
            assert refresh.IMPORTS in cell.metadata.get("tags", []) and cell.metadata.jupyter.source_hidden


@by_chapter
def test_code_fits_its_cell(chapter):
    """JupyterLab cuts a longer line off at the right, in a window of a thousand pixels."""
    assert [line for cell in code_cells(chapter) for line in cell.source.splitlines() if len(line) > 110] == []


@by_chapter
def test_a_long_drawing_is_collapsed(chapter):
    for cell in code_cells(chapter):
        if refresh.DRAWING in cell.metadata.get("tags", []):
            assert cell.metadata.jupyter.source_hidden and "plt.show()" in cell.source and len(cell.source.splitlines()) > 10


@by_chapter
def test_few_outputs_are_left_uncompared(chapter):
    uncompared = [cell for cell in code_cells(chapter) if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    assert len(uncompared) <= 2
    assert not any(line.startswith("# NBVAL") for cell in code_cells(chapter) for line in cell.source.splitlines())


@by_chapter
def test_each_exercise_is_shown_checked_and_got_wrong_once_in_teaching_order(chapter):
    shown_and_checked = re.compile(r'contract\("([\w.]+)"\)\nprint\(\)\ncheck\("\1"\)$')
    asked = [found[1] for cell in code_cells(chapter) if (found := shown_and_checked.search(cell.source))]
    assert asked == [exercise.id for exercise in chapter.exercises]
    wrong = [cell for cell in code_cells(chapter) if "raises-exception" in cell.metadata.get("tags", [])]
    assert len(wrong) == len(chapter.exercises)
    for exercise, cell in zip(chapter.exercises, wrong, strict=True):
        [error] = cell.outputs
        assert error.ename == "CheckFailed" and error.evalue.startswith(f"{exercise.id}  FAIL")
        assert has_diagnosis(error.evalue, exercise), f"the wrong answer to {exercise.id} is not recognised"


def has_diagnosis(report: str, exercise) -> bool:
    from shared.course.mutants import mutants_of

    told = " ".join(report.split())
    return any(" ".join(mutant.sentence.split()) in told for mutant in mutants_of(exercise.id))


@by_chapter
def test_outputs_tell_nothing_of_the_machine(chapter):
    text = nbformat.writes(read(chapter))
    assert str(CHECKOUT) not in text and "/home/" not in text and "/root/" not in text and "site-packages" not in text
    assert not any(output.get("name") == "stderr" for output in outputs(chapter))
    assert not any("execution" in cell.metadata for cell in code_cells(chapter))
