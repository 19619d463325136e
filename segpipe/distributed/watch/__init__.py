"""What watches the ranks of a run: collectives, stacks, memory, agreement."""
