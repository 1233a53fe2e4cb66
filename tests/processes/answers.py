"""A service for children: it loads a file of a user, and answers with what its function returns."""

from __future__ import annotations

from hybridrl.processes.child import Emit, Message, Service, declined_as, load_function


def load(path: str) -> tuple[Service, str]:
    with declined_as(0):
        function = load_function(path, "answer")

    def answer(message: Message, emit: Emit) -> None:
        emit(value=function(message["value"]))

    return answer, "loaded"
