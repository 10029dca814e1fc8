"""Model families as records: which tensors exist and what they feed."""
