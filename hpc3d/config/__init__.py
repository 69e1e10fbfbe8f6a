"""The input file as typed, frozen values, and every rule about sizes."""
