"""A game on a server of OpenEnv, with its package: ``python openenv_game.py PORT SESSIONS``."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class GuessNumber(Environment[Guess, Hint, State]):
    """Thinks of a number; -1 breaks it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number, self.num_steps = (seed or 0) % 10, 0
        return Hint(hint="I think of a digit.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self.num_steps += 1
        if action.number < 0:
            raise RuntimeError("the game is broken")
        if action.number == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


if __name__ == "__main__":
    app = create_app(GuessNumber, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
