"""The notebooks run as they are, and show what they promise."""

import pathlib
import re

import nbclient
import nbformat
import pytest


EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def outputs(path: pathlib.Path, monkeypatch) -> list:
    """Runs a notebook; every output of every cell."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


# The kernel's own machinery warns of sockets and loops that are left open.
@pytest.mark.filterwarnings("default")
def test_quickstart(monkeypatch):
    """Fails if a cell raises, or text, origins, a table or a figure is missing."""
    found = outputs(EXAMPLES / "quickstart.ipynb", monkeypatch)
    data = [output.get("data", {}) for output in found]
    printed = "".join(output.get("text", "") for output in found)
    assert any("background:#b7e4c7" in str(d.get("text/html", "")) for d in data)
    assert any("image/png" in d for d in data)
    assert "tokens per target step" in printed
    assert printed.count("equal") >= 3 * 4 and "differ" not in printed


@pytest.mark.filterwarnings("default")
def test_own_loop(monkeypatch):
    """Fails if a cell raises, tokens are not the oracle's, or seeds are one sample."""
    found = outputs(EXAMPLES / "own_loop.ipynb", monkeypatch)
    printed = "".join(output.get("text", "") for output in found)
    assert "committed [24 24]" in printed and "equal: True" in printed
    first, second = re.findall(r"^seed \d: (.*)$", printed, re.MULTILINE)
    assert first != second


def test_a_failing_cell_is_an_error(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, tmp_path / "bad.ipynb")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivision"):
        outputs(tmp_path / "bad.ipynb", monkeypatch)
