"""``make bench``: everything there is to measure on this machine."""

import argparse

from benchmarks import cpu, data, methods

parser = argparse.ArgumentParser(description="Speed as ratios in one run.")
parser.add_argument("--quick", action="store_true", help="fewer repeats")
quick = parser.parse_args().quick
cpu.main(quick)
methods.main(quick)
print()
data.main(quick)
