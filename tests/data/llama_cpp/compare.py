"""Compare llama.cpp with transformers on converted models: logits in f32 and bf16, and the tokens of 50 texts.

Of models with a vision tower, llama.cpp loads both parts and reads a picture. Adapters change the logits as if they
were merged.

    PYTHONPATH=tests python tests/data/llama_cpp/compare.py FOLDER              # all models
    PYTHONPATH=tests python tests/data/llama_cpp/compare.py FOLDER qwen3 phi3   # some models

Files also become folders for transformers: a file of safeload must give the tensors and logits of the model, a file
without its keys the logits. With LLAMA_CPP, a copy of llama.cpp's folder, that is a file of llama.cpp's own converter;
otherwise a file of safeload, which the suite compares with that.

Needs transformers, torch, tokenizers, sentencepiece, mistral-common and xllamacpp.
"""

import base64
import functools
import json
import os
import shutil
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from builders import adapters, llama_cpp, llama_models

import safeload
from safeload import gguf

HERE = Path(__file__).parent
# The greatest difference over the range of the logits. llama.cpp computes gelu from a table in f16.
F32, TABLE, BF16 = 1e-5, 1e-3, 3e-2
# Transformers' own two ways to compute gated delta nets, by token and by 64 tokens, differ by up to 2e-5 here.
DELTA_NET = 1e-4
# Architectures of which llama.cpp does not read the epsilon of norms: it computes with 0.
EPSILON = {"qwen2_vl": 2e-3, "qwen2_5_vl": 2e-3}
# llama.cpp cuts texts with combining marks otherwise, and with tiny_aya digits beside letters.
APPROXIMATE = ("gpt-4o", "tekken", "kimi-k2", "tiny_aya")
# Norms that follow a feed-forward network with small values enlarge the error of that table, and of bf16.
ENLARGED, ENLARGED_BF16, WITH_NORMS = 1e-2, 6e-2, ("gemma3_vision", "gemma4")


# Models of which a file without keys of safeload does not say the activation: "gelu_fast" comes back as "gelu".
ACTIVATION = ("gpt_neox_sequential",)
# Models of which llama.cpp stores matrices multiplied, which only f32 holds.
MULTIPLIED = ("falcon_h1",)


def as_llama_cpp_computes_phimoe(model):
    """Change norms and routers: llama.cpp does not subtract the mean, and chooses experts by softmax alone."""

    def norm(module, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight + module.bias

    def router(module, x):
        scores = torch.nn.functional.linear(x, module.weight)
        weights, chosen = scores.softmax(-1).topk(module.top_k, -1)
        return scores, weights / weights.sum(-1, keepdim=True), chosen

    for module in model.modules():
        own = {"LayerNorm": norm, "PhimoeTopKRouter": router}.get(type(module).__name__)
        if own is not None:
            module.forward = functools.partial(own, module)


def expected_logits(folder, ids, name, *, as_llama_cpp=True):
    name = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}.get(name, name)  # Microsoft's own class
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    if name == "Llama4ForConditionalGeneration":  # transformers 5.24 computes no text without images
        model = model.language_model
    model.eval()
    if model.config.model_type == "phimoe" and as_llama_cpp:
        as_llama_cpp_computes_phimoe(model)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def encoder(folder):
    """A function from a text to its tokens, and False if texts with special tokens are beyond it."""
    if (folder / "tokenizer.model").exists():
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        return lambda text: [model.bos_id(), *model.encode(text)], False
    if (folder / "tekken.json").exists():
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        tekken = Tekkenizer.from_file(folder / "tekken.json")
        return lambda text: tekken.encode(text, bos=True, eos=False), False
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids, True


def limit_of(name, config, dtype):
    enlarged = name.startswith(WITH_NORMS)
    if dtype == "bfloat16":
        return ENLARGED_BF16 if enlarged else BF16
    if enlarged or config["model_type"] == "bloom" or any("gelu" in str(value) for value in config.values()):
        return ENLARGED if enlarged else TABLE
    return EPSILON.get(name, DELTA_NET if "linear_num_key_heads" in config else F32)


def trained(row):
    """A tokenizer that cuts a text as a row of the table of pre-tokenizers says."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=row["ignore_merges"]))
    steps = {"type": "Sequence", "pretokenizers": row["pretokenizers"]}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "pre_tokenizer": steps}))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*llama_models.texts(), llama_models.pre_tokenizers()["probe_text"]], trainer)
    return tokenizer


def compare_cuts(row, folder):
    """Compare the tokens of texts with a tokenizer of these steps."""
    name, tokenizer = row["name"], trained(row)
    rows = tokenizer.get_vocab_size()
    entry = llama_models.listed()["qwen2"]
    embedding = {"model.embed_tokens.weight": [rows, entry["config"]["hidden_size"]]}
    entry = {**entry, "config": {**entry["config"], "vocab_size": rows}, "tensors": {**entry["tensors"], **embedding}}
    shutil.rmtree(folder / "cuts", ignore_errors=True)
    source = llama_models.write_folder(folder / "cuts", entry)
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    safeload.convert(source, folder / "cuts.gguf", overwrite=True)
    with llama_cpp.Model(folder / "cuts.gguf") as model:
        texts = [*llama_models.texts(), llama_models.pre_tokenizers()["probe_text"]]
        wrong = [text for text in texts if model.tokens(text, special=False) != tokenizer.encode(text).ids]
    print(f"cuts of {name}: {len(wrong)} of {len(texts)} texts differ")
    assert not wrong or name in APPROXIMATE, wrong


def compare_back(name, entry, source, ids, folder):
    """Compare a model with the folders for transformers that safeload makes of its GGUF files."""
    expected = expected_logits(source, ids, entry["config"]["architectures"][0], as_llama_cpp=False)
    own, foreign = (folder / f"{name}-{kind}.gguf" for kind in ("own", "foreign"))
    safeload.convert(source, own, dtype="float32" if name in MULTIPLIED else None)
    if "LLAMA_CPP" in os.environ:
        import make

        raw = len(make.MODELS[name]) > 4
        make.reference(os.environ["LLAMA_CPP"], source, foreign, make.OPTIONS.get(name, ()), raw=raw)
    else:
        safeload.convert(source, foreign, dtype="float32")
        with safeload.open(foreign) as file:
            metadata = {key: value for key, value in file.metadata.items() if not key.startswith("safeload.")}
            tensors = {key: np.array(array) for key, array in file.load().items()}
        gguf.save_file(tensors, foreign, metadata, overwrite=True)
    stored = {key.replace("language_model.", ""): array for key, array in safeload.load(source).items()}
    for path, limit in ((own, 0), (foreign, TABLE if name in ACTIVATION else F32)):
        safeload.convert(path, back := path.with_suffix(""))
        made = json.loads((back / "config.json").read_text())["architectures"][0]
        tensors = safeload.load(back)
        equal = [key for key, x in tensors.items() if key in stored and x.tobytes() == stored[key].tobytes()]
        difference = np.abs(expected_logits(back, ids, made, as_llama_cpp=False) - expected).max()
        difference /= expected.max() - expected.min()
        print(f"{back.name}: {made}, {len(equal)} of {len(tensors)} tensors equal, logits {difference:.1e}")
        assert difference <= limit, (back, difference)
        assert path is foreign or len(equal) == len(tensors) or "VLMoe" in entry["config"]["architectures"][0]


# Models with an adapter: rows permuted, experts stacked, [in, out], q, k and v joined.
ADAPTED = ("llama3", "qwen2", "mixtral", "qwen3_moe", "gemma2", "gpt2", "phi3")


def compare_adapter(name, entry, source, ids, folder):
    """Compare llama.cpp with an adapter to llama.cpp with the merged file."""
    adapter = adapters.of_model(folder / f"{name}-lora", entry)
    plain, merged, path = (folder / f"{name}-{end}.gguf" for end in ("float32", "merged", "adapter"))
    safeload.convert(adapter, path, base=source, overwrite=True)
    for weight in (1.0, 0.3):
        safeload.convert(source, merged, adapters=(adapter, weight), dtype="float32", overwrite=True)
        with llama_cpp.Model(merged) as model:
            expected = model.logits(ids)
        with llama_cpp.Model(plain) as model:
            changed, before = model.logits(ids, [(path, weight)]), model.logits(ids)
        scale = expected.max() - expected.min()
        difference, change = np.abs(changed - expected).max() / scale, np.abs(before - expected).max() / scale
        print(f"{name} with an adapter: {difference:.1e} of {change:.1e}")
        assert difference < TABLE < 0.1 < change, name


def compare(name, entry, folder):
    source = llama_models.write_folder(folder / name, entry)
    config = {**entry["config"], **entry["config"].get("text_config", {})}
    ids = [int(k) for k in np.random.default_rng(0).integers(0, config["vocab_size"], 80)]
    compare_back(name, entry, source, ids, folder)
    expected = expected_logits(source, ids, entry["config"]["architectures"][0])
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
        single = dtype == "float32" and "index_topk" not in config
        limit, value = limit_of(name, config, dtype), difference.max() if single else np.median(difference)
        print(f"{name} {dtype}: {value:.1e}")
        assert value < limit, (name, dtype, value)
    if name in ADAPTED:
        compare_adapter(name, entry, source, ids, folder)


# Models whose language model of a single layer llama.cpp runs, with a template for pictures.
TOWERS = ("qwen2_vl", "qwen2_5_vl", "gemma3")


def picture(width, height):
    """A colored PNG as a data URL."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((7 * x + 3 * y) % 256 for x in range(3 * width)) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def look(name, folder):
    """Let llama.cpp complete a text about a picture, with the tower in each type."""
    import xllamacpp

    source = llama_models.write_folder(folder / f"{name}-tower", llama_models.listed("vision.json")[name])
    safeload.convert(source, folder / f"{name}-text.gguf", dtype="float32")
    for options in ({"dtype": "float32"}, {"dtype": "float16"}, {"dtype": "bfloat16"}, {"quantize": "q8_0"}):
        safeload.convert(source, folder / f"{name}-mmproj.gguf", part="vision", overwrite=True, **options)
        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.mmproj.path = (
            str(folder / f"{name}-{part}.gguf") for part in ("text", "mmproj")
        )
        parameters.n_ctx, parameters.n_parallel, parameters.warmup, parameters.mmproj_use_gpu = 512, 1, False, False
        content = [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": picture(32, 32)}},
        ]
        request = {"max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        answer = xllamacpp.Server(parameters).handle_chat_completions(request)
        assert answer.get("choices"), (name, options, answer)
        print(f"{name} tower {options}: {answer['usage']['prompt_tokens']} tokens")


def main(place, *names):
    folder = Path(place)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    models = llama_models.listed()
    for row in () if names else llama_models.pre_tokenizers()["by_steps"]:
        compare_cuts(row, folder)
    for name in names or (name for name in models if not name.endswith("_model")):  # which has no head
        compare(name, models[name], folder)
    for name in () if names else TOWERS:
        look(name, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
