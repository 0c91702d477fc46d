"""Counters of a router, for `/metrics`."""

from __future__ import annotations

from collections import Counter

from headgate.router.exchange.attempt import Answered, Lost, Outcome, Streamed, Withheld
from headgate.router.fleet.worker import Worker

# Values of the label `outcome`. A withheld end is called "veiled", because existing dashboards use that name.
OUTCOMES = {Answered: "answered", Streamed: "streamed", Withheld: "veiled", Lost: "lost"}


class RouterCounters:
    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0  # attempts that follow an attempt without output
        self.resumes = 0  # answers resumed at another worker
        self.aborts_ignored = 0  # aborts that named no request
        self.prefills_lost = 0  # prompts computed by the decode worker because no ticket came
        self.chosen: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.clients_left: Counter[str] = Counter()  # requests whose client left before their end, by cause
        self.attempts: Counter[tuple[str, str]] = Counter()  # (worker, outcome) -> number of attempts

    def count_move(self, *, resumed: bool) -> None:
        if resumed:
            self.resumes += 1
        else:
            self.retries += 1

    def count_attempt(self, worker: Worker, outcome: Outcome) -> None:
        self.attempts[worker.name, OUTCOMES[type(outcome)]] += 1
