from __future__ import annotations

from importlib.util import find_spec

# Ray is installed in a separate environment: `make test-ray`.
collect_ignore = [] if find_spec("ray") else ["test_ray.py"]
