"""Measures what the service costs on a GPU, beside what else people would use: one run, one JSON file.

    python -m benchmarks.gpu --out benchmarks/results            # everything, within ten minutes
    python -m benchmarks.gpu --only small,polling --quick        # parts of it, a few seconds each
    python -m benchmarks.gpu --device cpu --quick                # the same code without a GPU: a dry run
    python -m benchmarks.gpu --only small --profile              # and where the microseconds go
    python -m benchmarks.gpu.page RESULT --page docs/measurements.md

Each part runs in a process of its own, so that one that fails, hangs or loses its context costs the others
nothing. What is compared is measured in one process, in turns, round after round, warmed up; a figure is the
median of the rounds, and a ratio the median of the rounds' own ratios. Nothing is asserted.
"""
