"""From files, or from nothing, to batches: catalog, samples, synthetic, augment, order, loader."""
