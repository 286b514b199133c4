"""`python -m retrograde`."""

import sys

from retrograde.cli import main

sys.exit(main())
