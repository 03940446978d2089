"""A layer of DeepSeek-V3's dims in FP8 blocks takes hardly more memory than its file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mla_core import MLAConfig
from mla_core.weight_places import places_of

ROOT = Path(__file__).parents[2]
ALLOWED = 1.15

# In a process of its own: what the load adds to its anonymous memory, the mapped file not counted.
SCRIPT = """
import json, sys
import torch
from safetensors import safe_open
from mla_core import MLA, MLAConfig

def anonymous() -> int:
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def load(name: str, **options: bool) -> MLA:
    config = MLAConfig(**json.load(open(f"{sys.argv[1]}/{name}.json")))
    layer = MLA(config, backend="vanilla", dtype=torch.bfloat16, **options)
    with safe_open(f"{sys.argv[1]}/{name}.safetensors", "pt") as file:
        layer.load_hf({name: file.get_tensor(name) for name in file.keys()})
    return layer

torch.set_num_threads(1)
keep = sys.argv[2] == "kept"
# What torch allocates once. A small layer: a large one would leave freed memory for the next to reuse.
load("small", keep_quantised=keep)
before = anonymous()
layer = load("large", keep_quantised=keep)
storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in [*layer.parameters(), *layer.buffers()]}
print(json.dumps({"held": sum(storages.values()), "grown": anonymous() - before}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attention of one DeepSeek-V3 layer, 178 MiB of random codes, and of a layer of a hundredth."""
    path = tmp_path_factory.mktemp("fp8")
    large = MLAConfig.preset("deepseek-v3")
    small = {"num_heads": 4, "hidden_size": 512, "q_lora_rank": 128}
    write(path, "large", large)
    write(path, "small", large.model_copy(update=small))
    return path


def write(folder: Path, name: str, config: MLAConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for tensor, place in places_of(config).items():
        if len(place.shape) == 1:
            tensors[tensor] = torch.ones(place.shape, dtype=torch.bfloat16)
            continue
        # Any positive code but NaN.
        codes = torch.randint(0, 127, place.shape, generator=generator, dtype=torch.uint8)
        blocks = [-(-size // 128) for size in place.shape]
        tensors[tensor] = codes.view(torch.float8_e4m3fn)
        tensors[f"{tensor}_scale_inv"] = 1e-4 * torch.rand(blocks, generator=generator)
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(config.model_dump_json(), encoding="utf-8")


def measure(folder: Path, mode: str) -> dict[str, float]:
    """Bytes held and grown, over the size of the file."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(folder), mode]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    size = (folder / "large.safetensors").stat().st_size
    return {name: count / size for name, count in json.loads(done.stdout).items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which is Linux's")
def test_a_deepseek_v3_layer_in_fp8_blocks_loads_in_little_more_than_its_file(folder):
    found = measure(folder, "kept")
    assert found["held"] <= ALLOWED, found
    assert found["grown"] <= ALLOWED, found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status, which is Linux's")
def test_a_second_copy_of_the_weights_would_be_seen(folder):
    found = measure(folder, "dequantised")
    assert found["held"] > 2, found
    assert found["grown"] > 2, found
