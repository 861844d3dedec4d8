"""The test suite."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before NumPy is loaded: beside other workers, its threads wait for each other most of the time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
