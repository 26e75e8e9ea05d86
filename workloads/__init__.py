"""What arrives and when: arrivals, lengths, prompts, conversations, closed loops and readers of public traces.

Knows: numpy, scipy and its own random streams. Must not know: `sim`, YAML, or what becomes of a request.
"""
