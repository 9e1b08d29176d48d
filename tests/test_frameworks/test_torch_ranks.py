"""Parts of a checkpoint for each rank of a torch mesh: equal to slices of the whole, and read once."""

import json
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from builders.http_server import Server
from builders.models import small, write_folder
from builders.paths import DATA
from builders.quantized import FIXTURES
from builders.thorough import THOROUGH, part_of
from builders.torch_ranks import run

import safeload
from safeload import gguf
from safeload.numpy import save_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available() or sys.platform == "win32", reason="needs gloo")

RANKS = (2, 3, 4, 8) if THOROUGH else (2, 3)
# A kind of each layout that is cut in its own way.
QUANTIZED = (
    *("gptq4_g32_asym", "gptq3_act_order", "awq4_gemm", "fp8_block", "ct_pack_w4_g32_sym", "ct_pack_w3_g32_asym"),
    *("mlx_affine3_g64", "bnb_nf4", "gpt_oss", "gguf_nvfp4", "ct_sparse", "bitnet_online"),
)

EQUAL = """
import json
sources = json.load(open(folder + "/sources.json"))
meshes = [(mesh, [[Shard(0)], [Shard(-1)], [Replicate()]])]
if ranks in (4, 8):
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    twice = [[Shard(0), Shard(0)], [Replicate(), Shard(-1)], [Shard(1), Replicate()], [Shard(0), Shard(1)]]
    meshes.append((square, [*twice, [Replicate(), Replicate()]]))
for number, (source, dtype) in enumerate(sources):
    whole = load_checkpoint(source, dtype=dtype)
    for own, choices in meshes:
        for k, placements in enumerate(choices):
            deepest = max([getattr(each, "dim", -1) for each in placements] + [0])
            everywhere = [Replicate()] * len(placements)
            chosen = {name: placements if x.ndim > deepest else everywhere for name, x in whole.items()}
            loaded = load_checkpoint(source, dtype=dtype, mesh=own, placements=chosen, broadcast=(k + number) % 2 == 1)
            assert list(loaded) == list(whole)
            for name, tensor in whole.items():
                divided(loaded[name], tensor, own, chosen[name])
"""


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_equal_those_that_torch_makes_of_the_whole(tmp_path, ranks):
    """Files of each kind, a folder and a URL, uneven and empty parts, with and without broadcasts."""
    rng = np.random.default_rng(ranks)
    plain = {
        "even": rng.standard_normal((8, 24)).astype(np.float32),
        "odd": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
        "few": rng.standard_normal((1, 3, 2)).astype(np.float16),
        "fp8": rng.standard_normal((6, 10)).astype(ml_dtypes.float8_e4m3fn),
        "integers": rng.integers(-9, 9, (7, 4), np.int64),
        "truth": rng.integers(0, 2, 9).astype(bool),
        "nothing": np.zeros((0, 4), np.float32),
        "number": np.float32(3),
    }
    save_file(plain, tmp_path / "plain.safetensors")
    tensor = torch.arange(60.0).reshape(6, 10)
    torch.save({"transposed": tensor.t(), "rows": tensor[1:4], "shared": tensor[1:4]}, tmp_path / "strided.pt")
    for scheme in ("q4_0", "q6_k"):
        weights = safeload.quantize(rng.standard_normal((6, 768)).astype(np.float32), scheme)
        gguf.save_file(
            {"w": weights, "stack": safeload.quantize(np.ones((3, 2, 256), np.float32), scheme)},
            tmp_path / f"{scheme}.gguf",
        )
    matrix = rng.standard_normal((6, 10)).astype(np.float32)
    by_axis = {str(axis): safeload.quantize(matrix, "int8", axis=axis) for axis in (None, 0, 1)}
    safeload.save(by_axis, tmp_path / "int8.safetensors")
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", *small("llama-gqa"))
    names = FIXTURES if THOROUGH else part_of(QUANTIZED, ranks, 2)
    readable = [str(FIXTURES[name].folder) for name in names if _has_values(FIXTURES[name].folder)]
    with Server(tmp_path) as server:
        sources = [
            (str(tmp_path / "plain.safetensors"), None),
            (str(tmp_path / "plain.safetensors"), "float16"),
            (str(tmp_path / "strided.pt"), None),
            (str(tmp_path / "q4_0.gguf"), "bfloat16"),
            (str(tmp_path / "q6_k.gguf"), "float32"),
            (str(tmp_path / "int8.safetensors"), "bfloat16"),
            (str(tmp_path / "model"), "float32"),
            (str(DATA / "dcp" / "plain_4"), None),
            (f"{server.url()}/plain.safetensors", None),
            (f"{server.url()}/q4_0.gguf", "float32"),
            *((folder, "float32") for folder in readable),
        ]
        (tmp_path / "sources.json").write_text(json.dumps(sources))
        run(EQUAL, tmp_path, ranks)


def _has_values(folder):
    try:
        safeload.load(folder, dtype="float32")
    except safeload.UnsupportedError:
        return False
    return True


PLANNED = """
def halves(whole, dim, sizes):
    parts = torch.split(whole, sizes, dim)
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)

def planned(model, *, local=False, placements="tp", **expected):
    whole = load_checkpoint(folder + "/" + model)
    loaded = load_checkpoint(folder + "/" + model, mesh=mesh, placements=placements, local=local)
    kinds = {}
    for name, tensor in whole.items():
        end = next((end for end in expected if end in name), None)
        dim, *sizes = expected.get(end, (None,))
        if local:
            assert type(loaded[name]) is torch.Tensor
            same(loaded[name], tensor if dim is None else halves(tensor, dim, sizes or [tensor.shape[dim]]))
        else:
            divided(loaded[name], tensor, mesh, [Replicate() if dim is None else Shard(dim)])
        kinds[end] = kinds.get(end, 0) + 1
    assert kinds.keys() >= expected.keys(), (kinds, expected)

rows, columns = (0,), (1,)
dense = dict(q_proj=rows, k_proj=rows, v_proj=rows, o_proj=columns, gate_proj=rows, up_proj=rows, down_proj=columns)
planned("llama-gqa", lm_head=rows, **dense)
planned("llama-gqa", placements={"*.[kv]_proj.weight": Replicate(), "*": "tp"}, lm_head=rows,
        **{end: dim for end, dim in dense.items() if end not in ("k_proj", "v_proj")})
biases = {"o_proj.bias": (None,), "down_proj.bias": (None,)}
planned("llama-bias", lm_head=rows, **biases, **dense)
joined = dict(qkv_proj=(0, 64, 32, 32), gate_up_proj=(0, 128, 128))
planned("phi3", local=True, lm_head=rows, o_proj=columns, down_proj=columns, **joined)
experts = {"w1": rows, "w2": columns, "w3": rows}
planned("mixtral", lm_head=rows, **{end: dense[end] for end in ("q_proj", "k_proj", "v_proj", "o_proj")}, **experts)
planned("fused", local=True, lm_head=rows, gate_up_proj=(1, 32, 32), down_proj=(2,),
        **{end: dense[end] for end in ("q_proj", "k_proj", "v_proj", "o_proj")})

own = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
whole = load_checkpoint(folder + "/llama-gqa")
name = "model.layers.0.mlp.down_proj.weight"
loaded = load_checkpoint(folder + "/llama-gqa", mesh=own, placements="tp", names=[name])
divided(loaded[name], whole[name], own, [Replicate(), Shard(1)])
layer = "tensor 'model.layers.0."
for model, text in (
    ("phi3", f"{layer}mlp.gate_up_proj.weight' [256, 64], placements 'tp', mesh [2]: its parts are cut"),
    ("few", f"{layer}self_attn.k_proj.weight' [16, 64], placements 'tp', mesh [2]: 1 head cannot be divided"),
    ("odd", f"{layer}self_attn.k_proj.weight' [32, 64], placements 'tp', mesh [2]: by the config, axis 0 is 3 equal"),
    ("none", "by the config, axis 0 is 0 equal parts, which do not divide 32"),
    ("gpt2", "family gpt2 has no plan"),
    ("plain.safetensors", "no config.json of a known family"),
):
    try:
        load_checkpoint(folder + "/" + model, mesh=mesh, placements="tp")
    except (safeload.UnsupportedError, ValueError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""


def test_plan_of_a_family_cuts_heads_and_halves(tmp_path):
    """Matrices that hold several are cut one by one, in whole heads; a bias is divided with the rows of its matrix."""
    models = {kind: small(kind) for kind in ("llama-gqa", "llama-bias", "phi3", "mixtral", "qwen3_moe", "gpt2")}
    config, tensors = models["llama-gqa"]
    models["few"] = (
        {**config, "num_key_value_heads": 1},
        {name: x[:16] if name.endswith(("k_proj.weight", "v_proj.weight")) else x for name, x in tensors.items()},
    )
    models["odd"], models["none"] = (({**config, "num_key_value_heads": count}, tensors) for count in (3, 0))
    config, tensors = models.pop("qwen3_moe")
    fused = {name: x for name, x in tensors.items() if ".mlp.experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        each = [
            [tensors[f"model.layers.{layer}.mlp.experts.{k}.{part}_proj.weight"] for k in range(config["num_experts"])]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(np.stack, each)
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    models["fused"] = config, fused
    for kind, (config, tensors) in models.items():
        (tmp_path / kind).mkdir()
        write_folder(tmp_path / kind, config, tensors, shards=1)
    save_file(tensors, tmp_path / "plain.safetensors")
    run(PLANNED, tmp_path, 2)


COUNTED = """
import json
SLACK = 40 << 10  # header, config, and reading the count
for source, stored, dtype in json.load(open(folder + "/sources.json")):
    for dim in (0, 1):
        for _ in range(2):  # no module is imported while bytes are counted
            before = read()
            loaded = load_checkpoint(source, mesh=mesh, dtype=dtype, placements={"*": Shard(dim)}, local=True)
            count = read() - before
        assert stored / ranks - SLACK <= count <= stored / ranks + stored / 20 + SLACK, (source, dim, count, stored)
for _ in range(2):
    before = read()
    load_checkpoint(folder + "/plain.safetensors", mesh=mesh, dtype="float16", broadcast=True)
    count = read() - before
assert (count < SLACK) == (rank > 0), count
whole = load_checkpoint(folder + "/plain.safetensors")
loaded = load_checkpoint(folder + "/plain.safetensors", mesh=mesh, broadcast=True, local=True)
same(loaded["w"], whole["w"])
places = load_checkpoint(folder + "/plain.safetensors", mesh=mesh, placements={"w": Shard(1)}, device="meta")["w"]
assert places.to_local().is_meta and places.to_local().shape == (128, 10240)
seen = []
report = lambda *sizes: seen.append(sizes)
load_checkpoint(folder + "/plain.safetensors", mesh=mesh, placements={"w": Shard(1)}, progress=report)
assert seen[-1] == (128 * 10240 * 4,) * 2
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs /proc")
def test_each_rank_reads_its_own_bytes_and_with_broadcast_one_rank_reads(tmp_path):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((128, 20480)).astype(np.float32)  # gaps of up to 4 KiB in a row are read, too
    save_file({"w": weights}, tmp_path / "plain.safetensors")
    sources = [(str(tmp_path / "plain.safetensors"), weights.nbytes, None)]
    for scheme in ("q4_k", "int8"):
        quantized = safeload.quantize(weights, scheme)
        path = tmp_path / (f"{scheme}.gguf" if scheme == "q4_k" else f"{scheme}.safetensors")
        (gguf.save_file if scheme == "q4_k" else safeload.save)({"w": quantized}, path)
        sources.append((str(path), quantized.nbytes, "float32"))
    (tmp_path / "model").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    write_folder(tmp_path / "model", config, {"model.layers.0.mlp.up_proj.weight": weights}, shards=1)
    for scheme in ("w4a16", "w4a16_asym", "fp8_block"):
        safeload.convert(tmp_path / "model", tmp_path / scheme, quantize=scheme)
        stored = safeload.open(tmp_path / scheme).nbytes
        sources.append((str(tmp_path / scheme), stored, "float32"))
    (tmp_path / "sources.json").write_text(json.dumps(sources))
    run(COUNTED, tmp_path, 2)


REFUSED = """
from torch.distributed.tensor.placement_types import _StridedShard
name = "model.layers.0.mlp.up_proj.weight"
about = f"tensor {name!r} [128, 64], placements "
one = {"names": [name]}
for placement, kind, text in (
    (Shard(2), ValueError, f"{about}Shard(dim=2), mesh [2]: dim 2 is out of range for 2 dimensions"),
    (Shard(-3), ValueError, "dim -3 is out of range"),
    ([Shard(0)] * 2, ValueError, "expected 1 placement, one for each dimension of the mesh, got 2"),
    (Partial(), TypeError, f"{about}Partial(sum), mesh [2]: Partial is not supported"),
    (_StridedShard(0, split_factor=2), TypeError, "_StridedShard is not supported"),
    (0, TypeError, "int is not supported"),
    ("ep", ValueError, "unknown plan"),
):
    refused(kind, text, placements={name: placement}, **one)
refused(TypeError, "placements must map name patterns", placements=[Shard(0)])
refused(TypeError, "placements must map name patterns", placements={0: Shard(0)})
refused(safeload.errors.NoMatchError, "placements='*.nothing' matches none", placements={"*.nothing": Shard(0)})
square = init_device_mesh("cpu", (1, ranks))
for options, kind, text in (
    (dict(mesh=square, placements={name: Shard(0)}), ValueError, "mesh [1, 2]: expected 2 placements"),
    (dict(mesh=square, placements={name: "tp"}), ValueError, 'needs one with the name "tp"'),
    (dict(mesh=ranks), TypeError, "mesh must be a torch.distributed.device_mesh.DeviceMesh, got int"),
    (dict(placements="tp"), ValueError, "need mesh="),
):
    try:
        load_checkpoint(folder + "/model", **options, **one)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)

# Only one rank has a damaged file, or other arguments: all raise, and go on together.
own = folder + ("/model" if rank == 0 else "/damaged")
for broadcast in (False, True):
    for path, kind, text in (
        (own, safeload.FormatError if rank else safeload.SafeloadError, "damaged" if rank else "rank 1: FormatError: "),
        (folder + f"/model{'' if rank else 's'}", safeload.SafeloadError if rank else FileNotFoundError, "models"),
    ):
        try:
            load_checkpoint(path, mesh=mesh, placements={name: Shard(0)}, broadcast=broadcast)
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
differing = {name: Shard(rank)}
refused(safeload.SafeloadError, "opened different tensors, or passed different arguments", placements=differing)
whole, loaded = (load_checkpoint(folder + "/model", **options) for options in ({}, dict(mesh=mesh, placements="tp")))
divided(loaded[name], whole[name], mesh, [Shard(0)])
"""


def test_errors_name_the_tensor_and_reach_every_rank(tmp_path):
    for name in ("model", "damaged"):
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name, *small("llama-gqa"))
    shard = tmp_path / "damaged" / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    run(REFUSED, tmp_path, 2)
