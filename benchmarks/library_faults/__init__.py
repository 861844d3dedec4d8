"""Which faults of cuDNN, that the CUDA engine avoids, the installed version has.

    python -m benchmarks.library_faults --out benchmarks/results

Needs a GPU. For each erratum (`engines/cuda/cudnn/errata.py`) there are problems for which it excludes
engines. Of each excluded engine, one candidate is built all the same (`candidates`). It runs on the
self-check's values, and is timed beside the plan that a service uses. Products and convolutions alone run on
normal values, too. An illegal address ends the CUDA context, so each candidate has a process of its own.

Then blocks of networks run without the barriers that stand before cuDNN's kernels (`races`), and the runs
whose results differ from those with barriers are counted.
"""
