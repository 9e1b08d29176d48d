"""A model to convert."""

import ml_dtypes
import pytest
from builders.models import small, write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a small Llama in three shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, *small("llama", dtype=ml_dtypes.bfloat16), shards=3)
    (folder / "tokenizer.json").write_text("{}")
    return folder
