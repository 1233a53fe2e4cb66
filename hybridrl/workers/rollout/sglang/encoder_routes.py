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
_OK, _BAD_REQUEST, _UNAUTHORIZED = 200, 400, 401


def add_control_routes(arguments: Mapping[str, object]) -> None:
    """Let the encoder that this process is about to run answer the calls of ``server.py``.

    They need its key, which SGLang's own routes of an encoder do not ask for.
    """
    http = import_module(_ENCODER)
    info = {**arguments, "version": import_module("sglang").__version__}

    async def respond(request: Any) -> Any:  # noqa: ANN401 - FastAPI's
        if request.headers.get("authorization") != f"Bearer {arguments['api_key']}":
            return http.Response(status_code=_UNAUTHORIZED)
        said, status = info if request.url.path == _INFO else {"success": True}, _OK
        try:
            if request.url.path == _LOADS:
                said = {"loads": [await _sign_of_life(http)]}
            if request.url.path == _LOAD:
                await _load(http.encoder, Path((await request.json())["model_path"]))
        except Exception as error:  # of any type: the caller raises it
            said, status = {"message": f"{type(error).__name__}: {error}"}, _BAD_REQUEST
        return http.Response(to_json_text(said), status_code=status, media_type="application/json")

    for path in (_INFO, _LOADS, _LOAD, *_NOTHING_TO_DO):
        http.app.router.add_route(path, respond, methods=["GET", "POST"])


async def _sign_of_life(http: Any) -> Mapping[str, object]:  # noqa: ANN401 - SGLang's module
    """Encode an image, unless others are being encoded, and return the time."""
    health = await http.health_generate()
    if health.status_code != _OK:
        raise RuntimeError("it cannot encode an image; see its log")
    return {"timestamp": time.time()}


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
