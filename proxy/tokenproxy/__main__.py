"""`python -m tokenproxy`: the command."""

import sys

from tokenproxy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
