"""What llama.cpp's files say of a model: metadata, tokenizer, layouts."""
