from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl import env
from hybridrl.models import onednn
from hybridrl.models.load import build_empty_model
from hybridrl.models.logprobs import token_logprobs
from hybridrl.models.packed_model import PolicyModel
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
PRODUCT = "mkldnn._linear_pointwise.default"


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_FEWEST_PRODUCTS", 1)
    yield


def run(layer: nn.Module, inputs: Tensor) -> tuple[list[Tensor], list[str]]:
    inputs = inputs.clone().requires_grad_()
    with Recorder() as recorder:
        outputs = layer(inputs)
        outputs.square().sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    return [outputs.detach(), inputs.grad, *grads], recorder.names


@pytest.mark.usefixtures("always_faster")
@pytest.mark.parametrize("bias", [True, False])
def test_layer_uses_onednn_in_all_three_products(bias: bool) -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(24, 40, bias=bias), torch.randn(2, 9, 24)
    expected, before = run(layer, inputs)
    layer.zero_grad()
    onednn.use_onednn(layer)
    found, names = run(layer, inputs)
    assert (before.count(PRODUCT), names.count(PRODUCT)) == (0, 3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("always_faster")
def test_frozen_weights_get_no_gradient_and_no_product() -> None:
    layer = nn.Linear(24, 40).requires_grad_(requires_grad=False)
    onednn.use_onednn(layer)
    _, names = run(layer, torch.randn(9, 24))
    assert names.count(PRODUCT) == 2


def test_other_types_no_rows_and_small_products_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    with Recorder() as recorder:
        onednn.linear(torch.randn(4, 6), torch.randn(8, 6))
        onednn.linear(torch.randn(128, 128), torch.randn(128, 128))
    assert recorder.names.count(PRODUCT) == 1
    monkeypatch.setattr(onednn, "_FEWEST_PRODUCTS", 1)
    weight = torch.randn(8, 6, dtype=torch.bfloat16)
    with Recorder() as recorder:
        onednn.linear(torch.randn(3, 6, dtype=torch.bfloat16), weight)
        assert onednn.linear(torch.randn(0, 6), weight.float()).shape == (0, 8)
    assert PRODUCT not in recorder.names


@pytest.mark.usefixtures("always_faster")
def test_a_model_that_trains_and_its_scores_multiply_by_it(tmp_path: Path) -> None:
    hf = build_empty_model(make_tiny_model(tmp_path), dtype=torch.float32)
    policy = PolicyModel(hf, chunk_tokens=8)
    layers = [module for module in policy.modules() if isinstance(module, nn.Linear)]
    assert {type(layer) for layer in layers} == {onednn.OneDNNLinear}
    hidden = torch.randn(6, 16, requires_grad=True)
    weight = torch.randn(32, 16, requires_grad=True)
    with Recorder() as recorder:
        logprobs, _ = token_logprobs(
            hidden, weight, torch.arange(6), temperature=1.0, chunk_tokens=8
        )
        logprobs.sum().backward()
    assert recorder.names.count(PRODUCT) == 4  # the backward pass computes the logits again


_PROGRAM = """
import os
import torch
from pathlib import Path
from hybridrl.models import onednn

def resident_mib():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20

onednn.is_faster = lambda: True  # on every processor
model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
onednn.use_onednn(model)
assert type(model[0]) is onednn.OneDNNLinear
for number in range(300):
    if number == 30:
        before = resident_mib()
    model(torch.ones(200 + number, 256))
print(resident_mib() - before)
"""


def test_many_sizes_of_a_matrix_leave_little_in_memory() -> None:
    inherited = {
        name: value for name, value in env.everything().items() if not name.endswith("_CAPACITY")
    }  # tests/conftest.py sets the bounds for the tests themselves
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={
            **inherited,
            **env.process_environment(num_threads=1),
            "PYTHONPATH": env.python_path(),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 14 MiB; 186 without the bounds, 125 or 186 with one of the two alone.
    assert float(done.stdout) < 50
