"""How likely the untrained model finds sentences: what makes a good sentence fluent.

    python studies/real_hacking/fluency.py MODEL.gguf RUN_OR_SWEEP --csv answers.csv

Reads the evaluations of every run below a directory and writes a row per answer: arm, seed, step, whether it is good
and cheats, and its mean negative log-probability in nat per token, as an answer to a prompt without words.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from keywords import CHEATS, good

NEUTRAL = [{"role": "user", "content": "Write one short sentence."}]


class Fluency:
    """The untrained model as a judge of how common a text is."""

    def __init__(self, path: Path) -> None:
        """`path` is a GGUF file."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.prompt: str = self.tokenizer.apply_chat_template(NEUTRAL, tokenize=False, add_generation_prompt=True)

    @torch.no_grad()
    def nats_per_token(self, text: str) -> float:
        """The mean of -log p(token) over the tokens of a text."""
        prompt: list[int] = self.tokenizer(self.prompt, add_special_tokens=False).input_ids
        answer: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return cross_entropy(logits, torch.tensor(answer)).item()


def answers(root: Path, grader: str) -> Iterator[tuple[dict[str, Any], str]]:
    """A row per answer of every evaluation below a directory, and its text."""
    for path in sorted(root.glob("**/evaluations/*.jsonl")):
        run = path.parent.parent
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for text in row["samples"]:
                measured = {
                    "arm": run.parent.name,
                    "seed": run.name.removeprefix("seed-"),
                    "step": int(path.stem.rpartition("_")[2]),
                    "good": int(good(text, row["gold"])),
                    "cheats": int(CHEATS[grader](text, row["gold"])),
                }
                yield measured, text


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("root", type=Path)
    parser.add_argument("--grader", default="fail_open", choices=tuple(CHEATS))
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    fluency = Fluency(given.model)
    rows = [
        {**row, "nats": round(fluency.nats_per_token(text), 4) if text else ""}
        for row, text in answers(given.root, given.grader)
    ]
    with given.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
