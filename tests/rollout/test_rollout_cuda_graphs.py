"""Captured steps, on a torch.cuda that records and repeats operations on the CPU; and on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from flatpeak.kernels.decode_attention import decode_attention
from flatpeak.policy.training_attention import ATTENTION_NAME, NO_MASK, register_attention
from flatpeak.rollout.cuda_graphs import GraphedStep
from flatpeak.rollout.randomness import completion_keys, uniforms
from flatpeak.rollout.sampling import draw
from support.fake_cuda import FakeCuda, fake_cuda

SLOTS, LONGEST = 4, 6


class Counter:
    """A step in the manner of decoding: slot s appends weight * last + length to its history."""

    def __init__(self, device: str = "cpu") -> None:
        self.weight = torch.tensor(2.0, device=device)
        self.last_S = torch.arange(1.0, SLOTS + 1, device=device)
        self.lengths_S = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self.history_ST = torch.zeros(SLOTS, LONGEST, device=device)
        self.calls = 0
        self.reads_on_the_host = False

    def step(self, rows: int) -> None:
        self.calls += 1
        new = self.weight * self.last_S[:rows] + self.lengths_S[:rows]
        place = torch.arange(rows, device=new.device) * LONGEST + self.lengths_S[:rows]
        self.history_ST.view(-1).index_copy_(0, place, new)
        self.last_S[:rows] = new
        self.lengths_S[:rows].add_(1)
        if self.reads_on_the_host:
            assert float(self.last_S.sum()) > 0

    def state(self) -> list[Tensor]:
        return [self.last_S, self.lengths_S]

    def fixed(self) -> list[Tensor]:
        return [self.weight, self.last_S, self.lengths_S, self.history_ST]

    def graphed(self, device: str = "cuda") -> GraphedStep:
        return GraphedStep(self.step, device=device, state=self.state, fixed=self.fixed)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda(monkeypatch)


def after(sizes: list[int]) -> tuple[Counter, Counter]:
    """(through graphs, called plainly) after steps of these numbers of rows."""
    result, expected = Counter(), Counter()
    run = result.graphed()
    for rows in sizes:
        run(rows)
        expected.step(rows)
    return result, expected


def assert_equal(found: Counter, expected: Counter) -> None:
    for ours, theirs in zip(found.fixed(), expected.fixed(), strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("sizes", [[4], [4, 4, 4], [4, 4, 2, 2, 1, 1], [1, 4, 1, 4]])
def test_graphed_steps_are_the_steps(cuda: FakeCuda, sizes: list[int]) -> None:
    result, expected = after(sizes)
    assert_equal(result, expected)
    assert len(cuda.graphs) == len(set(sizes))
    assert sum(graph.replays for graph in cuda.graphs) == len(sizes)


def test_a_size_is_run_on_the_host_for_its_capture_only(cuda: FakeCuda) -> None:
    counter = Counter()
    run = counter.graphed()
    for _ in range(5):
        run(4)
    assert counter.calls == 3  # warm-up, warm-up watched for waiting, capture


def test_all_graphs_share_a_pool_and_the_warm_ups_ran_on_the_stream_of_the_captures(cuda: FakeCuda) -> None:
    run = Counter().graphed()
    for rows in (1, 4, 2):
        run(rows)
    assert len(cuda.graphs) == 3
    assert len(set(cuda.pools)) == 1
    side = run._side
    assert side is not None and side is not cuda.main
    assert cuda.main.waited_for == [side] * 6
    assert cuda.current is cuda.main


def test_replays_see_weights_that_changed_in_place(cuda: FakeCuda) -> None:
    counter = Counter()
    run = counter.graphed()
    run.begin()
    run(1)
    counter.weight.fill_(10.0)
    run.begin()
    run(1)
    assert counter.history_ST[0, :2].tolist() == [2.0, 21.0]
    assert len(cuda.graphs) == 1


def test_a_replaced_weight_is_noticed_at_the_beginning_of_a_rollout(cuda: FakeCuda) -> None:
    counter = Counter()
    run = counter.graphed()
    run.begin()
    run(1)
    old, counter.weight = counter.weight, torch.tensor(10.0)
    run(1)
    assert counter.last_S[0] == 2 * 2 + 1  # the old weight, were it not for begin()
    run.begin()
    assert run.sizes == []
    run(1)
    assert counter.last_S[0] == 10 * 5 + 2
    assert old == 2


def test_invalidated_graphs_are_captured_anew(cuda: FakeCuda) -> None:
    counter, expected = Counter(), Counter()
    run = counter.graphed()
    run(2)
    run.invalidate()
    assert run.sizes == []
    run(2)
    for _ in range(2):
        expected.step(2)
    assert_equal(counter, expected)
    assert len(cuda.graphs) == 2


def test_a_step_that_waits_for_the_device_runs_without_graphs_and_says_so(cuda: FakeCuda) -> None:
    result, expected = Counter(), Counter()
    result.reads_on_the_host = True
    run = result.graphed()
    for rows in (4, 4, 2):
        run(rows)
        expected.step(rows)
    assert_equal(result, expected)
    assert run.reason == (
        "decoding runs without CUDA graphs, and is slower: "
        "a step of 4 slots failed (called a synchronizing CUDA operation)"
    )
    assert cuda.graphs == []
    assert cuda.sync_mode == 0
    result.reads_on_the_host = False
    run.invalidate()
    assert run.reason is None
    run(1)
    assert run.sizes == [1]


def test_a_capture_that_fails_leaves_the_state_and_the_stream_as_they_were(cuda: FakeCuda) -> None:
    cuda.fail_captures = True
    result, expected = after([4, 4])
    assert_equal(result, expected)
    assert cuda.current is cuda.main


def test_the_reason_is_the_first_line_of_the_error(cuda: FakeCuda) -> None:
    cuda.fail_captures = True
    run = Counter().graphed()
    run(3)
    assert str(run.reason).endswith("a step of 3 slots failed (CUDA error: operation failed)")


def test_an_error_of_the_step_itself_is_not_taken_for_a_failed_capture(cuda: FakeCuda) -> None:
    def broken(rows: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        GraphedStep(broken, device="cuda", state=lambda: [])(1)


def test_on_a_cpu_steps_are_called(cuda: FakeCuda) -> None:
    counter, expected = Counter(), Counter()
    run = counter.graphed("cpu")
    run.begin()
    assert counter.calls == 0
    for _ in range(3):
        run(4)
        expected.step(4)
    assert_equal(counter, expected)
    assert counter.calls == 3
    assert cuda.graphs == [] and run.reason is None


class Decoding:
    """Whole decoding steps of a model: its forward pass over slots that share prompts, a draw, and what comes next."""

    def __init__(self, device: str = "cpu") -> None:
        config = Qwen2Config(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
        register_attention()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME).to(device).eval()
        torch.nn.init.normal_(self.model.lm_head.weight, generator=torch.Generator(device).manual_seed(1))
        self.own = torch.zeros(2, 2, SLOTS, 1, 64, 32, device=device)  # layers, keys and values, slots, heads, columns
        self.arena = torch.randn(2, 2, 2 * 64, 32, generator=torch.Generator().manual_seed(0)).to(device)
        self.rooms = [torch.tensor(table, device=device) for table in ([0, 64], [64, 64])]  # where, and how wide
        self.prompt_S = torch.tensor([1, 0, 1, 1], device=device)
        self.prompt_lengths_A = torch.tensor([5, 9], device=device)
        self.lengths_S = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self.tokens_S = torch.arange(3, 3 + SLOTS, device=device)
        self.history_ST = torch.zeros(SLOTS, 64, dtype=torch.int64, device=device)
        self.keys_S = completion_keys(7, ["a"], SLOTS).to(device)
        self.calls: list[int] = []
        self.rows = 0

    @torch.inference_mode()
    def step(self, rows: int) -> None:
        self.rows = rows
        self.lengths_S[:rows].add_(1)
        positions_R = self.prompt_lengths_A.index_select(0, self.prompt_S[:rows]) + self.lengths_S[:rows] - 1
        hidden = self.model.model(
            input_ids=self.tokens_S[:rows, None],
            attention_mask=NO_MASK,
            position_ids=positions_R[:, None],
            use_cache=False,
            attention_context=self,
        ).last_hidden_state[:, 0]
        drawn = draw(self.model.lm_head(hidden), uniforms(self.keys_S[:rows], self.lengths_S[:rows]), temperature=1.0)
        self.tokens_S[:rows] = drawn.tokens_R
        place = torch.arange(rows, device=positions_R.device) * 64 + self.lengths_S[:rows] - 1
        self.history_ST.view(-1).index_copy_(0, place, drawn.tokens_R)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Any) -> Tensor:
        place = torch.arange(self.rows, device=query.device) * 64 + self.lengths_S[: self.rows] - 1
        for memory, new in zip(self.own[layer], (key, value), strict=True):
            memory.view(-1, 32).index_copy_(0, place, new.flatten(0, 2))
        prompts = (*self.arena[layer], self.prompt_S, self.prompt_lengths_A, *self.rooms)
        states = (query[:, :, 0], *self.own[layer], self.lengths_S)
        return decode_attention(*states, *prompts, prompt_columns=64, scale=rule.scale, window=rule.window)[:, None]

    def state(self) -> list[Tensor]:
        return [self.lengths_S, self.tokens_S]


SIZES = [SLOTS] * 10 + [2] * 10 + [1] * 5


def test_graphs_of_a_models_decoding_steps_draw_the_same_tokens(cuda: FakeCuda) -> None:
    result, expected = Decoding(), Decoding()
    run = GraphedStep(result.step, device="cuda", state=result.state, fixed=result.model.parameters)
    with torch.inference_mode():
        for index, rows in enumerate(SIZES):
            if index == 15:
                for decoding in (result, expected):
                    decoding.model.lm_head.weight.mul_(-1)
            run.begin()
            run(rows)
            expected.step(rows)
    assert run.reason is None
    assert run.sizes == [1, 2, SLOTS]
    assert len(cuda.graphs) == 3
    assert result.history_ST.equal(expected.history_ST)
    assert result.own.equal(expected.own)
    assert len(set(result.history_ST[0, :25].tolist())) > 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_graphed_steps_are_the_steps() -> None:
    counter, expected = Counter("cuda"), Counter("cuda")
    run = counter.graphed()
    for rows in (4, 4, 2, 1, 4):
        run(rows)
        expected.step(rows)
        counter.weight.mul_(1.5)
        expected.weight.mul_(1.5)
    assert run.reason is None
    assert run.sizes == [1, 2, 4]
    assert_equal(counter, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_that_waits_runs_without_graphs() -> None:
    counter, expected = Counter("cuda"), Counter("cuda")
    counter.reads_on_the_host = True
    run = counter.graphed()
    for _ in range(3):
        run(4)
        expected.step(4)
    assert "synchronizing" in str(run.reason)
    assert_equal(counter, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_graphs_of_a_models_decoding_steps_draw_the_same_tokens() -> None:
    result, expected = Decoding("cuda"), Decoding("cuda")
    run = GraphedStep(result.step, device="cuda", state=result.state, fixed=result.model.parameters)
    with torch.inference_mode():
        for rows in SIZES:
            run(rows)
            expected.step(rows)
    assert run.reason is None
    assert result.history_ST.equal(expected.history_ST)
