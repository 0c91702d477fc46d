"""Compares answers with the reference, and checks that every deviation is explained.

An answer is whole or cut. It may be cut only by an abort of its id, or by a pause that overlapped it. It may be
refused only while the fleet is paused. Every other deviation is unexplained, whatever faults were injected: a router
with one healthy server must hide all faults from clients.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headgate.testing.chaos.catalogue import CatalogueItem
from headgate.testing.chaos.client import ObservedAnswer, ObservedChoice
from headgate.testing.chaos.reference import MixedWeightsAnswer, ReferenceAnswers, WeightsName, first_difference

log = logging.getLogger(__name__)

SHOWN = 20  # failures whose text is kept; all are counted


@dataclass(slots=True)
class PauseInterval:
    mode: str  # abort, drain, freeze
    refuses: bool
    begun_s: float
    ended_s: float = float("inf")

    def overlaps(self, answer: ObservedAnswer) -> bool:
        return self.begun_s <= answer.ended_s and answer.begun_s <= self.ended_s


@dataclass
class AnswerJudge:
    reference: ReferenceAnswers
    pauses: list[PauseInterval] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)  # ids whose abort was requested
    weights: dict[int, WeightsName] = field(default_factory=lambda: {0: "a"})  # version -> weights
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    checked: int = 0  # answers whose tokens were compared
    mixed: list[MixedWeightsAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def ended(self, request_id: str, item: CatalogueItem, answer: ObservedAnswer) -> str:
        """Judge the answer to one request; returns the outcome: whole, cut, refused or failed."""
        outcome = self._ended(request_id, item, answer)
        self.ends[outcome] += 1
        return outcome

    def vanished(self, item: CatalogueItem, answer: ObservedAnswer) -> None:
        """Judge the part of an answer that arrived before the client disconnected."""
        self.ends["vanished"] += 1
        for index, choice in answer.choices.items():
            self._compare(item, index, choice)

    def _ended(self, request_id: str, item: CatalogueItem, answer: ObservedAnswer) -> str:
        if answer.problem is not None:
            return self._problem(request_id, item, answer)
        if (problem_text := self._malformed_part(item, answer)) is not None:
            return self._fail("malformed", request_id, item, problem_text)
        cut = False
        for index, choice in answer.choices.items():
            self._compare(item, index, choice)
            if choice.cut:
                cut = True
                cause = choice.ends[0][1]
                if not self._explains(cause, request_id, answer):
                    return self._fail(f"cut by {cause}", request_id, item, f"after {len(choice.tokens)} tokens")
                self.explained[f"cut: {cause}"] += 1
        return "cut" if cut else "whole"

    def _problem(self, request_id: str, item: CatalogueItem, answer: ObservedAnswer) -> str:
        for index, choice in answer.choices.items():
            self._compare(item, index, choice)
        # A stream that sent keep-alives while it waited is refused by its last event.
        refused = answer.problem in ("503 paused", "error paused") and not any(
            c.tokens for c in answer.choices.values()
        )
        if refused and any(pause.refuses and pause.overlaps(answer) for pause in self.pauses):
            self.explained["503 paused"] += 1
            return "refused"
        if answer.problem == "502 worker_lost" and (
            self._explains("api_abort", request_id, answer) or self._explains("pause", request_id, answer)
        ):
            # The request was ended, and its server was lost before it could return the partial answer.
            self.explained["cut: partial answer lost"] += 1
            return "cut"
        return self._fail(answer.problem or "", request_id, item, answer.detail)

    def _explains(self, cause: str, request_id: str, answer: ObservedAnswer) -> bool:
        if cause == "api_abort":
            return request_id in self.aborted
        return cause == "pause" and any(pause.mode != "freeze" and pause.overlaps(answer) for pause in self.pauses)

    def _malformed_part(self, item: CatalogueItem, answer: ObservedAnswer) -> str | None:
        if sorted(answer.choices) != list(range(item.choices)):
            return f"received choices {sorted(answer.choices)}, but n was {item.choices}"
        if item.streamed and answer.done != 1:
            return f"received [DONE] {answer.done} times"
        for index, choice in answer.choices.items():
            if len(choice.ends) != 1:
                return f"choice {index} has {len(choice.ends)} finish reasons"
        tokens = sum(len(choice.tokens) for choice in answer.choices.values())
        return (
            None
            if answer.output_tokens == tokens
            else f"the usage counts {answer.output_tokens} tokens instead of {tokens}"
        )

    # -- tokens -------------------------------------------------------------------------

    def _compare(self, item: CatalogueItem, index: int, choice: ObservedChoice) -> None:
        self.checked += 1
        self.tokens += len(choice.tokens)
        if (problem_text := self._difference(item, index, choice)) is not None:
            self.wrong += 1
            self._add_failure(f"wrong tokens: request {item.number}, choice {index}: {problem_text}")

    def _difference(self, item: CatalogueItem, index: int, choice: ObservedChoice) -> str | None:
        if len(choice.versions) != len(choice.tokens):
            return f"{len(choice.tokens)} tokens, but {len(choice.versions)} weight versions"
        unknown = set(choice.versions) - set(self.weights)
        if unknown:
            return f"generated by weights that were never sent: {sorted(unknown)}"
        weights = tuple(self.weights[version] for version in choice.versions)
        if len(set(weights)) > 1:
            self.mixed.append(MixedWeightsAnswer(item, index, choice, weights))
            return None
        return self._compare_with_reference(item, index, choice, weights[0] if weights else "a")

    def _compare_with_reference(
        self, item: CatalogueItem, index: int, choice: ObservedChoice, weights: WeightsName
    ) -> str | None:
        expected = self.reference.answers[item.number, weights].choices[index]
        whole = bool(choice.ends) and not choice.cut
        if choice.tokens != (expected.tokens if whole else expected.tokens[: len(choice.tokens)]):
            return f"{first_difference(choice.tokens, expected.tokens)} under weights {weights}"
        if whole and (choice.text, choice.ends) != (expected.text, expected.ends):
            return f"{choice.ends} {choice.text!r} instead of {expected.ends} {expected.text!r}"
        # A partial answer may end within a character, which is sent as U+FFFD.
        if not expected.text.startswith(choice.text.rstrip("\ufffd")):
            return f"text {choice.text!r} is not a prefix of {expected.text!r}"
        return None

    async def check_mixed(self) -> None:
        """Check answers that several sets of weights generated: each part must continue the previous tokens."""
        for each, problem_text in await self.reference.differing(self.mixed):
            self.wrong += 1
            self._add_failure(f"wrong tokens: request {each.item.number}, choice {each.index}, {problem_text}")

    # -- failures -----------------------------------------------------------------------

    def _fail(self, problem: str, request_id: str, item: CatalogueItem, detail: str) -> str:
        self.unexplained[problem] += 1
        log.warning("unexplained: %s: %s", problem, request_id)
        self._add_failure(f"unexplained: {problem}: {request_id} (request {item.number}): {detail}")
        return "failed"

    def _add_failure(self, problem_text: str) -> None:
        if len(self.failures) < SHOWN:
            self.failures.append(problem_text)

    def summary(self) -> Mapping[str, object]:
        return {
            "ends": dict(self.ends),
            "tokens": self.tokens,
            "answers_compared": self.checked,
            "answers_of_several_weights": len(self.mixed),
            "explained": dict(self.explained),
            "unexplained": dict(self.unexplained),
            "wrong_answers": self.wrong,
        }
