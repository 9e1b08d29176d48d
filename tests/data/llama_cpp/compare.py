"""Compare llama.cpp with transformers on converted models: logits in f32 and bf16, and the tokens of 50 texts.

    PYTHONPATH=tests python tests/data/llama_cpp/compare.py FOLDER              # all
    PYTHONPATH=tests python tests/data/llama_cpp/compare.py FOLDER qwen3 phi3  # some models

Needs transformers, torch, tokenizers, sentencepiece and xllamacpp.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from builders import llama_cpp, llama_models

import safeload

HERE = Path(__file__).parent
# The greatest difference over the range of the logits. llama.cpp computes gelu from a table in f16.
F32, TABLE, BF16 = 1e-5, 1e-3, 3e-2


def expected_logits(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def encoder(folder):
    """A function from a text to its tokens, and False if texts with special tokens are beyond it."""
    if (folder / "tokenizer.model").exists():
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return lambda text: [model.bos_id(), *model.encode(text)], False
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids, True


def compare(name, entry, folder):
    source = llama_models.write_folder(folder / name, entry)
    ids = [int(k) for k in np.random.default_rng(0).integers(0, entry["config"]["vocab_size"], 80)]
    expected = expected_logits(source, ids)
    scale = expected.max() - expected.min()
    encode, with_special = encoder(source)
    for dtype in ("float32", "bfloat16"):
        path = folder / f"{name}-{dtype}.gguf"
        safeload.convert(source, path, dtype=dtype)
        with llama_cpp.Model(path) as model:
            difference = np.abs(model.logits(ids) - expected).max(axis=1) / scale
            for text in llama_models.texts():
                if with_special or not any(part in text for part in ("<|im_start|>", "<s>", "<|im_end|>")):
                    assert model.tokens(text) == encode(text), (name, text)
        # Single positions change if another expert is chosen, as in bf16, or if an index chooses another token:
        # llama.cpp keeps its keys in f16.
        value = (
            difference.max() if dtype == "float32" and "index_topk" not in entry["config"] else np.median(difference)
        )
        table = any("gelu" in str(value) for value in entry["config"].values())
        limit = BF16 if dtype == "bfloat16" else TABLE if table else F32
        print(f"{name} {dtype}: {value:.1e}")
        assert value < limit, (name, dtype, value)


def main(place, names):
    folder = Path(place)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, entry in llama_models.listed().items():
        if not names or name in names:
            compare(name, entry, folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
