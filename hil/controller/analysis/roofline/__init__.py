"""Distance of a model to the roofline: its work, the measured peaks of the board, and the attained share."""
