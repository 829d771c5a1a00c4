"""`python -m curlfree`, which torchrun needs: the command line."""

import sys

from curlfree.cli import main

sys.exit(main())
