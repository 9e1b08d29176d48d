"""ZeRO checkpoints of DeepSpeed: flat partitions of the weights, in a file for each process."""
