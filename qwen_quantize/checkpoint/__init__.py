"""Reading and writing checkpoints, byte for byte."""
