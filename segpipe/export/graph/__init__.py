"""What is exported: the network with its pre- and post-processing, as ONNX, TorchScript and torch.export files."""
