"""What each operation computes and refuses, against NumPy, formulas, ONNX's reference and PyTorch."""
