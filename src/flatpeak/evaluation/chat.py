"""Talk to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatpeak.evaluation.locate import locate_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.policy import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.generate import GenerateEngine
from flatpeak.types import Example, Message, Prompt, SamplingParams


def chat_loop(
    path: str,
    *,
    temperature: float,
    max_new_tokens: int,
    system: str | None = None,
    read: Callable[[str], str] = input,
    write: Callable[[str], None] = print,
) -> None:
    """Answer lines until an empty one or the end of input; a model with a chat template keeps the conversation."""
    policy = load_policy(ModelConfig(path=str(locate_model(path).path)))
    conversation: list[Message] = [{"role": "system", "content": system}] if system else []
    for turn in range(10**9):
        try:
            question = read("> ")
        except EOFError:
            return
        if not question:
            return
        conversation.append({"role": "user", "content": question})
        answer = reply(
            policy,
            conversation if policy.tokenizer.chat_template else question,
            sampling=SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens),
            seed=turn,
        )
        conversation.append({"role": "assistant", "content": answer})
        write(answer)


def reply(policy: Policy, asked: str | Sequence[Message], *, sampling: SamplingParams, seed: int) -> str:
    """One completion, of a text or of a conversation in the model's own chat template."""
    if isinstance(asked, str):
        text, ids = asked, policy.tokenizer.encode(asked)
    else:
        text = policy.tokenizer.apply_chat_template(list(asked), tokenize=False, add_generation_prompt=True)
        ids = policy.tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        return "(this model's tokenizer knows nothing of that text)"
    prompt = Prompt(id="chat", token_ids=tuple(ids), text=text, example=Example(id="chat", question=text, gold=""))
    if policy.native:
        engine: NativeEngine | GenerateEngine = NativeEngine(policy)
    else:
        engine = GenerateEngine(policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids)
    return engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)[0].completions[0].text
