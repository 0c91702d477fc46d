"""`python -m headgate.cli` is `headgate`."""

import sys

from headgate.cli import main

sys.exit(main())
