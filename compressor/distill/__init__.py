"""Training the scales, norms and biases of a quantized model so that its logits are the original's again."""
