"""What is exported: the network with its pre- and post-processing, as ONNX files."""
