"""Rollouts ahead: the current policy samples the next step's completions while the trainer updates it.

Step t trains version t - 1 of the policy on samples of version t - 2, which is one version old. Groups record the
version that sampled them; groups that are older than the bound, or belong to another request, are not used.

If sampling ahead fails, the update still finishes, so that its step can be recorded and saved; the next request then
raises the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any, Final, Protocol

from flatpeak.protocols import Sampler, WrappedSampler
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams

JSON = dict[str, Any]
DRAWN: Final = "drawn"
"""Key in a state for the groups that were sampled ahead."""


class Background(Protocol):
    """Samples one request at a time with the policy's current weights, in parallel to the caller."""

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Abort sampling that waits for servers or processes once `stopping()` is true."""
        return

    def begin(self, request: JSON) -> None:
        """Take the current weights and start sampling."""
        ...

    def result(self) -> JSON:
        """Wait for the answer of `answer_request`. Raises the errors of sampling; RunError if no answer will come."""
        ...

    def close(self) -> None:
        """End sampling; a later request starts it again."""
        ...


class RolloutsAhead(WrappedSampler):
    """A sampler whose next request is sampled in the background; the wrapped sampler answers all other requests at
    once.

    The trainer sets the policy's version, the number of its steps. Log-probabilities are those of the sampling policy.
    """

    def __init__(self, sampler: Sampler, background: Background, *, staleness: int) -> None:
        """`staleness`: the most versions that a group may be behind the policy."""
        super().__init__(sampler)
        self.background = background
        self.staleness = staleness
        self.version = 0
        self._drawn: JSON | None = None
        self._failure: Exception | None = None

    def use_version(self, version: int) -> None:
        """Set the current version of the policy."""
        self.version = version

    @contextmanager
    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[None]:
        """A context in which the policy on entry samples a later request; on exit it is done, or has failed."""
        self._drawn = None
        request = encode_request(prompts, group_size=group_size, sampling=sampling, seed=seed)
        self.background.begin(request | {"state": dict(self.sampler.state())})
        try:
            yield
            answer = self._answer()
        except BaseException:
            self.background.close()
            raise
        if answer is None:
            return
        self.sampler.load(answer["state"])
        self._drawn = {"request": digest(request), "version": self.version, "groups": answer["groups"]}

    def _answer(self) -> JSON | None:
        """The background's answer; None if it failed, which the next request reports."""
        try:
            return self.background.result()
        except Exception as error:
            self.background.close()
            self._failure = error
            return None

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """Pairs (index of the prompt, its group): sampled ahead for this request, or sampled now.

        Raises the error of sampling ahead if it failed.
        """
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure
        drawn = self._drawn
        if drawn is not None and self.version - drawn["version"] <= self.staleness:
            request = encode_request(prompts, group_size=group_size, sampling=sampling, seed=seed)
            if digest(request) == drawn["request"]:
                self._drawn = None
                groups = decode_groups(drawn["groups"], prompts)
                yield from enumerate(replace(group, version=drawn["version"]) for group in groups)
                return
        for p, group in self.sampler.stream(prompts, group_size=group_size, sampling=sampling, seed=seed):
            yield p, replace(group, version=self.version)

    def state(self) -> JSON:
        """The wrapped sampler's state and the unused groups that were sampled ahead, whose weights no longer exist."""
        return {**self.sampler.state(), DRAWN: self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; a state of a run without rollouts ahead has no groups."""
        self.sampler.load(state)
        self._drawn = state.get(DRAWN)

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Make sampler and background stop waiting for servers once `stopping()` is true."""
        self.sampler.stop_when(stopping)
        self.background.stop_when(stopping)

    def close(self) -> None:
        """End background sampling, then close the wrapped sampler."""
        self.background.close()
        self.sampler.close()


def encode_request(prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int) -> JSON:
    """The arguments of `Sampler.generate` as JSON; prompts have the fields that a sampler reads."""
    return {
        "prompts": [[prompt.id, prompt.example.id, list(prompt.token_ids)] for prompt in prompts],
        "group_size": group_size,
        "sampling": asdict(sampling) | {"stop": list(sampling.stop)},
        "seed": seed,
    }


def digest(request: JSON) -> str:
    """A fingerprint of a request."""
    return blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).hexdigest()


def answer_request(sampler: Sampler, request: JSON) -> JSON:
    """Restore the request's state in a sampler and sample; return the groups and the sampler's new state, as JSON."""
    prompts = [
        Prompt(id=name, token_ids=tuple(ids), text="", example=Example(id=example, question="", gold=""))
        for name, example, ids in request["prompts"]
    ]
    sampling = SamplingParams(**request["sampling"] | {"stop": tuple(request["sampling"]["stop"])})
    sampler.load(request["state"])
    groups = sampler.generate(prompts, group_size=request["group_size"], sampling=sampling, seed=request["seed"])
    return {"groups": [[_fields(c) for c in group.completions] for group in groups], "state": dict(sampler.state())}


def _fields(completion: Completion) -> JSON:
    """A completion as JSON."""
    kept = completion.kept and [[int(token) for token in one] for one in completion.kept]
    return asdict(replace(completion, kept=None)) | {"kept": kept}


def decode_groups(groups: Sequence[Sequence[JSON]], prompts: Sequence[Prompt]) -> list[Group]:
    """The groups of an answer, with the prompts of the request."""
    return [
        Group(prompt=prompt, completions=tuple(map(_completion, completions)))
        for prompt, completions in zip(prompts, groups, strict=True)
    ]


def _completion(fields: JSON) -> Completion:
    rows: JSON = {name: tuple(value) if isinstance(value, list | tuple) else value for name, value in fields.items()}
    return Completion(**rows)
