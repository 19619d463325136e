"""Checks that augmentation is a pure function of sample and key."""
