"""A notebook, executed: every result shows a table."""

import sys

import numpy as np
import pytest

from safeload.numpy import save_file

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.no_core, pytest.mark.skipif(sys.platform == "win32", reason="kernels need sockets of Unix")]

# Cells, and a text in the table that each shows.
CELLS = {
    "import safeload\nsafeload.info('a.safetensors')": "layers.0.weight",
    "checkpoint = safeload.open('a.safetensors'); checkpoint": "layers.0.weight",
    "checkpoint.tensors": "layers.0.weight",
    "safeload.check('a.safetensors')": "value.constant",
    "safeload.stats('a.safetensors')": "layers.1.weight",
    "safeload.stats(checkpoint['layers.0.weight'])": "[64, 64]",
    "safeload.convert('a.safetensors', 'q.safetensors', quantize='q8_0')": "q.safetensors",
    "quantized = safeload.load_quantized('a.safetensors', 'q4_0'); quantized.summary": "q4_0",
    "errors = safeload.quantization_error('a.safetensors', quantized); errors": "snr_db",
    "errors['layers.0.weight']": "snr_db",
    "safeload.diff('a.safetensors', 'q.safetensors')": "layers.0.weight",
    "safeload.report('a.safetensors', 'a.html')": "value.constant",
}


def test_every_result_shows_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    layers = {f"layers.{k}.weight": np.full((64, 64), k / 3, np.float32) for k in range(1, 40)}
    varied = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    save_file({"layers.0.weight": varied, **layers}, tmp_path / "a.safetensors", durable=False)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    for cell, text in zip(notebook.cells, CELLS.values(), strict=True):
        pages = [output.data.get("text/html", "") for output in cell.outputs if output.output_type == "execute_result"]
        assert len(pages) == 1, cell
        assert "<table>" in pages[0], cell.source
        assert text in pages[0], cell.source
        assert len(pages[0]) < 20_000  # a cell is not flooded
