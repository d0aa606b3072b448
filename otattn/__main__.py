"""``python -m otattn``."""

import sys

from otattn.cli import main

sys.exit(main())
