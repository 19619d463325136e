"""One command per claim; results with the hardware named lie in results/."""
