"""The notebooks of the docs run as they are, and print what is stored in them.

`python tests/test_notebooks.py [NAME ..]` runs them and stores their outputs.
"""

import pathlib
import sys

import nbclient
import nbformat
import pytest

from spec_jax import testing
from spec_jax.native import build


ROOT = pathlib.Path(__file__).parents[1]
ISA = "avx2"
"""The instruction set of the stored outputs: another one may write other texts."""
NOTEBOOKS = {
    # Parts that must be printed, or shown as HTML or as a picture.
    "quickstart": ("tokens per target step", "background:#b7e4c7", "image/png"),
    "own_drafter": ("number drafted", "tokens per target step"),
    "own_loop": ("committed [24 24]", "equal: True"),
    "tree": ("equal: True", "image/png"),
}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / f"docs/notebooks/{name}.ipynb", as_version=4)


def run(notebook: nbformat.NotebookNode, monkeypatch) -> nbformat.NotebookNode:
    """Runs a notebook, and keeps only the outputs that another run repeats."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SPEC_JAX_ISA", ISA)
    nbclient.NotebookClient(notebook, timeout=600, record_timing=False).execute()
    tidy(notebook)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in outputs(notebook))


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Drops standard error, and joins pieces of output that were split by time."""
    for cell in notebook.cells:
        kept: list = []
        for one in cell.get("outputs", []):
            names = [output.get("name") for output in (*kept[-1:], one)]
            if names == ["stdout", "stdout"]:
                kept[-1].text += one.text
            elif names[-1] != "stderr":
                kept.append(one)
        if "outputs" in cell:
            cell.outputs = kept


@pytest.fixture(scope="module")
def ran() -> dict[str, nbformat.NotebookNode]:
    """Runs all notebooks, one after the other in one kernel: they share programs."""
    notebooks = {name: read(name) for name in NOTEBOOKS}
    cells = []
    for notebook in notebooks.values():
        cells += [*notebook.cells, nbformat.v4.new_code_cell("%reset -f")]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    with pytest.MonkeyPatch.context() as patch:
        run(nbformat.v4.new_notebook(cells=cells), patch)
    return notebooks


# Jupyter's kernel itself warns of sockets and loops that are left open.
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(
    ISA not in build.available_isas(), reason=f"this processor has no {ISA}"
)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_prints_what_is_stored(name, ran):
    """Fails if a cell raises, a text or a figure is missing, or outputs are stale."""
    stored, found = printed(read(name)), printed(ran[name])
    assert found == stored and "differ" not in stored
    shown = found + str([output.get("data") for output in outputs(ran[name])])
    assert [part for part in NOTEBOOKS[name] if part not in shown] == []


def test_every_notebook_is_run():
    """Fails if a notebook is added to the docs and not to the table."""
    there = {path.stem for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert there == set(NOTEBOOKS)


@pytest.mark.slow
def test_the_drafter_of_the_notebook_keeps_the_contract():
    """Fails if the drafter fails the kit, which the notebook says it passes."""
    names: dict = {}
    exec(read("own_drafter").cells[1].source, names)
    testing.check_drafter(names["LastTime"](), params=None)


if __name__ == "__main__":
    for made in sys.argv[1:] or NOTEBOOKS:
        with pytest.MonkeyPatch.context() as patch:
            ran = run(read(made), patch)
        nbformat.write(ran, ROOT / f"docs/notebooks/{made}.ipynb")
