"""Models of other libraries, converted against unconverted, paired by seed."""
