"""What has happened in a router so far, for `/metrics`."""

from __future__ import annotations

from collections import Counter

from headgate.router.exchange.attempt import Answered, Lost, Outcome, Streamed, Withheld
from headgate.router.fleet.worker import Worker

OUTCOMES = {kind: kind.__name__.lower() for kind in (Answered, Streamed, Withheld, Lost)}


class RouterCounters:
    """What has happened so far, for `/metrics`."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0  # attempts after one that brought nothing
        self.resumes = 0  # answers that another worker went on with
        self.aborts_ignored = 0  # that did not say of what
        self.prefills_lost = 0  # prompts that were computed where they were answered, because their ticket never came
        self.chosen: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.left: Counter[str] = Counter()  # by their clients, before they had ended
        self.attempts: Counter[tuple[str, str]] = Counter()  # by worker and outcome

    def moved(self, *, resumed: bool) -> None:
        if resumed:
            self.resumes += 1
        else:
            self.retries += 1

    def attempt(self, worker: Worker, outcome: Outcome) -> None:
        self.attempts[worker.name, OUTCOMES[type(outcome)]] += 1
