"""What the paper computes, on tensors and numbers only; imports nothing else of ours."""
