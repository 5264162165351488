"""The end of `make demo`: FedAvg and FedFA side by side, from their run folders."""

from pathlib import Path

import fedfa
from fedfa.report.progress import print_comparison

runs = [fedfa.run("digit-sites", algorithm=name) for name in ("fedavg", "fedfa")]  # done already: nothing is trained
print_comparison(fedfa.compare(*runs), png=Path("runs/demo.png"), csv=Path("runs/demo.csv"))
