"""Detection of changes in a series of runs: pure functions, without board and storage.

1. :func:`~hil.controller.analysis.detection.suspects.find_suspects` looks at the series after each new run. It is
   sensitive and therefore often wrong: a wrong suspect costs board time, not a false alarm.
2. The caller measures the suspect's program again, in turns with an older program on the same board.
   :class:`~hil.controller.analysis.detection.sequential.SequentialDecision` says after each round whether the answer is
   clear.
"""
