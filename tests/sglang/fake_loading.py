"""SGLang's own model classes without memory, and what they make of the weights that are streamed.

``python -m tests.sglang.fake_loading CASES.json RESULTS.json``: for each case a model is built from
its config.json on the meta device, and gets all tensors in buckets as a server does. Each copy into
a parameter is seen. So a name that SGLang skips without a word is found, too. Afterwards bodies of
requests are compared with SGLang's own types. One process for all, which has imported SGLang.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl.models.load import DTYPES
from hybridrl.workers.rollout.buckets import Bucket, lay_out
from hybridrl.workers.rollout.sglang.arguments import build_arguments
from hybridrl.workers.rollout.sglang.child import load_server_args
from hybridrl.workers.rollout.sglang.process import free_port
from hybridrl.workers.sharding.weight_stream import buckets
from tests.sglang.engines import server_spec

META = torch.device("meta")
_VOCABULARY = 64


class SeenCopies(TorchDispatchMode):
    """Sees each copy: which bytes of the source, and which numbers of which parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[tuple[int, int]] = Counter()
        """Bytes by storage and first byte of a source."""

        self.written: Counter[int] = Counter()
        """Numbers by storage of a parameter."""

        self.unlike: list[str] = []
        """Copies that change a shape, or lose digits: a router in float32 takes bfloat16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.cat.default:  # DeepSeek's compressing matrices become one
            for source in args[0]:
                self._note(source)
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._see(args[0], args[1])
        return args[0]

    def _see(self, target: Tensor, source: Tensor) -> None:
        keeps_digits = torch.promote_types(target.dtype, source.dtype) == target.dtype
        if target.shape != source.shape or not keeps_digits:
            self.unlike.append(
                f"{list(source.shape)} {source.dtype} to {list(target.shape)} {target.dtype}"
            )
        self._note(source)
        self.written[_storage_of(target)] += target.numel()

    def _note(self, source: Tensor) -> None:
        begin = int(source.storage_offset()) * source.itemsize
        self.read[_storage_of(source), begin] += source.nbytes

    def bytes_from(self, storage: int, begin: int, end: int) -> int:
        return sum(
            num_bytes
            for (each, first), num_bytes in self.read.items()
            if each == storage and begin <= first < end
        )


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Server:
    def __init__(self, folder: Path) -> None:
        spec = server_spec(folder, dtype="bfloat16")
        record = load_server_args()(
            **build_arguments(spec, name="names", port=free_port(), key="names")
        )
        record.resolve_once()
        context = import_module("sglang.srt.runtime_context")
        ranks = context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        context.publish(record, role="scheduler", ranks=ranks)
        import_module("sglang.srt.distributed.bootstrap")._init_parallel_groups(
            backend="gloo",
            dist_init_method=f"tcp://127.0.0.1:{free_port()}",
            server_args=record,
            gpu_id=0,
        )
        # After SGLang's launcher, as in a server; handles need bytes, which no tensor here has.
        transports: Any = import_module("hybridrl.workers.rollout.sglang.transports")
        transports.serialized = lambda payload: payload
        self._encode = transports.encode

    def model(self, folder: Path, dtype: torch.dtype) -> nn.Module:
        config = import_module("sglang.srt.configs.model_config").ModelConfig
        loader = import_module("sglang.srt.model_loader.loader")
        load_config = import_module("sglang.srt.configs.load_config").LoadConfig
        arguments = build_arguments(server_spec(folder), name="names", port=free_port(), key="")
        settings = config(
            str(folder),
            dtype=str(dtype).removeprefix("torch."),
            model_override_args=arguments.get("json_model_override_args", "{}"),
        )
        assert settings.dtype == dtype
        for size in ("linear_num_key_heads", "linear_num_value_heads"):  # what a rank on a CPU has
            if (heads := getattr(settings.hf_config, size, None)) is not None:
                setattr(settings.hf_config, f"{size}_cpu", heads)
        with loader.set_default_torch_dtype(dtype), META:
            model: nn.Module = loader._initialize_model(settings, load_config(), None)
        return model

    def load(self, model: nn.Module, bucket: Bucket, dtype: torch.dtype) -> Iterator[str]:
        """Let the model have a bucket; yield the faults of its tensors."""
        spans = lay_out(bucket, dtype=dtype)
        flat = torch.empty(spans[-1].end, dtype=torch.uint8, device=META)
        payload = self._encode(flat, spans)
        updater = import_module(
            "sglang.srt.model_executor.model_runner_components.weight_updater"
        ).WeightUpdater
        with SeenCopies() as self.seen:
            updater._update_weights_from_flattened_bucket(
                SimpleNamespace(get_model=lambda: model), payload
            )
        for span in spans:
            copied = self.seen.bytes_from(_storage_of(flat), span.begin, span.end)
            if copied != span.end - span.begin:
                yield f"{span.name}: {copied} of {span.end - span.begin} bytes were loaded"
        yield from self.seen.unlike


def loaded(server: Server, case: Mapping[str, Any]) -> list[str]:
    dtype = DTYPES[case["dtype"]]
    model = server.model(Path(case["folder"]), dtype)
    sent = DTYPES[case.get("sent", case["dtype"])]
    weights = [
        (name, torch.empty(shape, dtype=sent, device=META)) for name, shape in case["weights"]
    ]
    faults: list[str] = []
    written: Counter[int] = Counter()
    for bucket in buckets(weights, bucket_bytes=case["bucket_bytes"]):
        try:
            faults += server.load(model, bucket, sent)
        except Exception as error:  # of any type, from SGLang's loaders
            return [*faults, f"{type(error).__name__}: {error}"]
        written += server.seen.written
    return faults + [
        f"{name}: {written[_storage_of(parameter)]} of {parameter.numel()} numbers were written"
        for name, parameter in model.named_parameters()
        if written[_storage_of(parameter)] != parameter.numel()
    ]


def refused(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[list[str]]:
    """Return what SGLang's routes refuse or ignore of each body that is sent to them."""
    app = import_module("sglang.srt.entrypoints.http_server").app
    routes = {route.path: route for route in app.routes if "POST" in getattr(route, "methods", ())}
    return [list(_faults(routes.get(path.partition("?")[0]), path, body)) for path, body in calls]


def _faults(route: Any, path: str, body: Mapping[str, Any]) -> Iterator[str]:
    if route is None:
        yield f"{path}: there is no such route"
    elif route.body_field is not None:
        yield from _unlike(route.body_field, body)
    elif body:
        yield f"{path}: takes no body"


def _unlike(field: Any, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a route refuses, and names that it would ignore."""
    _, errors = field.validate(body, {}, loc=("body",))
    for error in errors if isinstance(errors, list) else [errors] if errors else []:
        yield f"{error['loc']}: {error['msg']}"
    for name in body.keys() - _names(field.field_info.annotation):
        yield f"{name} would be ignored"
    parameters = body.get("sampling_params", [])
    build = import_module("sglang.srt.sampling.sampling_params").SamplingParams
    for each in parameters if isinstance(parameters, list) else [parameters]:
        try:
            build(**each).verify(_VOCABULARY)
        except (TypeError, ValueError) as error:
            yield f"sampling_params: {error}"


def _names(kind: Any) -> set[str]:
    """Return the names of the fields of SGLang's type, or of one that may be left out."""
    kinds = [each for each in get_args(kind) if each is not type(None)] or [kind]
    (only,) = kinds
    if hasattr(only, "__struct_fields__"):
        return set(only.__struct_fields__)
    return {field.name for field in fields(only)}


def main(cases_file: Path, results_file: Path) -> None:
    logging.disable(logging.WARNING)  # of SGLang, for each name that it skips
    asked = json.loads(cases_file.read_text())
    server = Server(Path(asked["cases"][0]["folder"]))
    faults = [loaded(server, case) for case in asked["cases"]]
    results_file.write_text(json.dumps({"faults": faults, "refused": refused(asked["calls"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
