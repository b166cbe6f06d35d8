"""A small OpenEnv server for examples/openenv_client.py: three messages about a word, and longer ones earn more.

pip install openenv
python examples/openenv_server.py
"""

from __future__ import annotations

import random
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Message(Action):
    message: str


class Answer(Observation):
    message: str


class Talk(Environment[Message, Answer, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Answer:
        self.word, self.steps = random.Random(seed).choice(["tea", "cake", "sea"]), 0
        return Answer(message=f"Tell me about {self.word}.")

    def step(self, action: Message, timeout_s: float | None = None, **_: Any) -> Answer:
        self.steps += 1
        reward = min(len(action.message), 100) / 100
        return Answer(message=f"And what else about {self.word}?", reward=reward, done=self.steps == 3)

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Talk, Message, Answer, max_concurrent_envs=4), port=8000)
