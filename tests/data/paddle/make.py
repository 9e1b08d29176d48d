"""Let PaddlePaddle write the fixtures: python make.py FOLDER, with paddlepaddle and safetensors installed.

``parts<protocol>.pdparams`` comes from Paddle's own function with a limit of 64 bytes in place of 1 GiB.
"""

import inspect
import sys
from pathlib import Path

import numpy as np
import paddle
from paddle.framework import io, io_utils
from safetensors.numpy import save_file


def expected(state):
    """The arrays that Paddle gives; bfloat16 as its bits."""
    return {
        name: np.asarray(value) if isinstance(value, paddle.Tensor) else value
        for name, value in state.items()
        if isinstance(value, (paddle.Tensor, np.ndarray))
    }


def save(state, folder, name, protocol=4):
    paddle.save(state, str(folder / name), protocol=protocol)
    save_file(expected(paddle.load(str(folder / name), return_numpy=False)), folder / f"{name}.safetensors")


def main(folder):
    paddle.seed(1)
    layers = [paddle.nn.Linear(4, 3), paddle.nn.BatchNorm1D(3), paddle.nn.Linear(3, 16)]
    net = paddle.nn.Sequential(*layers)
    optimizer = paddle.optimizer.Adam(parameters=net.parameters())
    net(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    for protocol in (2, 3, 4):
        save(net.state_dict(), folder, f"net{protocol}.pdparams", protocol)
    save(optimizer.state_dict(), folder, "net.pdopt")
    save({name: value.astype("bfloat16") for name, value in net.state_dict().items()}, folder, "bf16.pdparams")
    source = inspect.getsource(io_utils._unpack_saved_dict)
    assert "2**30 - 1" in source
    space = dict(vars(io_utils))
    exec(source.replace("2**30 - 1", "64"), space)
    io._unpack_saved_dict = space["_unpack_saved_dict"]
    for protocol in (2, 3):
        save(net.state_dict(), folder, f"parts{protocol}.pdparams", protocol)


main(Path(sys.argv[1]))
