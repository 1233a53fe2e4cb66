"""Control calls to SGLang's encoder server, which by itself answers requests for embeddings alone.

Nothing of it is paused or aborted: a request for embeddings ends with that of the server that asked
for them. Written for 0.5.23.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridrl.json_text import to_json_text

_ENCODER = "sglang.srt.disaggregation.encoder.http_server"
_INFO, _LOADS, _LOAD = "/server_info", "/v1/loads", "/update_weights_from_disk"
_NOTHING_TO_DO = (
    *("/abort_request", "/flush_cache", "/pause_generation", "/continue_generation"),
    "/update_weight_version",
)
_OK, _BAD_REQUEST, _UNAVAILABLE = 200, 400, 503


def add_control_calls(arguments: Mapping[str, object]) -> None:
    """Let the encoder that this process is about to run answer the calls of ``server.py``.

    They need its key. Others, who have none, are refused until it has weights.
    """
    http = import_module(_ENCODER)
    info = {**arguments, "version": import_module("sglang").__version__}
    has_weights = False

    @http.app.middleware("http")  # type: ignore[untyped-decorator]
    async def respond(request: Any, go_on: Any) -> Any:  # noqa: ANN401 - FastAPI's
        nonlocal has_weights
        path, status, said = request.url.path, _OK, dict[str, object](success=True)
        if request.headers.get("authorization") != f"Bearer {arguments['api_key']}":
            return await go_on(request) if has_weights else http.Response(status_code=_UNAVAILABLE)
        if path in (_INFO, _LOADS) and (await http.health_generate()).status_code != _OK:
            return http.Response("it cannot encode an image; see its log", status_code=500)
        try:
            if path in (_INFO, _LOADS):
                said = info | {"loads": [{"timestamp": time.monotonic()}]}
            elif path == _LOAD:
                has_weights = False
                await _load(http.encoder, Path((await request.json())["model_path"]))
                has_weights = True
            elif path not in _NOTHING_TO_DO:
                return await go_on(request)
        except Exception as error:  # of any type: the caller raises it
            said, status = {"message": f"{type(error).__name__}: {error}"}, _BAD_REQUEST
        return http.Response(to_json_text(said), status_code=status, media_type="application/json")


async def _load(encoder: Any, folder: Path) -> None:  # noqa: ANN401 - SGLang's
    """Load the tower from files, all of it, and forget embeddings that another tower made."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = dict(encoder.model.named_parameters())
    async with encoder.encode_dispatch_lock:
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.fill_(torch.nan)  # SGLang drops weights whose names it does not know
            encoder.model.load_weights(pair for f in files for pair in load_file(f).items())
        encoder.mm_cache.clear()
    if missing := [name for name, t in tensors.items() if not bool(t.isfinite().all())]:
        raise ValueError(f"no file of {folder} has {', '.join(missing)}")
