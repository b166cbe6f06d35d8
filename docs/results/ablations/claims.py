"""The ablations of `make_report.py`: the arms, what each is compared with, and what "GRPO from Scratch" says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sign = Literal[-1, 0, 1]
BASE = "base"
BASES = {
    BASE: "base",
    "minibatches4": "4 minibatches, clip 0.2",
    "updates16": "16 updates, clip 0.2",
    "learning_rate,learning_rate=3e-05": "base, a third of the rate",
    "learning_rate,learning_rate=0.0003": "base, three times the rate",
}
"""What the arms are called that others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm, the arm it is compared with, and the sign of the difference that is claimed for it."""

    arm: str
    label: str
    base: str = BASE
    expected: Sign | None = None
    """0: no difference. None: nothing is claimed."""
    published: str = ""
    """The project's numbers, arm against base: the best held-out accuracy, or as said."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A section of the page."""

    title: str
    claim: str
    comparisons: tuple[Comparison, ...]


ABLATIONS = (
    Ablation(
        title="Learning rate",
        claim="Its verdict: 3e-5, the best of six rates from 1e-6 to 1e-4. At 1e-4 it collapsed within 11 "
        "steps, with answers of 1,020 tokens. At a third of the best rate it learned far more slowly. "
        "Its README says 100 steps for each rate; 1e-6 and 1e-4 logged 14, and 3e-6 logged 45. Weights "
        "were bfloat16 without float32 masters, so that small updates may have been rounded away.",
        comparisons=(
            Comparison(
                arm="learning_rate,learning_rate=3e-05",
                label="a third, 3e-5",
                expected=-1,
                published=".505 against .717, at a third",
            ),
            Comparison(
                arm="learning_rate,learning_rate=0.0003",
                label="three times, 3e-4",
                expected=-1,
                published=".030 against .717, at 3.3 times",
            ),
            Comparison(
                arm="learning_rate,learning_rate=0.001",
                label="ten times, 1e-3",
                expected=-1,
            ),
        ),
    ),
    Ablation(
        title="Baseline",
        claim="Its verdict: a baseline is essential. Without one the accuracy peaked at step 7 and fell, and "
        "answers shrank from 441 to 17 tokens, at half the rate to 24. Leave-one-out was not run. Here "
        "it keeps the division by the standard deviation. Its advantages are then those of the base "
        "times 8/7, and since every gradient is clipped to a norm of 1, its updates are those of the "
        "base.",
        comparisons=(
            Comparison(
                arm="no_baseline",
                label="none",
                expected=-1,
                published=".340 against .626",
            ),
            Comparison(
                arm="no_baseline_rate,learning_rate=3e-05",
                label="none, a third of the rate",
                expected=-1,
                published=".288 against .626, at half the rate",
            ),
            Comparison(arm="leave_one_out", label="leave-one-out"),
        ),
    ),
    Ablation(
        title="Length normalization",
        claim="Its verdict: no difference between a mean over each answer, division by a constant, and "
        "division by the longest answer of a microbatch, over 200 steps. Here all answers have 3 or 4 "
        "tokens, so that this says nothing about long ones. The three arms give every token the same "
        "weight. They differ by a factor, which clipping removes, and are one arm here.",
        comparisons=(
            Comparison(arm="constant", label="constant", expected=0, published=".742 against .740"),
            Comparison(arm="longest", label="longest answer of the batch", expected=0, published=".741 against .740"),
            Comparison(arm="token_mean", label="mean over all tokens"),
        ),
    ),
    Ablation(
        title="Division by the standard deviation",
        claim="Its verdict: keep the division. Both runs had the same learning rate, and three of its runs "
        "with equal settings and equal seeds differ by as much. The division makes gradients larger (a "
        "norm of .164 against .096 there), but Adam takes most of that away. What stays is that groups "
        "nearly solved or nearly hopeless count more.",
        comparisons=(
            Comparison(arm="no_std", label="none", expected=-1, published=".687 against .740"),
            Comparison(
                arm="no_std_rate,learning_rate=3e-05",
                label="none, a third of the rate",
                base="learning_rate,learning_rate=3e-05",
                expected=-1,
            ),
            Comparison(
                arm="no_std_rate,learning_rate=0.0003",
                label="none, three times the rate",
                base="learning_rate,learning_rate=0.0003",
                expected=-1,
            ),
        ),
    ),
    Ablation(
        title="Updates from one rollout",
        claim="Its verdict: stay on policy. After 50 steps four epochs were ahead; after 200 steps two "
        "minibatches and two epochs were behind. 16 updates collapsed, with answers of 6 tokens. The "
        ".748 of the base is the largest of 51 noisy evaluations; its mean over steps 150 to 199 is "
        ".713.",
        comparisons=(
            Comparison(
                arm="minibatches2",
                label="2 minibatches",
                expected=-1,
                published=".692 against .748; in 50 steps .579 against .631",
            ),
            Comparison(
                arm="epochs2",
                label="2 epochs",
                expected=-1,
                published=".690 against .748; in 50 steps .635 against .631",
            ),
            Comparison(arm="minibatches4", label="4 minibatches"),
            Comparison(
                arm="epochs4",
                label="4 epochs",
                expected=1,
                published="in 50 steps .655 against .631",
            ),
            Comparison(
                arm="updates16",
                label="4 epochs of 4 minibatches",
                expected=-1,
                published="in 50 steps .462 against .631, then .002",
            ),
        ),
    ),
    Ablation(
        title="Clip",
        claim="With two minibatches the run without a clip ended above the one with it, which its author does "
        "not discuss. Other widths were not run.",
        comparisons=(
            Comparison(
                arm="minibatches4_no_clip",
                label="none, 4 minibatches",
                base="minibatches4",
                expected=1,
                published=".724 against .692, 2 minibatches",
            ),
            Comparison(arm="updates16_no_clip", label="none, 16 updates", base="updates16"),
            Comparison(arm="minibatches4_clip0.1", label="0.1, 4 minibatches", base="minibatches4"),
            Comparison(arm="minibatches4_clip0.4", label="0.4, 4 minibatches", base="minibatches4"),
            Comparison(arm="minibatches4_clip_higher", label="0.2 below, 0.28 above", base="minibatches4"),
        ),
    ),
    Ablation(
        title="KL penalty",
        claim="The project has no KL penalty.",
        comparisons=(
            Comparison(arm="kl0.01", label="0.01"),
            Comparison(arm="kl0.1", label="0.1"),
        ),
    ),
    Ablation(
        title="Group size",
        claim="The project always had 8 answers of a prompt. Here the completions of a step stay 256.",
        comparisons=(
            Comparison(arm="group2", label="2"),
            Comparison(arm="group4", label="4"),
            Comparison(arm="group16", label="16"),
        ),
    ),
    Ablation(
        title="Prompt",
        claim="Its verdict: the r1_zero prompt, with the answer in tags, is better than the bare question. The"
        " bare question started at .471, r1_zero at .030. The entropy over the last 20 steps was .086 "
        "for the bare question and .026 for r1_zero. Here SFT teaches each form until about half of the "
        "answers are right, so that the prompt cannot bring out what a pretrained model already knows.",
        comparisons=(
            Comparison(
                arm="prompt_tags",
                label="roles, and the answer in tags",
                expected=1,
                published=".748 against .712",
            ),
            Comparison(arm="prompt_roles", label="roles: Q and A"),
        ),
    ),
    Ablation(
        title="SFT before RL",
        claim="Its verdict: SFT hurts, and more of it hurts more (.748 without, then .708, .693 and .672 from "
        "its SFT checkpoints 10, 20 and 56). Its model had been pretrained on mathematics. Here a model "
        "without SFT has random weights and finds no reward.",
        comparisons=(
            Comparison(arm="sft_none", label="none", expected=1, published=".748 against .708"),
            Comparison(arm="sft_less", label="until a quarter is right", expected=1, published=".708 against .693"),
            Comparison(
                arm="sft_more", label="until three quarters are right", expected=-1, published=".672 against .693"
            ),
        ),
    ),
)
