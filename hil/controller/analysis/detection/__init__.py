"""Detection of changes in a series of runs. Pure functions, without a board and storage.

1. :func:`~hil.controller.analysis.detection.suspects.find_suspects` examines the series after every new run. The
   function is sensitive and therefore often wrong: a wrong suspect costs board time, but causes no false alarm.
2. The caller measures the suspect's program again, in turns with an older program on the same board.
   :class:`~hil.controller.analysis.detection.sequential.SequentialDecision` decides after every round whether the
   verdict is clear.
"""
