"""Reading ahead of the consumer: streams, staging buffers and ranges of many small tensors."""
