"""One captured graph through all stages: partitioned, planned, ordered, emitted, agreed upon."""
