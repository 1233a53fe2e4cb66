"""Sums as a taskset of verifiers 0.4: an environment of two turns, with rewards of its own."""

from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def has_digits(self, trace: vf.Trace) -> float:
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter in "0123456789" for letter in said) / max(len(said), 1)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(8):
            data = SumData(prompt=f"{number}+1", answer=str(number + 1))
            yield SumTask(data, self.config.task)


class InProcess(vf.Harness[vf.HarnessConfig]):
    """Asks for a turn without a program, which would start anew for each."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        chat = [{"role": "user", "content": data.prompt}]
        if not isinstance(data.prompt, str):
            chat = [{"role": m.role, "content": m.content} for m in data.prompt]
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                endpoint + "/chat/completions",
                json={"model": ctx.model, "messages": chat},
                headers={"Authorization": "Bearer " + secret},
            )
        return vf.ProgramResult(int(answer.is_error), "", answer.text)


class AsksTwiceConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class AsksTwice(vf.Env[AsksTwiceConfig]):
    async def run(self, task: SumTask, agents: Any) -> None:
        async with agents.agent.interaction(task) as chat:
            if not (await chat.turn()).terminated:
                await chat.turn("Sure?")


__all__ = ["AsksTwice", "InProcess", "Sums"]
