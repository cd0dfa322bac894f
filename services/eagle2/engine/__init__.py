"""Who runs this step, on which device: batches, the two runners, the cycle loop."""
