"""Checkpoints of torch.distributed.checkpoint: folders of files, each with chunks of tensors."""
