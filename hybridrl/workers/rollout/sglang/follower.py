"""SGLang on a further node of an engine: it computes, and the server on the first node answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from hybridrl.workers.rollout.sglang.arguments import ServerSpec, build_arguments, environment
from hybridrl.workers.rollout.sglang.process import free_port
from hybridrl.workers.rollout.sglang.server import start_child

_POLL_S = 0.2


def follow(spec: ServerSpec, *, variables: Mapping[str, str]) -> None:
    """Run the processes of this node as long as they live. Only an error ends it.

    SGLang opens a port of HTTP here, too, which answers health checks alone.

    Args:
        spec: of the engine, with the arguments of this node in ``rollout.engine_args``.
        variables: environment besides that of every server, for example visible devices.

    Raises:
        ServerDiedError: the processes are gone; with the end of their log.
    """
    arguments = build_arguments(
        spec, name="hybridrl-follower", port=free_port(), key=secrets.token_urlsafe()
    )
    process, file = start_child(arguments, variables={**environment(spec), **variables})
    try:
        while True:
            process.require_alive(f"node {spec.rollout.engine_args['node_rank']} of an engine")
            time.sleep(_POLL_S)
    finally:
        process.end()
        file.unlink(missing_ok=True)
