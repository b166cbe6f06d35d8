"""An environment behind an OpenEnv server, as a game.

    pip install openenv
    python examples/openenv_server.py                # or any other server, in a terminal of its own
    python examples/openenv_client.py HuggingFaceTB/SmolLM2-135M-Instruct

A recipe names the class: `environment: examples/openenv_client.py:Remote`. `TEXT` is the field of actions and of
observations that holds their text.

A session of OpenEnv lives as long as its connection, but the state of an episode travels between processes. So each
turn opens a session, resets it by the episode's seed, and takes all actions again: what the server answers has to
depend on them alone. It needs a session for each of the `run.grading_workers`, two by default (`max_concurrent_envs`).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from openenv.core import GenericEnvClient

import flatpeak

URL = os.environ.get("OPENENV_URL", "http://localhost:8000")
TEXT = "message"


class Remote:
    def reset(self, seed: int) -> str:
        self.seed, self.actions = seed % 2**31, list[str]()
        return str(self._play().observation[TEXT])

    def step(self, action: str) -> tuple[str, float | None, bool]:
        self.actions.append(action)
        result = self._play()
        return str(result.observation[TEXT]), result.reward, result.done

    def _play(self) -> Any:
        """The result of the reset or of the last action, in a session of its own."""
        with GenericEnvClient(base_url=URL).sync() as session:
            result = session.reset(seed=self.seed)
            for action in self.actions:
                result = session.step({TEXT: action})
            return result


def main() -> None:
    settings = {
        "prompt": {"template": "chat"},
        "rewards": {"score": {"type": "environment"}},
        "evaluation": {"accuracy": None, "metric": "reward"},
        "episodes": {"max_tokens": 32},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 256},
        "training": {"steps": 2},
    }
    result = flatpeak.train(
        "flatpeak:algorithms/grpo",
        model=sys.argv[1],
        dataset=[f"Game {number}" for number in range(100)],  # reset replaces these questions
        environment=f"{__file__}:Remote",
        settings=settings,
    )
    for turn in result.rollouts(step=2)["turns"][0]:
        print(f"{turn['text']!r} -> {turn['answer']!r}")


if __name__ == "__main__":
    main()
