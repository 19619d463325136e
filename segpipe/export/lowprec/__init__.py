"""ONNX files in fp16 and int8, made from the fp32 file."""
