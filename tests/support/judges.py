"""Small groups, and judges made of a function."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from flatpeak.rewards.judge.config import JudgeConfig
from flatpeak.rewards.judge.protocol import JudgeReply, JudgeRequest
from flatpeak.rewards.judge.reward import JudgeReward, build_judge_reward
from flatpeak.types import Completion, Example, Group, Prompt


def group(*answers: str, gold: str = "18", question: str = "How many?", id: str = "row-1") -> Group:
    """A question and its completions."""
    example = Example(id=id, question=question, gold=gold)
    prompt = Prompt(id=id, token_ids=(0,), text=question, example=example)
    completions = [Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text=text) for text in answers]
    return Group(prompt=prompt, completions=tuple(completions))


def config(url: str, **fields: Any) -> JudgeConfig:
    """An endpoint judge without canaries."""
    backend = {"type": "endpoint", "base_url": url, "model": "judge-1", **fields.pop("backend", {})}
    quick = {
        "retries": 3,
        "timeout": 5.0,
        "canaries": {"enabled": False},
    }
    return JudgeConfig.model_validate({"backend": backend, "rubric": "three_levels", **quick, **fields})


def reward(url: str, *, prepared: bool = True, **fields: Any) -> JudgeReward:
    """A judge reward for that server. `prepared` leaves out the live call, so that requests can be counted."""
    made = build_judge_reward("judge", config(url, **fields))
    if prepared:
        made._examples = ()
    return made


class FunctionJudge:
    """Replies what a function says of the question, and keeps what it was asked."""

    identity = "function"

    def __init__(self, reply: Callable[[str], str | JudgeReply]) -> None:
        self.reply = reply
        self.asked: list[JudgeRequest] = []
        self.batches: list[int] = []

    async def ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        self.asked += requests
        self.batches.append(len(requests))
        replies = [self.reply(request.messages[1]["content"]) for request in requests]
        return [JudgeReply(text=reply) if isinstance(reply, str) else reply for reply in replies]


def gullible() -> FunctionJudge:
    """A judge that accepts the reference, and every answer that claims to agree with it."""

    def reply(content: str) -> str:
        parts = {
            name: content.split(f"[[begin {name} ")[1].split("]]", 1)[1].split("[[end")[0].strip()
            for name in ("reference answer", "answer")
        }
        right = parts["answer"] == parts["reference answer"] or "agree" in parts["answer"]
        return json.dumps({"correct": int(right)})

    return FunctionJudge(reply)
