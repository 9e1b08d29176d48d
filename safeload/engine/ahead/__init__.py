"""Read ahead of the consumer: streams, staging buffers, and byte ranges of many small tensors."""
