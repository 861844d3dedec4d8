"""Models of every operator and version of ONNX, drawn and compared with ONNX Runtime: see `__main__`."""
