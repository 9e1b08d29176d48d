"""What processes of `multiprocessing` run, which must be able to import it: they cannot import a module of tests."""

import numpy as np

import safeload


def sums(path):
    with safeload.open(path) as checkpoint:
        return {
            name: int(np.ascontiguousarray(array).view(np.uint8).sum()) if array.ndim else 0
            for name, array in checkpoint.stream()
        }
