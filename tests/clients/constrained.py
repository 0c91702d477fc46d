"""Settings with which a random model ends its answers by itself: clients treat an answer that was cut as a failure."""

from __future__ import annotations

END, BLANKS = 256, (197, 198, 201, 220)  # token ids of `headgate.testing.tiny`: the end, and white space
# A constrained answer ends as soon as the grammar allows it.
BIAS = {str(END): 100} | dict.fromkeys(map(str, BLANKS), -100)
# Any of these tokens ends an answer, but not before the fourth one.
BRIEF = {"min_tokens": 4, "stop_token_ids": list(range(256))}
