"""Runs whole graphs by ONNX Runtime, where it is installed and has every operation of the graph."""
