"""``make bench``: everything there is to measure on this machine."""

import argparse

from benchmarks import cpu

parser = argparse.ArgumentParser(description="Speed as ratios in one run.")
parser.add_argument("--quick", action="store_true", help="fewer repeats")
cpu.main(parser.parse_args().quick)
