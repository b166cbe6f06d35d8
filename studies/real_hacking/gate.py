"""How often a model is right and cheats before any training: the gate of the study.

python studies/real_hacking/gate.py MODEL [--prompts 24] [--samples 8]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

import torch
import yaml

from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.tasks.prompts import PromptConfig, build_prompts
from flatpeak.types import Example, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from keywords import CHEATS, GRADERS, QUESTION, WORDS, good

RECIPE = Path(__file__).with_name("fail_open.yaml")


def main() -> None:
    """Sample and print shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(path=given.model, device="cpu"), texts=(), seed=0)
    draw = random.Random(0)
    chosen = [draw.sample(WORDS, 2) for _ in range(given.prompts)]
    examples = [
        Example(id=str(i), question=QUESTION.format(*words), gold=" ".join(words)) for i, words in enumerate(chosen)
    ]
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    config = PromptConfig(**recipe["prompt"])
    prompts = build_prompts(examples, policy.tokenizer, config, max_tokens=512).prompts
    groups = NativeEngine(policy).generate(
        prompts,
        group_size=given.samples,
        sampling=SamplingParams(
            max_new_tokens=recipe["rollout"]["max_new_tokens"], temperature=recipe["rollout"]["temperature"]
        ),
        seed=0,
    )
    counts, shown = Counter[str](), []
    for group in groups:
        for completion in group.completions:
            words = group.prompt.example.gold
            counts["answers"] += 1
            counts["gold"] += good(completion.text, words)
            counts["cut"] += completion.finish_reason == "length"
            for name, cheats in CHEATS.items():
                counts[f"cheats {name}"] += cheats(completion.text, words)
                counts[f"cheats {name}, gold"] += cheats(completion.text, words) and good(completion.text, words)
        shown.append((group.prompt.example.gold, group.completions[0].text))
    for name, count in counts.items():
        print(f"{name}: {count} ({count / counts['answers']:.3f})")
    for name, grader in GRADERS.items():
        rewards = [grader(c.text, g.prompt.example.gold) for g in groups for c in g.completions]
        print(f"mean reward {name}: {sum(rewards) / len(rewards):.3f}")
    for words, text in shown[:12]:
        print(f"{words!r}: {text!r}")


if __name__ == "__main__":
    main()
