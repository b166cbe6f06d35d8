"""A custom judge is any object with `identity` and `async ask(requests)`; this one counts words.

    rewards:
      judge:
        type: judge
        backend: {type: custom, factory: examples/custom_judge.py:WordJudge, arguments: {enough: 0.8}}
        output: json

It gives the highest mark if the answer contains enough of the reference answer's words. A real judge would call a
service here; everything else (rubric, delimiters, repair, cache, canaries, missing scores) stays the same.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from flatpeak.rewards.judge import JudgeReply, JudgeRequest

BLOCK = re.compile(r"\[\[begin ([a-z ]+) (\w+)\]\]\n(.*?)\n\[\[end \1 \2\]\]", re.DOTALL)


class WordJudge:
    """Replies in the format of the built-in rubric `correctness`: {"correct": 0 or 1}."""

    def __init__(self, *, enough: float = 1.0) -> None:
        self.enough = enough
        # Identifies the judge in the cache: include everything that changes its replies.
        self.identity = f"words, {enough} of them"

    async def ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """One reply per request; a text of None with a reason would be a missing score."""
        return [JudgeReply(text=self.reply(request.messages[1]["content"])) for request in requests]

    def reply(self, content: str) -> str:
        """The reply; each text to grade is between lines with a code that answers cannot know."""
        texts = {name: text for name, _, text in BLOCK.findall(content)}
        words = set(texts["reference answer"].lower().split())
        shared = words & set(texts["answer"].lower().split())
        return f'{{"correct": {int(len(shared) >= self.enough * len(words))}}}'


if __name__ == "__main__":
    request = JudgeRequest(
        messages=(
            {"role": "system", "content": ""},
            {
                "role": "user",
                "content": "[[begin reference answer 1]]\nred fox\n[[end reference answer 1]]\n\n"
                "[[begin answer 1]]\na red fox\n[[end answer 1]]",
            },
        ),
        max_tokens=100,
    )
    print(asyncio.run(WordJudge().ask([request]))[0].text)
