"""Eight networks as ONNX files without their weights, which are made again when a file is read.

`data/` has, for each network, files `NETWORK.OPSET.onnx`, PyTorch's outputs as `NETWORK.npz`, and what
PyTorch runs as `NETWORK.json`. `export.py` writes them, and says how.
"""
