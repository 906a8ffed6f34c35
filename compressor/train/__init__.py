"""Proposer heads trained on what the target itself writes: answers, hidden states, the loop, export and checks."""
