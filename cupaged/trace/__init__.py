"""Traces: what a run's requests and plans were, written as it goes; `python -m cupaged.trace` reads them.

A trace holds lengths, times, sampling parameters and every step's plan. Of texts it holds only keyed hashes
of prefixes, which say that two are equal and nothing else, unless token ids were asked for.
"""
