"""Load reports in response headers (ORCA): a load balancer requests one, and reads the load of the server from the answer.

The format and the names of the metrics are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FORMAT_HEADER = "endpoint-load-metrics-format"  # of requests: TEXT or JSON, in any case
HEADER = b"endpoint-load-metrics"  # of responses


def load_report(format: str, metrics: Mapping[str, float]) -> str | None:
    """The value of the response header; None if the format is unknown, which is not an error."""
    match format.strip().upper():
        case "TEXT":
            return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        case "JSON":
            return "JSON " + msgspec.json.encode({"named_metrics": metrics}).decode()
    return None
