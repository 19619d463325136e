"""fp16 and int8 versions of an ONNX graph."""
