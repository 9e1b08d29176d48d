"""Models of transformers as files of llama.cpp, and back."""
