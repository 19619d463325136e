"""Data sets, real or synthetic, as batches: catalog, samples, synthetic, augment, order, loader."""
