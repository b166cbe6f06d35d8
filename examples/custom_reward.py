"""Custom rewards: the three signatures of reward functions, and how several rewards are combined.

Run it to see them score a few answers, without a model:

    python examples/custom_reward.py

In a recipe, name the function by its file (or module):

    rewards:
      correctness: {type: number, extraction: answer_tag}
      concise: {type: function, function: examples/custom_reward.py:concise, weight: 0.2, arguments: {words: 20}}

In Python, pass the functions themselves:

    flatpeak.train(config, reward={"close": closeness, "concise": (concise, 0.2)})

A run calls functions of one completion or one group in separate processes, which protects the run: a call that hangs
for 2 s (`timeout` in the recipe), or ends its process, only loses the score of its completion or group. State that such
a function keeps between calls belongs to its process. Other functions are called in the run's process, where a hanging
call hangs the run: functions of all completions, async functions, functions of the main script, and functions with an
attribute `by_group = False`. In a recipe, `timeout: 60` gives functions of all completions and async functions a
process too; if a call exceeds it, all completions of the step lose their scores.
"""

from __future__ import annotations

from typing import Any

from flatpeak.rewards.numeric_answer import extract_answer, parse_number
from flatpeak.rewards.reward_set import as_reward
from flatpeak.types import Completion, Example, Group, Prompt


def closeness(completion: str, gold: str) -> float | None:
    """One completion at a time: its text, and columns of its row by name. 1 if right, less for larger errors."""
    expected, given = parse_number(gold), extract_answer(completion, "last_number")
    if expected is None:
        return None  # not gradable: the completion is excluded from its group's statistics
    return 0.0 if given is None else float(1 / (1 + abs(given - expected)))


def rarity(group: Group) -> list[float]:
    """One group at a time: 1 if no other completion of the prompt has the same text, less for repeated texts."""
    texts = [completion.text for completion in group.completions]
    return [1 / texts.count(text) for text in texts]


def concise(completions: list[Any], words: int = 20, **columns: list[Any]) -> list[float]:
    """All completions at once, as in TRL: 1 up to `words` words, less for longer texts. `words` is an argument."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [min(1.0, words / max(1, len(text.split()))) for text in texts]


def example_group() -> Group:
    """One question with three answers, like the result of a rollout."""
    example = Example(id="eggs", question="3 boxes hold 6 eggs each. How many eggs?", gold="18")
    prompt = Prompt(id=example.id, token_ids=(0,), text=example.question, example=example)
    texts = ("3 * 6 = 18", "about 20", "about 20")
    completions = (Completion(token_ids=(0,), logprobs=(0.0,), finish_reason="stop", text=text) for text in texts)
    return Group(prompt=prompt, completions=tuple(completions))


def main() -> None:
    reward = as_reward({"close": closeness, "rare": (rarity, 0.5), "concise": (concise, 0.0)})
    group = example_group()
    scores = reward([group])
    for index, completion in enumerate(group.completions):
        parts = ", ".join(f"{name} {values[0][index]:.2f}" for name, values in scores.parts.items())
        print(f"{completion.text!r}: total {scores.total[0][index]:.2f} ({parts})")


if __name__ == "__main__":
    main()
