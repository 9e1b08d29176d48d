"""The GGUF format of ggml and llama.cpp."""
