"""Formats for groups of linears, chosen by what each costs in KL, under a budget of bytes."""
