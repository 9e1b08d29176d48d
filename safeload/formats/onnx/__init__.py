"""ONNX models: the initializers of their graphs."""
