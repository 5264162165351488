"""FedFA on Flower: any experiment of the project across real sites. Needs ``pip install 'fedfa[flower]'``."""

from __future__ import annotations

import os

# Set before flwr is imported, which reads them then: nothing is sent to anyone but the federation's own server.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
