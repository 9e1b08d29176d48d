"""llama.cpp as the wheel of xllamacpp holds it: the tokens of a text, and the logits of tokens."""

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path

import numpy as np

# Room for the structures of parameters, which are passed by value; they are larger than any version's.
_PARAMS = ctypes.c_uint8 * 1024
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_F32 = 0


class _Params(ctypes.Structure):
    _fields_ = (("bytes", _PARAMS),)


class _ContextHead(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_per_seq")
    ) + tuple(
        (name, ctypes.c_int32)
        for name in ("n_threads", "n_threads_batch", "ctx_type", "rope", "pooling", "attention", "flash_attention")
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


# Where the types of the cache stand in llama_context_params: after the head, eight 4-byte fields and two pointers.
_CACHE_TYPES = 56 + 8 * 4 + 2 * 8


def library():
    """The library, or None without xllamacpp."""
    found = importlib.util.find_spec("xllamacpp")
    if found is None:
        return None
    lib = ctypes.CDLL(str(next(Path(found.origin).parent.glob("xllamacpp*.so"))))
    for name, result, arguments in (
        ("llama_model_default_params", _Params, []),
        ("llama_context_default_params", _Params, []),
        ("llama_model_load_from_file", ctypes.c_void_p, [ctypes.c_char_p, _Params]),
        ("llama_init_from_model", ctypes.c_void_p, [ctypes.c_void_p, _Params]),
        ("llama_model_get_vocab", ctypes.c_void_p, [ctypes.c_void_p]),
        ("llama_vocab_n_tokens", ctypes.c_int32, [ctypes.c_void_p]),
        ("llama_batch_get_one", _Batch, [ctypes.c_void_p, ctypes.c_int32]),
        ("llama_decode", ctypes.c_int32, [ctypes.c_void_p, _Batch]),
        ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]),
        ("llama_adapter_lora_init", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        ("llama_set_adapters_lora", ctypes.c_int32, [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]),
        ("llama_free", None, [ctypes.c_void_p]),
        ("llama_model_free", None, [ctypes.c_void_p]),
        ("llama_log_set", None, [_QUIET, ctypes.c_void_p]),
        (
            "llama_tokenize",
            ctypes.c_int32,
            [
                ctypes.c_void_p,
                ctypes.c_char_p,
                ctypes.c_int32,
                ctypes.c_void_p,
                ctypes.c_int32,
                ctypes.c_bool,
                ctypes.c_bool,
            ],
        ),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_backend_init()
    return lib


class Model:
    """A file that llama.cpp has loaded."""

    def __init__(self, path):
        self.log = []
        self._lib = library()
        self._callback = _QUIET(lambda level, text, data: self.log.append(text))
        self._lib.llama_log_set(self._callback, None)
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(b"".join(self.log[-6:]).decode(errors="replace"))
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.size = self._lib.llama_vocab_n_tokens(self._vocab)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._lib.llama_model_free(self._model)
        self._lib.llama_log_set(_QUIET(0), None)

    def tokens(self, text, *, special=True):
        """The token ids of a text."""
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 16))()
        count = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, len(ids), special, True)
        assert count >= 0
        return list(ids[:count])

    def logits(self, ids, adapters=()):
        """The logits after each token, computed in f32 with a cache in f32; ``adapters``: files and their weights."""
        params = self._lib.llama_context_default_params()
        head = _ContextHead.from_buffer(params.bytes)
        assert (head.n_ctx, head.n_batch, head.n_ubatch) == (512, 2048, 512), "another version of llama.cpp"
        head.n_threads = head.n_threads_batch = 1
        head.flash_attention = 0
        kinds = (ctypes.c_int32 * 2).from_buffer(params.bytes, _CACHE_TYPES)
        assert list(kinds) == [1, 1], "another version of llama.cpp"
        kinds[:] = [_F32, _F32]
        context = self._lib.llama_init_from_model(self._model, params)
        assert context, b"".join(self.log[-6:]).decode(errors="replace")
        loaded = [self._lib.llama_adapter_lora_init(self._model, str(path).encode()) for path, _ in adapters]
        assert all(loaded), b"".join(self.log[-6:]).decode(errors="replace")
        pointers = (ctypes.c_void_p * len(loaded))(*loaded)
        weights = (ctypes.c_float * len(loaded))(*(weight for _, weight in adapters))
        assert self._lib.llama_set_adapters_lora(context, pointers, len(loaded), weights) == 0
        rows = []
        for token in ids:  # one by one: the batch asks for the logits of its last token only
            array = (ctypes.c_int32 * 1)(token)
            status = self._lib.llama_decode(context, self._lib.llama_batch_get_one(array, 1))
            assert status == 0
            rows.append(np.ctypeslib.as_array(self._lib.llama_get_logits(context), (self.size,)).copy())
        self._lib.llama_free(context)
        return np.stack(rows)
