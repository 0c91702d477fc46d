"""Whether what clients were told is what they should have been told, and whether what was not is explained.

An answer is whole or it was cut; it is cut only if somebody asked for that: an abort of its id, or a pause that was on
while it lived. It is refused only while the fleet is paused. Everything else that a client sees is unexplained, whatever
was done to the fleet: a router with a server that is well makes up for it.
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

SHOWN = 20  # failures that are kept in words; all are counted


@dataclass(slots=True)
class PauseInterval:
    mode: str  # abort, drain, freeze
    refuses: bool
    begun_s: float
    ended_s: float = float("inf")

    def met(self, answer: ObservedAnswer) -> bool:
        return self.begun_s <= answer.ended_s and answer.begun_s <= self.ended_s


@dataclass
class AnswerJudge:
    reference: ReferenceAnswers
    pauses: list[PauseInterval] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)  # ids that somebody asked to end
    weights: dict[int, WeightsName] = field(default_factory=lambda: {0: "a"})  # by version
    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    checked: int = 0  # answers whose tokens were compared
    mixed: list[MixedWeightsAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def ended(self, request_id: str, item: CatalogueItem, answer: ObservedAnswer) -> str:
        """Judge one request that ran to its end; in a word, what became of it."""
        outcome = self._ended(request_id, item, answer)
        self.ends[outcome] += 1
        return outcome

    def vanished(self, item: CatalogueItem, answer: ObservedAnswer) -> None:
        """Its client has gone, and what it was told until then must still be right."""
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
        # A stream that has shown life while it waited is refused by its last event.
        refused = answer.problem in ("503 paused", "error paused") and not any(
            c.tokens for c in answer.choices.values()
        )
        if refused and any(pause.refuses and pause.met(answer) for pause in self.pauses):
            self.explained["503 paused"] += 1
            return "refused"
        if answer.problem == "502 worker_lost" and (
            self._explains("api_abort", request_id, answer) or self._explains("pause", request_id, answer)
        ):
            # It was ended, and the server that had its part was lost before it could tell.
            self.explained["cut: its part is lost"] += 1
            return "cut"
        return self._fail(answer.problem or "", request_id, item, answer.detail)

    def _explains(self, cause: str, request_id: str, answer: ObservedAnswer) -> bool:
        if cause == "api_abort":
            return request_id in self.aborted
        return cause == "pause" and any(pause.mode != "freeze" and pause.met(answer) for pause in self.pauses)

    def _malformed_part(self, item: CatalogueItem, answer: ObservedAnswer) -> str | None:
        if sorted(answer.choices) != list(range(item.choices)):
            return f"choices {sorted(answer.choices)} of {item.choices}"
        if item.streamed and answer.done != 1:
            return f"{answer.done} times [DONE]"
        for index, choice in answer.choices.items():
            if len(choice.ends) != 1:
                return f"choice {index} has {len(choice.ends)} ends"
        tokens = sum(len(choice.tokens) for choice in answer.choices.values())
        return None if answer.output_tokens == tokens else f"usage says {answer.output_tokens} tokens, not {tokens}"

    # -- tokens -------------------------------------------------------------------------

    def _compare(self, item: CatalogueItem, index: int, choice: ObservedChoice) -> None:
        self.checked += 1
        self.tokens += len(choice.tokens)
        if (problem_text := self._difference(item, index, choice)) is not None:
            self.wrong += 1
            self._add_failure(f"wrong tokens: request {item.number}, choice {index}: {problem_text}")

    def _difference(self, item: CatalogueItem, index: int, choice: ObservedChoice) -> str | None:
        if len(choice.versions) != len(choice.tokens):
            return f"{len(choice.tokens)} tokens, and versions of {len(choice.versions)}"
        unknown = set(choice.versions) - set(self.weights)
        if unknown:
            return f"made by weights that nobody has sent: {sorted(unknown)}"
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
            return f"{choice.ends} {choice.text!r} and not {expected.ends} {expected.text!r}"
        # A part may end in half a character, which is told as one that stands for it.
        if not expected.text.startswith(choice.text.rstrip("\ufffd")):
            return f"text {choice.text!r} does not begin {expected.text!r}"
        return None

    async def check_mixed(self) -> None:
        """Answers of which several sets of weights made a part each: every part follows from what is before it."""
        for each, problem_text in await self.reference.differing(self.mixed):
            self.wrong += 1
            self._add_failure(f"wrong tokens: request {each.item.number}, choice {each.index}, {problem_text}")

    # -- failing ------------------------------------------------------------------------

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
