"""Rewards of your own: the three signatures a function can have, and how several become one.

Run it to see them score a few answers, without a model:

    python examples/custom_reward.py

In a recipe, name the function by its file (or module):

    rewards:
      correctness: {type: number, extraction: answer_tag}
      concise: {type: function, function: examples/custom_reward.py:concise, weight: 0.2, arguments: {words: 20}}

In Python, pass the functions themselves:

    flatpeak.train(config, reward={"close": closeness, "concise": (concise, 0.2)})

A run calls functions of one completion or one group in processes of their own, where nothing they do can harm it: a
call that hangs for 2 s (`timeout` in the recipe), or ends its process, costs that completion or group its score. What
such a function keeps between calls is its process's own. Functions of all completions, async ones, and those of the
script that is run or with an attribute `by_group = False` are called in the run's own process, where one that hangs
hangs the run. In a recipe, `timeout: 60` gives functions of all completions and async ones a process too; one call is
then all completions of a step, all of which have no score if it takes longer.
"""

from __future__ import annotations

from typing import Any

from flatpeak.rewards.numeric_answer import extract_answer, parse_number
from flatpeak.rewards.reward_set import as_reward
from flatpeak.types import Completion, Example, Group, Prompt


def closeness(completion: str, gold: str) -> float | None:
    """One completion at a time: its text, and columns of its row by name. 1 if right, less the further off."""
    expected, given = parse_number(gold), extract_answer(completion, "last_number")
    if expected is None:
        return None  # cannot be judged: the completion leaves its group's statistics; it does not count as 0
    return 0.0 if given is None else float(1 / (1 + abs(given - expected)))


def rarity(group: Group) -> list[float]:
    """One group at a time: 1 for a text that no other completion of the prompt has, less for repeated ones."""
    texts = [completion.text for completion in group.completions]
    return [1 / texts.count(text) for text in texts]


def concise(completions: list[Any], words: int = 20, **columns: list[Any]) -> list[float]:
    """All completions at once, the signature of TRL: 1 up to so many words, then falling. `words` is an argument."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [min(1.0, words / max(1, len(text.split()))) for text in texts]


def example_group() -> Group:
    """One question and three answers to it, as a rollout would produce them."""
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
