"""The real command line in a process of its own, with the fake cell function in its workers."""

import sys

from bench import cli, runner

if __name__ == "__main__":
    runner.RUN_CELL = "fake_cells:run_cell"
    sys.exit(cli.main())
