"""Make the fixtures of ONNX again, with onnx's own writer, and torch's exporter.

    pip install onnx==1.23.2 onnxscript torch==2.13.0 safetensors==0.8.0
    python make.py [FOLDER]

``<fixture>.safetensors`` holds what `onnx.numpy_helper.to_array` gives: elements of less than 8 bits in a byte each.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
SMALL = ("UINT4", "INT4", "FLOAT4E2M1", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2")
REFUSED = ("UNDEFINED", "STRING", "COMPLEX128")


def expect(name):
    """Write what onnx reads in a file's graph and in the graphs of its nodes."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        for attribute in node.attribute:
            for tensor in attribute.g.initializer:
                tensors[f"{node.name}.{attribute.name}.{tensor.name}"] = tensor
    arrays = {}
    for key, tensor in tensors.items():
        array = numpy_helper.to_array(tensor)
        kind = TensorProto.DataType.Name(tensor.data_type)
        if kind in SMALL:
            array = array.astype("i1") if kind in ("INT4", "INT2") else array.view("u1")
        arrays[key] = np.array(array)
    save_file(arrays, str(FOLDER / f"{name}.safetensors"))


def types():
    rng = np.random.default_rng(0)
    tensors = []
    for name, kind in TensorProto.DataType.items():
        if name in REFUSED:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        array = (rng.standard_normal((3, 4)) * 3).astype(np.int8 if name in SMALL[3:5] else np.float32).astype(dtype)
        if name == "BOOL":
            array = array.astype(np.float32) > 0
        tensors.append(helper.make_tensor(f"{name}.numbers", kind, (3, 4), array))
        raw = array if name in SMALL else array.tobytes()
        tensors.append(helper.make_tensor(f"{name}.raw", kind, (3, 4), raw, raw=True))
    odd = np.arange(7).astype(ml_dtypes.int4)
    tensors.append(helper.make_tensor("odd.raw", TensorProto.INT4, (7,), odd, raw=True))
    tensors.append(helper.make_tensor("wide", TensorProto.INT64, (3,), np.array([-1, 1 << 40, -(1 << 63)])))
    tensors.append(numpy_helper.from_array(np.array(2.5, np.float32), "scalar"))
    tensors.append(numpy_helper.from_array(np.zeros((0, 3), np.float32), "empty"))
    tensors.append(helper.make_tensor("empty.numbers", TensorProto.FLOAT, (0, 3), []))
    return tensors


def model_of(tensors, nodes=()):
    graph = helper.make_graph(list(nodes), "main", [], [], tensors, doc_string="a graph")
    model = helper.make_model(graph, producer_name="safeload tests", opset_imports=[helper.make_opsetid("", 21)])
    helper.set_model_props(model, {"license": "MIT"})
    return model


def nested():
    """Graphs in an If, and Constant nodes."""
    branches = []
    for k, name in enumerate(("then", "else")):
        tensor = numpy_helper.from_array(np.arange(4, dtype=np.float32) + k, "w")
        value = numpy_helper.from_array(np.arange(2) + k)
        node = helper.make_node("Constant", [], [f"{name}_c"], value=value)
        out = helper.make_tensor_value_info("w", TensorProto.FLOAT, (4,))
        branches.append(helper.make_graph([node], name, [], [out], [tensor]))
    branch = helper.make_node("If", ["x"], ["y"], name="choice", then_branch=branches[0], else_branch=branches[1])
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.arange(3.0)))
    return model_of([numpy_helper.from_array(np.ones((2, 2)), "a")], [branch, constant])


def exported():
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2, bias=False)
    module = torch.nn.Sequential(*layers).eval()
    torch.onnx.export(module, (torch.ones(1, 3),), FOLDER / "torch.onnx", dynamo=True, external_data=False)


def main():
    tensors = types()
    onnx.save(model_of(tensors), FOLDER / "types.onnx")
    onnx.save(nested(), FOLDER / "nested.onnx")
    for name, options in (("external", {"location": "external.data"}), ("files", {"all_tensors_to_one_file": False})):
        folder = FOLDER / name
        folder.mkdir(exist_ok=True)
        plain = [tensor for tensor in tensors if tensor.name in ("INT4.raw", "FLOAT.raw", "BFLOAT16.raw", "odd.raw")]
        onnx.save(
            model_of([*plain, tensors[0]]),
            folder / "model.onnx",
            save_as_external_data=True,
            size_threshold=0,
            **options,
        )
        expect(f"{name}/model")
    exported()
    for name in ("types", "nested", "torch"):
        expect(name)
    print(onnx.__version__)


if __name__ == "__main__":
    main()
