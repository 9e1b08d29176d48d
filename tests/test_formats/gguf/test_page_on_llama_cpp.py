"""What docs/guide/llama-cpp.md writes has the names of gguf-py, which llama.cpp reads, and the types of its writer."""

import pytest
from builders.doc_examples import examples_of, make_files
from builders.paths import ROOT

import safeload

gguf = pytest.importorskip("gguf")

pytestmark = [pytest.mark.any_python, pytest.mark.no_core]

# Methods of gguf-py's writer by the key that they write.
METHODS = {
    "general.name": "add_name",
    "llama.context_length": "add_context_length",
    "llama.embedding_length": "add_embedding_length",
    "llama.block_count": "add_block_count",
    "llama.feed_forward_length": "add_feed_forward_length",
    "llama.attention.head_count": "add_head_count",
    "llama.attention.head_count_kv": "add_head_count_kv",
    "llama.attention.layer_norm_rms_epsilon": "add_layer_norm_rms_eps",
    "llama.rope.dimension_count": "add_rope_dimension_count",
    "llama.rope.freq_base": "add_rope_freq_base",
    "llama.vocab_size": "add_vocab_size",
    "tokenizer.ggml.model": "add_tokenizer_model",
    "tokenizer.ggml.pre": "add_tokenizer_pre",
    "tokenizer.ggml.tokens": "add_token_list",
    "tokenizer.ggml.token_type": "add_token_types",
    "tokenizer.ggml.merges": "add_token_merges",
    "tokenizer.ggml.bos_token_id": "add_bos_token_id",
    "tokenizer.ggml.eos_token_id": "add_eos_token_id",
    "tokenizer.ggml.add_bos_token": "add_add_bos_token",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of the page's examples, which have been run."""
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for example in examples_of(ROOT / "docs" / "guide" / "llama-cpp.md"):
        example.evaluate()
    return tmp_path


def _types(path):
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.types for key, field in fields if not key.startswith("GGUF.")}


def test_names_are_those_of_gguf_py(folder):
    with safeload.open("tiny-llama") as source, safeload.open("tiny-llama.gguf") as made:
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, source.config["num_hidden_layers"])
        assert set(made) == {names.get_name(name, try_suffixes=(".weight",)) for name in source}


def test_metadata_has_the_types_of_gguf_py(folder):
    with safeload.open("tiny-llama.gguf") as made:
        written = dict(made.metadata)
    writer = gguf.GGUFWriter("theirs.gguf", written.pop("general.architecture"))
    for key, value in written.items():
        getattr(writer, METHODS[key])(value.tolist() if hasattr(value, "tolist") else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert _types("tiny-llama.gguf") == _types("theirs.gguf")
