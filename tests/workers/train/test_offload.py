from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hybridrl.workers.train.export import write_hf_folder
from hybridrl.workers.train.offload import ParkedTensors, resident_bytes
from hybridrl.workers.train.protocol import WeightSpec
from tests.models import make_tiny_model


def test_views_share_one_storage_and_survive() -> None:
    whole = torch.arange(12.0)
    view = whole[3:9].view(2, 3)
    for cycle in range(3):
        assert resident_bytes([whole, view]) == 48
        parked = ParkedTensors([whole, view])
        assert resident_bytes([whole, view]) == 0
        parked.restore()
        assert whole.tolist() == [float(n) + cycle for n in range(12)]
        whole += 1
        assert view[0, 0] == 4.0 + cycle


def test_bits_that_are_no_number_come_back_too() -> None:
    pattern = torch.tensor([0x7FC00001, 0x7F800000, -1], dtype=torch.int32)
    tensor = pattern.clone().view(torch.float32)
    ParkedTensors([tensor, torch.zeros(0)]).restore()
    assert torch.equal(tensor.view(torch.int32), pattern)


@pytest.mark.gpu
def test_device_memory_is_given_back() -> None:
    tensor = torch.arange(2**24, device="cuda")
    expected = tensor.sum().item()
    before = torch.cuda.memory_allocated()
    parked = ParkedTensors([tensor])
    assert before - torch.cuda.memory_allocated() >= 2**27
    parked.restore()
    assert tensor.sum().item() == expected


def test_weights_are_cut_into_files_that_load_as_one(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", tie_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = [(name, p.detach()) for name, p in model.named_parameters()]
    specs = [WeightSpec(name, tuple(t.shape), t.nbytes) for name, t in weights]
    target = tmp_path / "target"
    write_hf_folder(
        target, iter(weights), specs=specs, model=model, source=source, max_file_bytes=20_000
    )
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        with safe_open(path, framework="pt") as stored:
            names = stored.keys()
            assert len(names) == 1 or path.stat().st_size < 20_000 + 2_000
    loaded = AutoModelForCausalLM.from_pretrained(target)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(weights)[name])
